#pragma once

#include <elf.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace multirail::nixl {

/// A shared library, read from its file. It is never loaded, so none of its code runs.
class ElfFile {
  public:
    /// Reads the file. Empty if there is none, or if it is no 64-bit library of this byte order.
    static std::optional<ElfFile> read(const std::string &path);

    /// The entries of a class's table of virtual functions: the mangled name of each function, or "" for an entry whose
    /// function has no name. The two entries before the functions are left out. Empty if the library has no such table.
    [[nodiscard]] std::vector<std::string> virtual_functions(std::string_view mangled_table) const;

  private:
    explicit ElfFile(std::string bytes) : bytes_(std::move(bytes)) {}

    [[nodiscard]] std::optional<Elf64_Sym> symbol(std::string_view name) const;
    [[nodiscard]] std::string name_of(const Elf64_Sym &symbol) const;
    [[nodiscard]] std::string function_at(Elf64_Addr address) const;
    [[nodiscard]] bool find_sections();
    template <typename T> [[nodiscard]] std::vector<T> table(const Elf64_Shdr &section) const;

    std::string bytes_;
    std::string names_;
    std::vector<Elf64_Sym> symbols_;
    std::vector<Elf64_Rela> relocations_;
};

}  // namespace multirail::nixl

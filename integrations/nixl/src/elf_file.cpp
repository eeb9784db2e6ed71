#include "elf_file.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>

namespace multirail::nixl {

namespace {

constexpr unsigned char kByteOrder = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
constexpr std::size_t kWord = 8;

}  // namespace

std::optional<ElfFile> ElfFile::read(const std::string &path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
        return std::nullopt;
    }
    ElfFile file{std::string(std::istreambuf_iterator<char>(stream), {})};
    if (!file.find_sections()) {
        return std::nullopt;
    }
    return file;
}

std::vector<std::string> ElfFile::virtual_functions(std::string_view mangled_table) const {
    const auto table = symbol(mangled_table);
    if (!table || table->st_size < 2 * kWord) {
        return {};
    }
    std::vector<std::string> functions(table->st_size / kWord - 2);
    const Elf64_Addr first = table->st_value + 2 * kWord;
    for (const Elf64_Rela &relocation : relocations_) {
        const Elf64_Addr offset = relocation.r_offset - first;
        if (relocation.r_offset < first || offset / kWord >= functions.size()) {
            continue;
        }
        const std::size_t number = ELF64_R_SYM(relocation.r_info);
        const bool is_named = number != 0 && number < symbols_.size();
        functions[offset / kWord] =
            is_named ? name_of(symbols_[number]) : function_at(static_cast<Elf64_Addr>(relocation.r_addend));
    }
    return functions;
}

std::optional<Elf64_Sym> ElfFile::symbol(std::string_view name) const {
    for (const Elf64_Sym &symbol : symbols_) {
        if (symbol.st_shndx != SHN_UNDEF && name_of(symbol) == name) {
            return symbol;
        }
    }
    return std::nullopt;
}

std::string ElfFile::name_of(const Elf64_Sym &symbol) const {
    if (symbol.st_name >= names_.size()) {
        return "";
    }
    return std::string(names_.c_str() + symbol.st_name);
}

std::string ElfFile::function_at(Elf64_Addr address) const {
    for (const Elf64_Sym &symbol : symbols_) {
        if (symbol.st_value == address && ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) {
            return name_of(symbol);
        }
    }
    return "";
}

bool ElfFile::find_sections() {
    Elf64_Ehdr header;
    if (bytes_.size() < sizeof(header)) {
        return false;
    }
    std::memcpy(&header, bytes_.data(), sizeof(header));
    const unsigned char *identity = header.e_ident;
    if (std::memcmp(identity, ELFMAG, SELFMAG) != 0 || identity[EI_CLASS] != ELFCLASS64 ||
        identity[EI_DATA] != kByteOrder || header.e_shentsize != sizeof(Elf64_Shdr)) {
        return false;
    }
    Elf64_Shdr all{};
    all.sh_offset = header.e_shoff;
    all.sh_size = header.e_shnum * sizeof(Elf64_Shdr);
    const auto sections = table<Elf64_Shdr>(all);
    for (const Elf64_Shdr &section : sections) {
        if (section.sh_type == SHT_RELA) {
            const auto more = table<Elf64_Rela>(section);
            relocations_.insert(relocations_.end(), more.begin(), more.end());
        }
        if (section.sh_type == SHT_DYNSYM && section.sh_link < sections.size()) {
            symbols_ = table<Elf64_Sym>(section);
            const auto names = table<char>(sections[section.sh_link]);
            names_.assign(names.begin(), names.end());
        }
    }
    return !symbols_.empty() && !names_.empty();
}

template <typename T> std::vector<T> ElfFile::table(const Elf64_Shdr &section) const {
    // A damaged file may state any offset and size.
    if (section.sh_offset > bytes_.size() || section.sh_size > bytes_.size() - section.sh_offset) {
        return {};
    }
    std::vector<T> rows(section.sh_size / sizeof(T));
    std::memcpy(rows.data(), bytes_.data() + section.sh_offset, rows.size() * sizeof(T));
    return rows;
}

}  // namespace multirail::nixl

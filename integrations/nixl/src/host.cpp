#include "host.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "elf_file.hpp"

namespace multirail::nixl {

namespace {

/// Versions that the tests run with.
constexpr std::array<std::string_view, 3> kTested = {"1.4.1", "1.5.0", "1.5.1"};
/// Lists of descriptors had other fields before this version.
constexpr std::tuple kOldest{1, 4, 0};

/// A class of NIXL's own, in a plug-in of every wheel, that has the functions of a back end and no others.
constexpr const char *kKnownPlugin = "plugins/libplugin_POSIX.so";
constexpr const char *kKnownTable = "_ZTV15nixlPosixEngine";
/// Its virtual functions, in the order in which NIXL calls them. The first two are destructors.
constexpr std::array<std::string_view, nixl_abi::kEngineSlots> kFunctions = {
    "D1Ev",         "D0Ev",          "supportsRemote",     "supportsLocal", "supportsNotif", "getSupportedMems",
    "registerMem",  "deregisterMem", "connect",            "disconnect",    "unloadMD",      "prepXfer",
    "postXfer",     "checkXfer",     "releaseReqH",        "prepMemView",   "prepMemView",   "releaseMemView",
    "getPublicData", "getConnInfo",  "loadRemoteConnInfo", "loadRemoteMD",  "loadLocalMD",   "getNotifs",
    "genNotif",     "queryMem",      "estimateXferCost",
};

// `std::filesystem` would need a newer C++ library than NIXL's wheels do.

std::string folder_of(const std::string &path) {
    const auto slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string name_of(const std::string &path) { return path.substr(path.rfind('/') + 1); }

bool begins_with(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

bool ends_with(std::string_view text, std::string_view suffix) {
    return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

std::string find_nixl() {
    std::string found;
    const auto look = [](dl_phdr_info *info, std::size_t, void *out) -> int {
        const std::string path(info->dlpi_name == nullptr ? "" : info->dlpi_name);
        if (!begins_with(name_of(path), "libnixl.so")) {
            return 0;
        }
        *static_cast<std::string *>(out) = folder_of(path);
        return 1;
    };
    dl_iterate_phdr(look, &found);
    return found;
}

std::string own_backend() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void *>(&own_backend), &info) == 0 || info.dli_fname == nullptr) {
        return "";
    }
    constexpr std::string_view prefix = "libplugin_";
    const std::string name = name_of(info.dli_fname);
    return begins_with(name, prefix) ? name.substr(prefix.size(), name.find('.') - prefix.size()) : "";
}

std::tuple<int, int, int> parse(const std::string &version) {
    int parts[3] = {0, 0, 0};
    const char *at = version.c_str();
    for (int &part : parts) {
        char *end = nullptr;
        part = static_cast<int>(std::strtol(at, &end, 10));
        at = *end == '.' ? end + 1 : end;
    }
    return {parts[0], parts[1], parts[2]};
}

/// Whether the bytes at a string's place are a string: a short one keeps its characters in itself.
bool is_short_string(const std::string &text, std::string_view expected) {
    std::uintptr_t words[2];
    std::memcpy(words, static_cast<const void *>(&text), sizeof(words));
    const bool is_inside = words[0] == reinterpret_cast<std::uintptr_t>(&text) + 2 * sizeof(std::uintptr_t);
    return words[1] == expected.size() && (is_inside || expected.size() > 15) && text == expected;
}

}  // namespace

Host::Host() : folder_(find_nixl()), version_(find_version()), backend_(own_backend()) {}

std::string Host::refusal() const {
    const std::string nixl = version_.empty() ? "this NIXL (" + folder_ + ")" : "NIXL " + version_;
    const std::string install = "; install nixl 1.4.1, 1.5.0 or 1.5.1, or a multirail that knows this version";
    if (folder_.empty()) {
        return "the process has not loaded libnixl.so, so its version can not be checked; let NIXL load the plug-in";
    }
    if (!version_.empty() && parse(version_) < kOldest) {
        return nixl + " has an older interface" + install;
    }
    const std::string differing = differing_function();
    if (!differing.empty()) {
        const bool is_tested = std::find(kTested.begin(), kTested.end(), version_) != kTested.end();
        if (differing != "?" || !is_tested) {
            return nixl + (differing == "?" ? " has no " + std::string(kKnownPlugin) + " to compare its interface with"
                                            : " has another interface: " + differing) +
                   install;
        }
    }
    return "";
}

std::string Host::refusal(const nixl_abi::EngineOptions *options) const {
    const bool fits = options != nullptr && is_short_string(options->backend, backend_) &&
                      options->parameters != nullptr && options->local_agent.size() < (1 << 20) &&
                      options->thread_sync >= nixl_abi::ThreadSync::kNone &&
                      options->thread_sync <= nixl_abi::ThreadSync::kReadWrite;
    return fits ? "" : "the options of a new engine have another layout; install a multirail that knows this NIXL";
}

std::string Host::find_version() const {
    // The wheel `nixl_cu12` has its library in `.nixl_cu12.mesonpy.libs`, and its version in the name of the folder
    // `nixl_cu12-VERSION.dist-info` beside that.
    std::string wheel = name_of(folder_);
    const auto end = wheel.find(".mesonpy");
    if (wheel.empty() || wheel[0] != '.' || end == std::string::npos) {
        return "";
    }
    wheel = wheel.substr(1, end - 1) + "-";
    const std::unique_ptr<DIR, int (*)(DIR *)> folder(opendir(folder_of(folder_).c_str()), closedir);
    constexpr std::string_view suffix = ".dist-info";
    for (const dirent *entry = nullptr; folder && (entry = readdir(folder.get())) != nullptr;) {
        const std::string_view name(entry->d_name);
        if (begins_with(name, wheel) && ends_with(name, suffix)) {
            return std::string(name.substr(wheel.size(), name.size() - wheel.size() - suffix.size()));
        }
    }
    return "";
}

/// Compares the order of virtual functions. Returns how the first one differs, or "?" if there is nothing to compare.
std::string Host::differing_function() const {
    const auto file = ElfFile::read(folder_ + "/" + kKnownPlugin);
    const auto functions = file ? file->virtual_functions(kKnownTable) : std::vector<std::string>();
    if (functions.empty()) {
        return "?";
    }
    for (std::size_t at = 0; at < std::min(functions.size(), kFunctions.size()); ++at) {
        // A destructor may be emitted under the name of its base variant.
        const bool is_destructor = at < 2 && functions[at].find('D') != std::string::npos;
        if (!is_destructor && functions[at].find(kFunctions[at]) == std::string::npos) {
            return "function " + std::to_string(at) + " is " + functions[at] + " instead of " +
                   std::string(kFunctions[at]);
        }
    }
    if (functions.size() != kFunctions.size()) {
        return std::to_string(functions.size()) + " functions instead of " + std::to_string(kFunctions.size());
    }
    return "";
}

}  // namespace multirail::nixl

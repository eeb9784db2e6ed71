#include "parameters.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace multirail::nixl {

namespace {

struct Known {
    std::string_view name;
    std::string_view fallback;
};

/// This back end's own parameter.
constexpr std::string_view kReport = "report";
/// The others are options of `mr_fabric_open`, which documents them. Without a default here, multirail's own applies.
constexpr std::array kKnown = {
    Known{"transports", ""},        Known{"devices", ""},       Known{"provider", ""},
    Known{"node", ""},              Known{"domains", ""},       Known{"queue_pairs", ""},
    Known{"gid_index", ""},         Known{"traffic_class", ""}, Known{"service_level", ""},
    Known{"staging", ""},           Known{"rail_groups", ""},   Known{"gpus", ""},
    Known{"token_file", ""},        Known{"tls_cert", ""},      Known{"tls_key", ""},
    Known{"tls_ca", ""},            Known{"listen", "0.0.0.0:0"}, Known{"advertise", ""},
    Known{"notifications", "16777216"}, Known{"path_policy", ""}, Known{"deadline_ms", "30000"},
    Known{"heartbeat_ms", "500"},   Known{"peer_timeout_ms", "5000"}, Known{"handshake_ms", "5000"},
    Known{"max_operations", "4096"}, Known{"threads", ""},      Known{"pinning", ""},
    Known{"stall_after_ms", "1000"}, Known{kReport, "0"},
};

/// What NIXL's Python API calls the number of threads of some back ends.
constexpr std::string_view kThreadsOfNixl = "num_threads";
constexpr std::string_view kEnvironment = "MULTIRAIL_NIXL_";
/// The variable of the command. Whoever has set it does not want to be open to strangers here.
constexpr const char *kTokenFile = "MULTIRAIL_TOKEN_FILE";

bool is_known(std::string_view name) {
    return std::any_of(kKnown.begin(), kKnown.end(), [&](const Known &known) { return known.name == name; });
}

std::string list_of_known() {
    std::string list;
    for (const Known &known : kKnown) {
        list.append(list.empty() ? "" : ", ").append(known.name);
    }
    return list;
}

[[noreturn]] void refuse(std::string_view what) {
    throw std::invalid_argument("there is no parameter " + std::string(what) + "; there are " + list_of_known());
}

/// The variables of the environment that begin with `kEnvironment`, by the names of their parameters.
nixl_abi::Parameters of_environment() {
    nixl_abi::Parameters found;
    if (const char *file = std::getenv(kTokenFile); file != nullptr) {
        found["token_file"] = file;
    }
    for (char **entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
        const std::string_view text(*entry);
        const auto equals = text.find('=');
        if (text.substr(0, kEnvironment.size()) != kEnvironment || equals == std::string_view::npos) {
            continue;
        }
        std::string name(text.substr(kEnvironment.size(), equals - kEnvironment.size()));
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
        if (!is_known(name)) {
            refuse(text.substr(0, equals));
        }
        found[name] = text.substr(equals + 1);
    }
    return found;
}

}  // namespace

Parameters::Parameters(const nixl_abi::Parameters &given) {
    nixl_abi::Parameters chosen = of_environment();
    for (const auto &[name, value] : given) {
        const std::string_view known = name == kThreadsOfNixl ? "threads" : std::string_view(name);
        if (!is_known(known)) {
            refuse("'" + name + "'");
        }
        // Callers may pass on what `defaults` returned, with "" for parameters that have none.
        if (!value.empty()) {
            chosen[std::string(known)] = value;
        }
    }
    for (const Known &known : kKnown) {
        const auto found = chosen.find(std::string(known.name));
        std::string value(found == chosen.end() || found->second.empty() ? known.fallback : found->second);
        if (!value.empty()) {
            values_.emplace_back(known.name, std::move(value));
        }
    }
    constexpr std::array kReports = {"0", "1", "2"};
    const auto found = std::find(kReports.begin(), kReports.end(), value(kReport));
    if (found == kReports.end()) {
        throw std::invalid_argument("report is 0, 1 (sums at the agent's end) or 2 (each transfer, too), not '" +
                                    value(kReport) + "'");
    }
    report_ = static_cast<Report>(found - kReports.begin());
}

nixl_abi::Parameters Parameters::defaults() {
    nixl_abi::Parameters all;
    for (const Known &known : kKnown) {
        all.emplace(known.name, known.fallback);
    }
    return all;
}

std::chrono::milliseconds Parameters::deadline() const {
    // A wrong number is refused when the fabric is opened.
    return std::chrono::milliseconds(std::strtoll(value("deadline_ms").c_str(), nullptr, 10));
}

std::vector<mr_option> Parameters::options() const {
    std::vector<mr_option> options;
    for (const auto &[name, value] : values_) {
        if (name != kReport) {
            options.push_back({name.c_str(), value.c_str()});
        }
    }
    return options;
}

/// The value of a parameter that has a default.
const std::string &Parameters::value(std::string_view name) const {
    const auto has_name = [&](const auto &entry) { return entry.first == name; };
    return std::find_if(values_.begin(), values_.end(), has_name)->second;
}

}  // namespace multirail::nixl

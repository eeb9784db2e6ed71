#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "multirail.h"
#include "nixl_abi.hpp"

namespace multirail::nixl {

/// The settings of an engine's fabric: those that the caller of NIXL gives, then those of the environment
/// (`MULTIRAIL_NIXL_` and the name in capitals), then the defaults.
class Parameters {
  public:
    /// Throws `std::invalid_argument` for an unknown name. Its text lists the known ones.
    explicit Parameters(const nixl_abi::Parameters &given);

    /// All names and their defaults; "" stands for multirail's own default.
    static nixl_abi::Parameters defaults();

    /// Whether the engine prints the counters of its rails when it ends.
    [[nodiscard]] bool reports() const;

    /// The time that a transfer has.
    [[nodiscard]] std::chrono::milliseconds deadline() const;

    /// For `mr_fabric_open`. Valid as long as this object.
    [[nodiscard]] std::vector<mr_option> options() const;

  private:
    [[nodiscard]] const std::string &value(std::string_view name) const;

    std::vector<std::pair<std::string, std::string>> values_;
};

}  // namespace multirail::nixl

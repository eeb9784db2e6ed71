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
    /// Throws `std::invalid_argument` for an unknown name, whose text lists the known ones, and for a wrong `report`.
    explicit Parameters(const nixl_abi::Parameters &given);

    /// All names and their defaults; "" stands for multirail's own default.
    static nixl_abi::Parameters defaults();

    /// What is printed on standard error: nothing; the sums of the receipts and the counters of the rails, at the
    /// agent's end; each receipt, too.
    enum class Report { kNone, kAtEnd, kEach };
    [[nodiscard]] Report report() const noexcept { return report_; }

    /// The time that a transfer has.
    [[nodiscard]] std::chrono::milliseconds deadline() const;

    /// For `mr_fabric_open`. Valid as long as this object.
    [[nodiscard]] std::vector<mr_option> options() const;

  private:
    [[nodiscard]] const std::string &value(std::string_view name) const;

    std::vector<std::pair<std::string, std::string>> values_;
    Report report_ = Report::kNone;
};

}  // namespace multirail::nixl

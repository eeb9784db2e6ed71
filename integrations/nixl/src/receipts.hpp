#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "multirail.h"
#include "nixl_abi.hpp"

namespace multirail::nixl {

/// What an agent's transfers have moved, by the receipts of the library: with which agent, over which device, by which
/// path. Any thread may call any function.
class Receipts {
  public:
    /// `each` prints the receipt of every transfer at once.
    Receipts(std::string agent, bool each) : agent_(std::move(agent)), each_(each) {}

    /// Adds a transfer with `other` that has succeeded.
    void add(mr_op op, nixl_abi::Operation operation, const std::string &other);

    /// Prints the sums, one line for each pair of agent and direction.
    void print() const;

  private:
    /// Transport, device, and MR_PATH_... flags.
    using Way = std::tuple<std::string, std::string, std::uint32_t>;
    struct Sum {
        std::uint64_t transfers = 0;
        std::uint64_t bytes = 0;
        std::map<Way, std::uint64_t> bytes_by_way;
    };

    const std::string agent_;
    const bool each_;
    mutable std::mutex mutex_;
    /// By direction and agent, in words.
    std::map<std::string, Sum> sums_;
};

}  // namespace multirail::nixl

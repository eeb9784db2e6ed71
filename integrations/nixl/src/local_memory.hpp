#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "handle.hpp"
#include "nixl_abi.hpp"

namespace multirail::nixl {

/// A range of memory that this agent has registered.
class LocalMemory final : public nixl_abi::Memory {
  public:
    LocalMemory(std::uintptr_t base, RegionHandle region, std::string descriptor)
        : Memory(true), base_(base), region_(std::move(region)), descriptor_(std::move(descriptor)) {}

    [[nodiscard]] std::uintptr_t base() const noexcept { return base_; }
    [[nodiscard]] mr_region region() const noexcept { return region_.number(); }
    [[nodiscard]] const std::string &descriptor() const noexcept { return descriptor_; }

  private:
    const std::uintptr_t base_;
    const RegionHandle region_;
    const std::string descriptor_;
};

}  // namespace multirail::nixl

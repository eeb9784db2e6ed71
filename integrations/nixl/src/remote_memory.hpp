#pragma once

#include <memory>
#include <utility>

#include "nixl_abi.hpp"
#include "remote_region.hpp"

namespace multirail::nixl {

/// What NIXL holds of a range of another agent's memory, or of this agent's own as the remote side of a transfer.
class RemoteMemory final : public nixl_abi::Memory {
  public:
    explicit RemoteMemory(std::shared_ptr<RemoteRegion> region) : Memory(false), region_(std::move(region)) {}

    [[nodiscard]] const std::shared_ptr<RemoteRegion> &region() const noexcept { return region_; }

  private:
    const std::shared_ptr<RemoteRegion> region_;
};

}  // namespace multirail::nixl

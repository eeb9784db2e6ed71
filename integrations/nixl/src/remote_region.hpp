#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "connection.hpp"
#include "handle.hpp"

namespace multirail::nixl {

/// A range of another agent's memory. It is imported for a connection when a transfer first needs it.
class RemoteRegion {
  public:
    RemoteRegion(std::uintptr_t base, std::string descriptor) : base_(base), descriptor_(std::move(descriptor)) {}

    [[nodiscard]] std::uintptr_t base() const noexcept { return base_; }
    /// The handle of the region for this connection, which stays valid as long as this object has no other connection.
    mr_status import(const std::shared_ptr<Connection> &connection, mr_remote &out);

  private:
    const std::uintptr_t base_;
    const std::string descriptor_;

    std::mutex mutex_;
    std::shared_ptr<Connection> connection_;
    RemoteHandle remote_;
};

}  // namespace multirail::nixl

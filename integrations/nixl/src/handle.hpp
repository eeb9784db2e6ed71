#pragma once

#include <cstdint>
#include <utility>

#include "multirail.h"

namespace multirail::nixl {

/// Owns a handle of the C interface, and releases it with its function.
template <mr_status (*Release)(std::uint64_t)> class Handle {
  public:
    Handle() = default;
    Handle(Handle &&other) noexcept : number_(std::exchange(other.number_, 0)) {}
    Handle &operator=(Handle &&other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Handle() { reset(); }

    explicit operator bool() const noexcept { return number_ != 0; }
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

    /// Where a function of the C interface writes a new handle. Releases the one before.
    [[nodiscard]] std::uint64_t *out() {
        reset();
        return &number_;
    }

    void reset() {
        if (number_ != 0) {
            Release(std::exchange(number_, 0));
        }
    }

  private:
    std::uint64_t number_ = 0;
};

using FabricHandle = Handle<mr_fabric_close>;
using RegionHandle = Handle<mr_region_release>;
using PeerHandle = Handle<mr_peer_release>;
using RemoteHandle = Handle<mr_remote_release>;
using LocalListHandle = Handle<mr_local_list_release>;
using RemoteListHandle = Handle<mr_remote_list_release>;
using PreparedHandle = Handle<mr_prepared_release>;
using OperationHandle = Handle<mr_op_release>;

}  // namespace multirail::nixl

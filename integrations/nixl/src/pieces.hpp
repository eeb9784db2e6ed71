#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "connection.hpp"
#include "handle.hpp"
#include "multirail.h"
#include "nixl_abi.hpp"
#include "remote_region.hpp"

namespace multirail::nixl {

/// The pieces of a transfer, before it is planned for a connection.
class Pieces {
  public:
    /// Takes the ranges of two lists pair by pair. Ranges without bytes are left out.
    /// Empty if the lists do not fit each other.
    static std::unique_ptr<Pieces> of(const nixl_abi::TransferList &local, const nixl_abi::TransferList &remote);

    /// The bytes of all pieces.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] bool empty() const noexcept { return local_.empty(); }

    /// Imports the remote regions for this connection, and plans the transfer.
    mr_status prepare(const std::shared_ptr<Connection> &connection, nixl_abi::Operation operation,
                      PreparedHandle &out) const;

  private:
    void add(const nixl_abi::TransferRange &local, const nixl_abi::TransferRange &remote);

    std::uint64_t bytes_ = 0;
    std::vector<mr_local_entry> local_;
    /// `remote` is an index into `regions_`, because the regions are not imported yet.
    std::vector<mr_remote_entry> remote_;
    /// NIXL may unload its own objects of these regions while a transfer waits for its connection.
    std::vector<std::shared_ptr<RemoteRegion>> regions_;
};

}  // namespace multirail::nixl

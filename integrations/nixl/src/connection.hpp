#pragma once

#include "handle.hpp"

namespace multirail::nixl {

/// One connection to another agent. Imported regions and prepared transfers belong to it, and are of no use with a
/// later connection to the same agent.
class Connection {
  public:
    explicit Connection(PeerHandle peer) : peer_(std::move(peer)) {}

    [[nodiscard]] mr_peer peer() const noexcept { return peer_.number(); }
    /// `MR_OK` while the agent is connected, as far as this side knows; else the reason why it is gone.
    [[nodiscard]] mr_status check() const { return mr_peer_check(peer()); }

  private:
    PeerHandle peer_;
};

}  // namespace multirail::nixl

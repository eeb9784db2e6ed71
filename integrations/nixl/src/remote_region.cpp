#include "remote_region.hpp"

namespace multirail::nixl {

mr_status RemoteRegion::import(const std::shared_ptr<Connection> &connection, mr_remote &out) {
    const std::lock_guard lock(mutex_);
    if (connection_ != connection) {
        RemoteHandle remote;
        const mr_status status =
            mr_peer_import(connection->peer(), descriptor_.data(), descriptor_.size(), remote.out());
        if (status != MR_OK) {
            return status;
        }
        remote_ = std::move(remote);
        connection_ = connection;
    }
    out = remote_.number();
    return MR_OK;
}

}  // namespace multirail::nixl

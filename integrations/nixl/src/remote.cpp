#include "remote.hpp"

#include "status.hpp"

namespace multirail::nixl {

mr_status Remote::connect(std::chrono::nanoseconds patience, std::shared_ptr<Connection> &out, std::string &why) {
    const std::lock_guard lock(mutex_);
    if (removed_) {
        why = "agent " + name_ + " was removed; load its metadata again";
        return MR_ERROR_CLOSED;
    }
    if (connection_ && connection_->check() != MR_OK) {
        connection_.reset();
    }
    if (!connection_) {
        mr_status status = MR_OK;
        if (!attempt_) {
            status = metadata_.empty() ? connect_to_itself() : start();
        }
        if (status == MR_OK && !connection_) {
            status = finish(patience);
        }
        if (status != MR_OK) {
            why = "agent " + name_ + " can not be reached: " + last_error();
            return status;
        }
    }
    out = connection_;
    return MR_OK;
}

void Remote::lose(const std::shared_ptr<Connection> &connection) {
    const std::lock_guard lock(mutex_);
    if (connection_ == connection) {
        connection_.reset();
    }
}

void Remote::disconnect() {
    const std::lock_guard lock(mutex_);
    removed_ = true;
    attempt_.reset();
    if (connection_) {
        mr_peer_disconnect(connection_->peer());
        connection_.reset();
    }
}

void Remote::measure(std::uint64_t bytes, std::uint64_t nanoseconds) {
    const std::lock_guard lock(mutex_);
    // Halving the past now and then lets the present count for more.
    if (measured_bytes_ > std::uint64_t{1} << 40) {
        measured_bytes_ /= 2;
        measured_nanoseconds_ /= 2;
    }
    measured_bytes_ += bytes;
    measured_nanoseconds_ += nanoseconds;
}

std::chrono::nanoseconds Remote::estimate(std::uint64_t bytes) const {
    const std::lock_guard lock(mutex_);
    if (measured_bytes_ == 0) {
        return std::chrono::nanoseconds(0);
    }
    const double each = static_cast<double>(measured_nanoseconds_) / static_cast<double>(measured_bytes_);
    return std::chrono::nanoseconds(static_cast<std::int64_t>(each * static_cast<double>(bytes)) + 1);
}

mr_status Remote::connect_to_itself() {
    PeerHandle peer;
    const mr_status status = mr_peer_connect_local(fabric_, fabric_, peer.out(), nullptr);
    if (status == MR_OK) {
        connection_ = std::make_shared<Connection>(std::move(peer));
    }
    return status;
}

mr_status Remote::start() {
    return mr_peer_connect_metadata_start(fabric_, metadata_.data(), metadata_.size(), attempt_.out());
}

mr_status Remote::finish(std::chrono::nanoseconds patience) {
    const mr_status status = mr_op_wait(attempt_.number(), static_cast<std::uint64_t>(patience.count()));
    if (status == MR_PENDING) {
        return status;
    }
    PeerHandle peer;
    const mr_status taken = mr_op_take_peer(attempt_.number(), peer.out());
    attempt_.reset();
    if (taken == MR_OK) {
        connection_ = std::make_shared<Connection>(std::move(peer));
    }
    return taken;
}

}  // namespace multirail::nixl

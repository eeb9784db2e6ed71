#include "outbox.hpp"

#include <algorithm>

#include "status.hpp"

namespace multirail::nixl {

mr_status Outbox::send(const Connection &connection, const std::string &agent, const std::string &bytes,
                       std::chrono::nanoseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    const std::lock_guard lock(mutex_);
    reap_locked();
    OperationHandle operation;
    mr_status status = mr_notify(connection.peer(), bytes.data(), bytes.size(), 0, operation.out());
    while (status == MR_ERROR_BUSY && wait_for_oldest(until)) {
        status = mr_notify(connection.peer(), bytes.data(), bytes.size(), 0, operation.out());
    }
    if (status == MR_OK) {
        const mr_status now = mr_op_test(operation.number());
        if (now < 0) {
            return now;
        }
        if (now == MR_PENDING) {
            sending_.push_back({agent, std::move(operation)});
        }
    }
    return status;
}

void Outbox::reap() {
    const std::lock_guard lock(mutex_);
    reap_locked();
}

void Outbox::flush(std::chrono::nanoseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    const std::lock_guard lock(mutex_);
    while (wait_for_oldest(until)) {
    }
}

void Outbox::reap_locked() {
    const auto is_over = [&](const Sending &sending) {
        const mr_status status = mr_op_test(sending.operation.number());
        if (status < 0) {
            complain(sender_, "a notification to agent " + sending.agent + " was not delivered: " + last_error());
        }
        return status != MR_PENDING;
    };
    sending_.erase(std::remove_if(sending_.begin(), sending_.end(), is_over), sending_.end());
}

/// Waits until the oldest notification is over. False if there is none, or if the time has passed.
bool Outbox::wait_for_oldest(std::chrono::steady_clock::time_point until) {
    const auto left = until - std::chrono::steady_clock::now();
    if (sending_.empty() || left.count() <= 0) {
        return false;
    }
    const auto wait_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    mr_op_wait(sending_.front().operation.number(), static_cast<std::uint64_t>(wait_ns));
    reap_locked();
    return true;
}

}  // namespace multirail::nixl

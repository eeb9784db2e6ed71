#include "inbox.hpp"

#include <unistd.h>

#include <iterator>

#include "status.hpp"
#include "wire.hpp"

namespace multirail::nixl {

using namespace std::chrono_literals;

namespace {

constexpr std::size_t kFirstBuffer = 4096;
/// A program that has not looked for this long may never look again.
constexpr auto kQuiet = 50ms;
/// How long the thread waits at once. After that, it looks whether the program takes notifications itself.
constexpr auto kWait = 1s;

}  // namespace

Inbox::Inbox(mr_fabric fabric, std::string agent)
    : fabric_(fabric), agent_(std::move(agent)), buffer_(kFirstBuffer, '\0'), thread_([this] { run(); }) {}

Inbox::~Inbox() {
    if (getpid() != process_) {
        // The child of a fork has no such thread, and may have its mutex locked for ever.
        thread_.detach();
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    stop_.notify_all();
    thread_.join();
}

nixl_abi::Status Inbox::take(nixl_abi::Notifications &out) {
    const std::lock_guard lock(mutex_);
    last_take_ = Clock::now();
    const mr_status status = is_waiting_ ? MR_PENDING : drain();
    std::move(arrived_.begin(), arrived_.end(), std::back_inserter(out));
    arrived_.clear();
    if (status < 0) {
        complain(agent_, "notifications can not be taken: " + last_error());
        return to_status(status);
    }
    return nixl_abi::kSuccess;
}

void Inbox::run() {
    std::unique_lock lock(mutex_);
    while (!is_stopping_) {
        const auto quiet_at = last_take_ + kQuiet;
        if (Clock::now() < quiet_at) {
            stop_.wait_until(lock, quiet_at);
            continue;
        }
        is_waiting_ = true;
        lock.unlock();
        nixl_abi::Notifications first;
        const mr_status status = receive(kWait, first);
        lock.lock();
        is_waiting_ = false;
        std::move(first.begin(), first.end(), std::back_inserter(arrived_));
        if (status < 0 || (status == MR_OK && drain() < 0)) {
            return;
        }
    }
}

/// Takes the next notification, if one comes in time, into `out`. Only one thread at a time may call it.
mr_status Inbox::receive(std::chrono::nanoseconds patience, nixl_abi::Notifications &out) {
    std::size_t needed = 0;
    const auto next = [&] {
        const auto wait_ns = static_cast<std::uint64_t>(patience.count());
        return mr_fabric_next_notification(fabric_, wait_ns, buffer_.data(), buffer_.size(), &needed, nullptr);
    };
    mr_status status = next();
    while (status == MR_ERROR_BUFFER) {
        buffer_.resize(needed);
        status = next();
    }
    if (status != MR_OK) {
        return status;
    }
    auto framed = unframe(std::string_view(buffer_).substr(0, needed));
    if (!framed) {
        complain(agent_, "a peer that is no agent has sent a notification, which is dropped");
        return MR_OK;
    }
    out.push_back(std::move(*framed));
    return MR_OK;
}

/// Takes all that are there.
mr_status Inbox::drain() {
    mr_status status = MR_OK;
    while (status == MR_OK) {
        status = receive(0ns, arrived_);
    }
    return status;
}

}  // namespace multirail::nixl

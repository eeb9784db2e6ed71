#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <string>

#include "connection.hpp"
#include "handle.hpp"

namespace multirail::nixl {

/// The notifications that are on their way without a transfer.
class Outbox {
  public:
    explicit Outbox(std::string sender) : sender_(std::move(sender)) {}

    /// Sends framed bytes. Waits, at most `patience`, if too many notifications are on their way.
    mr_status send(const Connection &connection, const std::string &agent, const std::string &bytes,
                   std::chrono::nanoseconds patience);

    /// Forgets those that are over, and complains of those that were not delivered.
    void reap();

    /// Waits for all of them, at most `patience`.
    void flush(std::chrono::nanoseconds patience);

  private:
    struct Sending {
        std::string agent;
        OperationHandle operation;
    };

    void reap_locked();
    bool wait_for_oldest(std::chrono::steady_clock::time_point until);

    const std::string sender_;
    std::mutex mutex_;
    std::deque<Sending> sending_;
};

}  // namespace multirail::nixl

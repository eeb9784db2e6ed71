#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "multirail.h"
#include "nixl_abi.hpp"

namespace multirail::nixl {

/// The notifications that have arrived at an agent, until its program takes them.
///
/// A sender's transfer ends once its notification has a place at the target, and the fabric has few places for each
/// peer. NIXL's callers expect transfers to end although the target does not look. So a thread takes notifications
/// off the fabric while the program takes none. While the program does look, the thread sleeps: then each
/// notification reaches the program without a switch of threads.
class Inbox {
  public:
    Inbox(mr_fabric fabric, std::string agent);
    /// Ends the thread. The fabric must have been closed before, which ends the thread's wait.
    ~Inbox();

    Inbox(const Inbox &) = delete;
    Inbox &operator=(const Inbox &) = delete;

    /// Moves all that have arrived to the end of `out`, in the order of their arrival.
    nixl_abi::Status take(nixl_abi::Notifications &out);

  private:
    using Clock = std::chrono::steady_clock;

    void run();
    mr_status receive(std::chrono::nanoseconds patience, nixl_abi::Notifications &out);
    mr_status drain();

    /// The process that has the thread.
    const pid_t process_ = getpid();
    const mr_fabric fabric_;
    const std::string agent_;

    std::mutex mutex_;
    std::condition_variable stop_;
    bool is_stopping_ = false;
    /// The thread waits in the fabric. Others must not take from it now, or they would overtake what the thread takes.
    bool is_waiting_ = false;
    Clock::time_point last_take_ = {};
    nixl_abi::Notifications arrived_;
    /// Room for the next notification.
    std::string buffer_;

    std::thread thread_;
};

}  // namespace multirail::nixl

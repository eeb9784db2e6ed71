#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "connection.hpp"

namespace multirail::nixl {

/// Another agent whose metadata was loaded, or the agent itself: the way to it, and the connection once there is one.
///
/// Any thread may call any function.
class Remote {
  public:
    /// `metadata` are the bytes of the other fabric's `mr_fabric_metadata`.
    Remote(mr_fabric fabric, std::string name, std::string metadata)
        : fabric_(fabric), name_(std::move(name)), metadata_(std::move(metadata)) {}
    /// The agent itself.
    Remote(mr_fabric fabric, std::string name) : Remote(fabric, std::move(name), "") {}

    [[nodiscard]] const std::string &name() const noexcept { return name_; }
    [[nodiscard]] const std::string &metadata() const noexcept { return metadata_; }

    /// The connection; made anew if there is none, or if the last one has ended. Waits for it at most `patience`:
    /// then `MR_PENDING`, and the attempt goes on. An attempt ends after the parameter `handshake_ms` for each address.
    /// An error comes with a sentence that says why.
    mr_status connect(std::chrono::nanoseconds patience, std::shared_ptr<Connection> &out, std::string &why);

    /// The next call of `connect` connects anew. An operation has found this connection at its end, which its state
    /// may tell later.
    void lose(const std::shared_ptr<Connection> &connection);

    /// Ends the connection. Transfers under way fail, and `connect` does too from now on.
    void disconnect();

    /// Notes how long a transfer of so many bytes took.
    void measure(std::uint64_t bytes, std::uint64_t nanoseconds);
    /// The time that a transfer of so many bytes takes, as far as earlier ones tell; 0 if there were none.
    [[nodiscard]] std::chrono::nanoseconds estimate(std::uint64_t bytes) const;

  private:
    mr_status connect_to_itself();
    mr_status start();
    mr_status finish(std::chrono::nanoseconds patience);

    const mr_fabric fabric_;
    const std::string name_;
    const std::string metadata_;

    mutable std::mutex mutex_;
    bool removed_ = false;
    std::shared_ptr<Connection> connection_;
    /// The attempt that is under way.
    OperationHandle attempt_;
    /// Of all transfers that were measured.
    std::uint64_t measured_bytes_ = 0;
    std::uint64_t measured_nanoseconds_ = 0;
};

}  // namespace multirail::nixl

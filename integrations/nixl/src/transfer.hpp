#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "handle.hpp"
#include "nixl_abi.hpp"
#include "pieces.hpp"
#include "receipts.hpp"
#include "remote.hpp"

namespace multirail::nixl {

/// A transfer that NIXL holds a handle of: prepared once, and posted any number of times.
///
/// Any thread may call any function; `release` is the last.
class Transfer final : public nixl_abi::Request {
  public:
    Transfer(std::string sender, std::shared_ptr<Remote> agent, nixl_abi::Operation operation,
             std::unique_ptr<Pieces> pieces, std::chrono::milliseconds deadline,
             std::shared_ptr<Receipts> receipts)
        : sender_(std::move(sender)), agent_(std::move(agent)), operation_(operation), deadline_(deadline),
          receipts_(std::move(receipts)), pieces_(std::move(pieces)), bytes_(pieces_->bytes()) {}

    /// Plans the transfer if the agent is connected, or connects within a moment. Otherwise `post` does it.
    nixl_abi::Status prepare();

    /// Starts the transfer. `pieces` makes its pieces anew, for a transfer that must be planned again.
    template <typename MakePieces>
    nixl_abi::Status post(std::optional<std::string> notification, const MakePieces &make_pieces) {
        const std::lock_guard lock(mutex_);
        if (is_active()) {
            return nixl_abi::kRepostActive;
        }
        if (!prepared_ && !pieces_) {
            pieces_ = make_pieces();
        }
        return begin(std::move(notification));
    }

    /// How the transfer stands. An error is told once no byte of it can move any more, or a moment later.
    nixl_abi::Status check();

    /// Ends the transfer. False if bytes of it may still move: then the object must stay, and `release` be called
    /// again. `patience` is how long it waits for them.
    [[nodiscard]] bool release(std::chrono::nanoseconds patience);

    /// Whether `release` was refused before.
    [[nodiscard]] bool was_refused() const noexcept { return is_refused_; }

    [[nodiscard]] const std::shared_ptr<Remote> &agent() const noexcept { return agent_; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    [[nodiscard]] bool is_active() const noexcept { return is_connecting_ || operation_handle_ || drain_; }
    nixl_abi::Status begin(std::optional<std::string> notification);
    mr_status plan(std::chrono::nanoseconds patience);
    nixl_abi::Status submit();
    nixl_abi::Status progress(std::chrono::nanoseconds patience);
    nixl_abi::Status finish(mr_status status);
    nixl_abi::Status await_drain();
    nixl_abi::Status fail(mr_status status);
    void measure();

    const std::string sender_;
    const std::shared_ptr<Remote> agent_;
    const nixl_abi::Operation operation_;
    const std::chrono::milliseconds deadline_;
    /// Null if the engine does not report.
    const std::shared_ptr<Receipts> receipts_;

    std::mutex mutex_;
    /// Until the transfer is planned.
    std::unique_ptr<Pieces> pieces_;
    const std::uint64_t bytes_;
    /// What the plan belongs to.
    std::shared_ptr<Connection> connection_;
    PreparedHandle prepared_;
    /// The bytes to deliver after the transfer, framed.
    std::optional<std::string> notification_;

    /// A post waits for the connection, until `connect_until_`.
    bool is_connecting_ = false;
    std::chrono::steady_clock::time_point connect_until_;
    OperationHandle operation_handle_;
    /// The operation has failed with `error_`, and the connection is drained of its bytes until `drain_until_`.
    OperationHandle drain_;
    mr_status error_ = MR_OK;
    /// The sentence of the last error.
    std::string why_;
    std::chrono::steady_clock::time_point drain_until_;
    /// The result of the last post.
    nixl_abi::Status result_ = nixl_abi::kNotPosted;
    bool is_refused_ = false;
};

}  // namespace multirail::nixl

#include "transfer.hpp"

#include "status.hpp"
#include "wire.hpp"

namespace multirail::nixl {

using nixl_abi::Status;
using namespace std::chrono_literals;

namespace {

/// How long a preparation waits for a connection. Those to a reachable agent take some milliseconds.
constexpr auto kConnectPatience = 250ms;
/// How long a post does, so that it tells at once of an agent that is gone.
constexpr auto kPostPatience = 100ms;
/// How long an error waits for the last bytes of its operation.
constexpr auto kDrainPatience = 2s;
/// Every receipt costs about a microsecond, so that small transfers are measured only now and then.
constexpr std::uint64_t kMeasuredFrom = 256 << 10;

}  // namespace

Status Transfer::prepare() {
    const std::lock_guard lock(mutex_);
    if (pieces_->empty()) {
        return nixl_abi::kSuccess;
    }
    const mr_status status = plan(kConnectPatience);
    // A transfer to an agent that is gone can be prepared. Its post tries again, and tells of it.
    if (status < 0 && to_status(status) != nixl_abi::kRemoteDisconnect) {
        return fail(status);
    }
    why_.clear();
    return nixl_abi::kSuccess;
}

Status Transfer::begin(std::optional<std::string> notification) {
    if (!prepared_ && !pieces_) {
        return result_ = nixl_abi::kInvalidParam;
    }
    notification_.reset();
    if (notification) {
        notification_ = frame(sender_, *notification);
    }
    is_connecting_ = true;
    connect_until_ = std::chrono::steady_clock::now() + deadline_;
    return progress(kPostPatience);
}

/// Goes on with a post that waits for its connection.
Status Transfer::progress(std::chrono::nanoseconds patience) {
    if (!prepared_) {
        mr_status status = plan(patience);
        if (status == MR_PENDING && std::chrono::steady_clock::now() >= connect_until_) {
            why_ = "there is no connection at the transfer's deadline";
            status = MR_ERROR_UNREACHABLE;
        }
        if (status == MR_PENDING) {
            return nixl_abi::kInProgress;
        }
        if (status != MR_OK) {
            is_connecting_ = false;
            return fail(status);
        }
    }
    is_connecting_ = false;
    return submit();
}

/// Connects to the agent, and plans the transfer for the connection.
mr_status Transfer::plan(std::chrono::nanoseconds patience) {
    std::shared_ptr<Connection> connection;
    mr_status status = agent_->connect(patience, connection, why_);
    if (status != MR_OK) {
        // An agent that does not answer in time counts as gone.
        return status == MR_ERROR_DEADLINE_EXCEEDED ? MR_ERROR_UNREACHABLE : status;
    }
    connection_ = connection;
    if (pieces_->empty()) {
        return MR_OK;
    }
    status = pieces_->prepare(connection, operation_, prepared_);
    if (status == MR_OK) {
        pieces_.reset();
    } else {
        why_ = last_error();
    }
    return status;
}

Status Transfer::submit() {
    mr_status status = MR_OK;
    if (!prepared_) {
        // A transfer without bytes is its notification alone.
        if (notification_) {
            status = mr_notify(connection_->peer(), notification_->data(), notification_->size(), 0,
                               operation_handle_.out());
        }
    } else if (notification_) {
        mr_transfer_options options{};
        options.size = sizeof(options);
        options.flags = MR_TRANSFER_NOTIFY;
        options.notification = notification_->data();
        options.notification_len = notification_->size();
        status = mr_prepared_post(prepared_.number(), &options, operation_handle_.out());
    } else {
        status = mr_prepared_post(prepared_.number(), nullptr, operation_handle_.out());
    }
    if (status != MR_OK) {
        why_ = last_error();
        return fail(status);
    }
    return operation_handle_ ? finish(mr_op_test(operation_handle_.number())) : result_ = nixl_abi::kSuccess;
}

Status Transfer::check() {
    const std::lock_guard lock(mutex_);
    if (is_connecting_) {
        return progress(0ns);
    }
    if (drain_) {
        return await_drain();
    }
    return operation_handle_ ? finish(mr_op_test(operation_handle_.number())) : result_;
}

/// Takes the state of the operation.
Status Transfer::finish(mr_status status) {
    if (status == MR_PENDING) {
        return nixl_abi::kInProgress;
    }
    if (status == MR_OK) {
        measure();
        operation_handle_.reset();
        return result_ = nixl_abi::kSuccess;
    }
    why_ = last_error();
    error_ = status;
    operation_handle_.reset();
    // An operation that fails at its deadline, or with its peer, may still be in the hands of a device. Memory is not
    // the caller's before it is out of them.
    if (may_leave_bytes(status) && mr_peer_drain(connection_->peer(), drain_.out()) == MR_OK) {
        drain_until_ = std::chrono::steady_clock::now() + kDrainPatience;
        return await_drain();
    }
    return fail(status);
}

Status Transfer::await_drain() {
    const bool is_over = mr_op_test(drain_.number()) != MR_PENDING;
    if (!is_over && std::chrono::steady_clock::now() < drain_until_) {
        return nixl_abi::kInProgress;
    }
    if (is_over) {
        drain_.reset();
    }
    return fail(error_);
}

/// Tells of an error, and notes it as the result of the post. If the agent is gone, the next post connects and plans
/// anew.
Status Transfer::fail(mr_status status) {
    complain(sender_, "a transfer with agent " + agent_->name() + " has failed: " + why_);
    if (to_status(status) == nixl_abi::kRemoteDisconnect) {
        agent_->lose(connection_);
        prepared_.reset();
    }
    return result_ = to_status(status);
}

bool Transfer::release(std::chrono::nanoseconds patience) {
    const std::lock_guard lock(mutex_);
    is_connecting_ = false;
    const auto wait_ns = static_cast<std::uint64_t>(patience.count());
    if (operation_handle_) {
        mr_op_cancel(operation_handle_.number());
        is_refused_ = mr_op_wait(operation_handle_.number(), wait_ns) == MR_PENDING;
    } else if (drain_) {
        is_refused_ = mr_op_wait(drain_.number(), wait_ns) == MR_PENDING;
    }
    return !is_refused_;
}

void Transfer::measure() {
    if (receipts_) {
        receipts_->add(operation_handle_.number(), operation_, agent_->name());
    }
    if (bytes_ < kMeasuredFrom) {
        return;
    }
    mr_receipt receipt{};
    receipt.size = sizeof(receipt);
    receipt.rail_size = sizeof(mr_rail_receipt);
    if (mr_op_receipt(operation_handle_.number(), &receipt, nullptr, 0, nullptr) == MR_OK) {
        agent_->measure(receipt.bytes, receipt.transfer_ns);
    }
}

}  // namespace multirail::nixl

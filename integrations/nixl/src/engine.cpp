#include "engine.hpp"

#include <chrono>
#include <stdexcept>
#include <vector>

#include "local_memory.hpp"
#include "pieces.hpp"
#include "remote_memory.hpp"
#include "status.hpp"
#include "transfer.hpp"
#include "wire.hpp"

namespace multirail::nixl {

using nixl_abi::Status;
using namespace std::chrono_literals;

namespace {

/// A release may not block. A cancel takes microseconds, unless a device is stuck.
constexpr auto kReleasePatience = 20ms;
/// If NIXL calls again after a refused release, it frees the transfer whatever the answer is.
constexpr auto kLastPatience = 10s;
/// How long a caller that needs a connection at once waits for it.
constexpr auto kConnectPatience = 30s;
/// How long a deregistration waits for late bytes.
constexpr auto kRevokePatience = 30s;
/// How long notifications may delay their sender, or the end of their engine.
constexpr auto kSendPatience = 30s;
constexpr auto kFlushPatience = 1s;

mr_status descriptor_of(mr_region region, std::string &out) {
    return read_bytes(
        [&](char *buf, std::size_t len, std::size_t *needed) { return mr_region_descriptor(region, buf, len, needed); },
        out);
}

}  // namespace

Engine::Engine(const nixl_abi::EngineOptions &options)
    : nixl_abi::Engine(options), outbox_(options.local_agent) {
    const Parameters parameters(*options.parameters);
    deadline_ = parameters.deadline();
    if (const Parameters::Report report = parameters.report(); report != Parameters::Report::kNone) {
        receipts_ = std::make_shared<Receipts>(local_agent(), report == Parameters::Report::kEach);
    }
    const std::vector<mr_option> entries = parameters.options();
    if (mr_fabric_open(entries.data(), entries.size(), fabric_.out()) != MR_OK) {
        throw std::runtime_error(last_error());
    }
    remotes_[local_agent()] = std::make_shared<Remote>(fabric_.number(), local_agent());
    inbox_ = std::make_unique<Inbox>(fabric_.number(), local_agent());
}

Engine::~Engine() {
    outbox_.flush(kFlushPatience);
    if (receipts_) {
        report();
    }
    fabric_.reset();
}

nixl_abi::MemoryKinds Engine::memory_kinds() const { return {nixl_abi::kHostMemory, nixl_abi::kGpuMemory}; }

// ---- memory and peers ----

Status Engine::register_memory(const nixl_abi::BlobRange &range, const nixl_abi::MemoryKind &kind,
                               nixl_abi::Memory *&out) {
    if (kind != nixl_abi::kHostMemory && kind != nixl_abi::kGpuMemory) {
        return nixl_abi::kNotSupported;
    }
    RegionHandle region;
    std::string descriptor;
    // A range without bytes is legal in NIXL. No transfer can use it.
    if (range.length != 0) {
        mr_memory memory{};
        memory.size = sizeof(memory);
        memory.kind = kind == nixl_abi::kGpuMemory ? MR_MEMORY_CUDA : MR_MEMORY_HOST;
        memory.address = reinterpret_cast<void *>(range.address);
        memory.length = range.length;
        memory.device = kind == nixl_abi::kGpuMemory ? static_cast<std::int32_t>(range.device) : MR_DEVICE_ANY;
        memory.access = MR_ACCESS_ALL;
        mr_status status = mr_region_register(fabric_.number(), &memory, region.out());
        if (status == MR_OK) {
            status = descriptor_of(region.number(), descriptor);
        }
        if (status != MR_OK) {
            return fail("the memory was not registered", status);
        }
    }
    out = new LocalMemory(range.address, std::move(region), std::move(descriptor));
    return nixl_abi::kSuccess;
}

Status Engine::deregister_memory(nixl_abi::Memory *memory) {
    const std::unique_ptr<LocalMemory> owned(static_cast<LocalMemory *>(memory));
    if (!owned || owned->region() == 0) {
        return nixl_abi::kSuccess;
    }
    OperationHandle revoking;
    mr_status status = mr_region_revoke(owned->region(), revoking.out());
    if (status == MR_OK) {
        status = mr_op_wait(revoking.number(), std::chrono::nanoseconds(kRevokePatience).count());
    }
    if (status == MR_OK) {
        return nixl_abi::kSuccess;
    }
    // NIXL does not look at this status.
    return fail("late bytes may still land in memory that was deregistered; do not use it again",
                status == MR_PENDING ? MR_ERROR_DEADLINE_EXCEEDED : status);
}

Status Engine::connect(const std::string &agent) {
    // Transfers within an agent connect when they first need to.
    if (agent == local_agent()) {
        return nixl_abi::kSuccess;
    }
    const auto known = remote(agent);
    if (!known) {
        return nixl_abi::kNotFound;
    }
    std::shared_ptr<Connection> connection;
    return connect(*known, connection);
}

Status Engine::disconnect(const std::string &agent) {
    std::shared_ptr<Remote> known;
    {
        const std::lock_guard lock(remotes_mutex_);
        const auto found = remotes_.find(agent);
        if (found == remotes_.end() || agent == local_agent()) {
            return nixl_abi::kNotFound;
        }
        known = found->second;
        remotes_.erase(found);
    }
    known->disconnect();
    return nixl_abi::kSuccess;
}

Status Engine::unload_memory(nixl_abi::Memory *memory) {
    delete static_cast<RemoteMemory *>(memory);
    return nixl_abi::kSuccess;
}

// ---- transfers ----

Status Engine::prepare(const nixl_abi::Operation &operation, const nixl_abi::TransferList &local,
                       const nixl_abi::TransferList &remote_list, const std::string &agent,
                       nixl_abi::Request *&request, const nixl_abi::TransferOptions *) const {
    const auto known = remote(agent);
    if (!known) {
        return nixl_abi::kNotFound;
    }
    auto pieces = Pieces::of(local, remote_list);
    if (!pieces) {
        return nixl_abi::kInvalidParam;
    }
    auto transfer = 
        std::make_unique<Transfer>(local_agent(), known, operation, std::move(pieces), deadline_, receipts_);
    const Status status = transfer->prepare();
    if (status != nixl_abi::kSuccess) {
        return status;
    }
    request = transfer.release();
    return nixl_abi::kSuccess;
}

Status Engine::post(const nixl_abi::Operation &, const nixl_abi::TransferList &local,
                    const nixl_abi::TransferList &remote_list, const std::string &, nixl_abi::Request *&request,
                    const nixl_abi::TransferOptions *options) const {
    std::optional<std::string> notification;
    if (options != nullptr && options->has_notification) {
        notification = options->notification;
    }
    auto &transfer = static_cast<Transfer &>(*request);
    return transfer.post(std::move(notification), [&] { return Pieces::of(local, remote_list); });
}

Status Engine::check(nixl_abi::Request *request) const { return static_cast<Transfer &>(*request).check(); }

Status Engine::release(nixl_abi::Request *request) const {
    std::unique_ptr<Transfer> transfer(static_cast<Transfer *>(request));
    const bool is_last = transfer->was_refused();
    if (transfer->release(is_last ? std::chrono::nanoseconds(kLastPatience) : kReleasePatience)) {
        return nixl_abi::kSuccess;
    }
    if (is_last) {
        complain(local_agent(), "bytes of a released transfer with agent " + transfer->agent()->name() +
                                    " may still move; do not use its memory before this agent has ended");
        return nixl_abi::kBackendError;
    }
    transfer.release();
    return nixl_abi::kRepostActive;
}

// ---- metadata ----

Status Engine::public_data(const nixl_abi::Memory *memory, std::string &out) const {
    out = wrap_descriptor(static_cast<const LocalMemory *>(memory)->descriptor());
    return nixl_abi::kSuccess;
}

Status Engine::connection_info(std::string &out) const {
    ConnectionInfo info{local_agent(), ""};
    const mr_status status = read_bytes(
        [&](char *buf, std::size_t len, std::size_t *needed) {
            return mr_fabric_metadata(fabric_.number(), buf, len, needed);
        },
        info.metadata);
    if (status != MR_OK) {
        return fail("there is no address to connect to", status);
    }
    out = info.to_bytes();
    return nixl_abi::kSuccess;
}

Status Engine::load_connection_info(const std::string &agent, const std::string &bytes) {
    auto info = ConnectionInfo::of_bytes(bytes);
    if (!info || info->agent != agent) {
        complain(local_agent(), "the metadata of agent " + agent + " is of another version of this back end; " +
                                    "install the same multirail on both sides");
        return nixl_abi::kMismatch;
    }
    const std::lock_guard lock(remotes_mutex_);
    std::shared_ptr<Remote> &known = remotes_[agent];
    // NIXL forgets an agent without a call if it can not load the rest of its metadata.
    if (known && known->metadata() != info->metadata) {
        known->disconnect();
        known.reset();
    }
    if (!known) {
        known = std::make_shared<Remote>(fabric_.number(), agent, std::move(info->metadata));
    }
    return nixl_abi::kSuccess;
}

Status Engine::load_remote_memory(const nixl_abi::BlobRange &range, const nixl_abi::MemoryKind &,
                                  const std::string &agent, nixl_abi::Memory *&out) {
    if (!remote(agent)) {
        complain(local_agent(), "the metadata of agent " + agent + " says nothing of the way to it; first load " +
                                    "metadata with connection information");
        return nixl_abi::kNotFound;
    }
    auto descriptor = unwrap_descriptor(range.blob);
    if (!descriptor) {
        complain(local_agent(), "memory of agent " + agent + " is described in another version's way; " +
                                    "install the same multirail on both sides");
        return nixl_abi::kMismatch;
    }
    out = new RemoteMemory(std::make_shared<RemoteRegion>(range.address, std::move(*descriptor)));
    return nixl_abi::kSuccess;
}

Status Engine::load_local_memory(nixl_abi::Memory *memory, nixl_abi::Memory *&out) {
    const auto &local = static_cast<const LocalMemory &>(*memory);
    out = new RemoteMemory(std::make_shared<RemoteRegion>(local.base(), local.descriptor()));
    return nixl_abi::kSuccess;
}

// ---- notifications ----

Status Engine::take_notifications(nixl_abi::Notifications &out) {
    outbox_.reap();
    return inbox_->take(out);
}

Status Engine::notify(const std::string &agent, const std::string &message) const {
    const auto known = remote(agent);
    if (!known) {
        return nixl_abi::kNotFound;
    }
    std::shared_ptr<Connection> connection;
    if (const Status status = connect(*known, connection); status != nixl_abi::kSuccess) {
        return status;
    }
    const mr_status status = outbox_.send(*connection, agent, frame(local_agent(), message), kSendPatience);
    if (status == MR_OK) {
        return nixl_abi::kSuccess;
    }
    if (to_status(status) == nixl_abi::kRemoteDisconnect) {
        known->lose(connection);
    }
    return fail("the notification was not sent", status);
}

// ---- questions ----

Status Engine::estimate_cost(const nixl_abi::Operation &, const nixl_abi::TransferList &,
                             const nixl_abi::TransferList &, const std::string &, nixl_abi::Request *const &request,
                             std::chrono::microseconds &duration, std::chrono::microseconds &margin,
                             nixl_abi::CostMethod &method, const nixl_abi::AgentOptions *) const {
    if (request == nullptr) {
        return nixl_abi::kInvalidParam;
    }
    const auto &transfer = static_cast<const Transfer &>(*request);
    const auto estimate = transfer.agent()->estimate(transfer.bytes());
    if (estimate.count() == 0) {
        return nixl_abi::kNotSupported;
    }
    duration = std::chrono::ceil<std::chrono::microseconds>(estimate);
    // Earlier transfers had other sizes, and shared the devices with others.
    margin = duration / 2;
    method = nixl_abi::CostMethod::kAnalytical;
    return nixl_abi::kSuccess;
}

// ---- helpers ----

void Engine::report() const {
    receipts_->print();
    std::string counters;
    const mr_status status = read_bytes(
        [&](char *buf, std::size_t len, std::size_t *needed) {
            return mr_fabric_counters(fabric_.number(), buf, len, needed);
        },
        counters);
    complain(local_agent(), status == MR_OK ? counters.c_str() : last_error());
}

std::shared_ptr<Remote> Engine::remote(const std::string &agent) const {
    const std::lock_guard lock(remotes_mutex_);
    const auto found = remotes_.find(agent);
    return found == remotes_.end() ? nullptr : found->second;
}

Status Engine::connect(Remote &agent, std::shared_ptr<Connection> &out) const {
    std::string why;
    const mr_status status = agent.connect(kConnectPatience, out, why);
    if (status == MR_OK) {
        return nixl_abi::kSuccess;
    }
    complain(local_agent(), status == MR_PENDING ? "agent " + agent.name() + " does not answer" : why);
    return nixl_abi::kRemoteDisconnect;
}

Status Engine::fail(const char *what, mr_status status) const {
    complain(local_agent(), std::string(what) + ": " + last_error());
    return to_status(status);
}

}  // namespace multirail::nixl

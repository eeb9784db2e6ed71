// The binary interface between NIXL and a back-end plug-in, as far as multirail uses it.
//
// NIXL's wheels ship no headers. These declarations state the memory layout that NIXL 1.4.1, 1.5.0 and 1.5.1
// share: order of virtual functions, order and size of fields, numbers of enumerations. Names are this file's own,
// because names do not cross the boundary. Only the layout does. `static_assert` keeps the layout; `host.cpp` checks
// that the NIXL which loads the plug-in has it.
//
// Both sides need the same C++ library: `std::string`, `std::vector`, `std::unordered_map` and `std::optional` are
// passed by reference. That is libstdc++ with its C++11 strings.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl_abi {

/// What functions return. Negative numbers are errors.
enum Status : int {
    kInProgress = 1,
    kSuccess = 0,
    kNotPosted = -1,
    kInvalidParam = -2,
    kBackendError = -3,
    kNotFound = -4,
    kMismatch = -5,
    kNotAllowed = -6,
    kRepostActive = -7,
    kUnknown = -8,
    kNotSupported = -9,
    kRemoteDisconnect = -10,
    kCanceled = -11,
};

/// The kind of memory of a descriptor. Only the first two are memory that multirail moves.
enum MemoryKind : int { kHostMemory = 0, kGpuMemory = 1, kBlock = 2, kObject = 3, kFile = 4 };

enum Operation : int { kRead = 0, kWrite = 1 };

enum class ThreadSync : int { kNone = 0, kStrict = 1, kReadWrite = 2 };

enum class CostMethod : int { kAnalytical = 0 };

using Parameters = std::unordered_map<std::string, std::string>;
using MemoryKinds = std::vector<MemoryKind>;
/// Pairs of the sender's name and the message.
using Notifications = std::vector<std::pair<std::string, std::string>>;
using QueryAnswer = std::optional<Parameters>;
/// Views of memory for kernels on a GPU. multirail has none.
using MemoryView = void *;

/// A range of memory: address, length in bytes, number of the GPU (0 for host memory).
struct Range {
    std::uintptr_t address;
    std::size_t length;
    std::uint64_t device;
};

/// A range and the bytes that travel with it: what `Engine::public_data` gave at the other agent.
struct BlobRange : Range {
    std::string blob;
};

/// The base of what a back end keeps for a registered or an imported range. NIXL holds pointers to it.
class Memory {
  public:
    explicit Memory(bool is_private) : is_private_(is_private) {}
    virtual ~Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

  private:
    [[maybe_unused]] bool is_private_;
};

/// The base of what a back end keeps for a transfer.
class Request {
  public:
    Request() = default;
    virtual ~Request() = default;
    Request(const Request &) = delete;
    Request &operator=(const Request &) = delete;
};

/// A range and what the back end keeps for the registration that holds it.
struct TransferRange : Range {
    Memory *memory;
};

/// A list of ranges of one kind. NIXL makes these lists; a plug-in reads them, and never makes one.
template <typename T> class List {
  public:
    [[nodiscard]] MemoryKind kind() const noexcept { return kind_; }
    [[nodiscard]] const std::vector<T> &ranges() const noexcept { return ranges_; }

  private:
    List() = delete;
    // Stands for the pointer to NIXL's table of virtual functions, which a reader does not need.
    void *virtual_functions_;
    MemoryKind kind_;
    std::vector<T> ranges_;

    template <typename> friend struct ListLayout;
};

template <typename T> struct ListLayout {
    static constexpr std::size_t kind = offsetof(List<T>, kind_);
    static constexpr std::size_t ranges = offsetof(List<T>, ranges_);
};

using TransferList = List<TransferRange>;
using RegistrationList = List<BlobRange>;
/// Lists for memory views. Their elements are not declared, because no function here reads them.
struct RemoteViewList;
/// Options of the agent's interface, which reach `estimate_cost` only, where no function reads them.
struct AgentOptions;

/// What comes with a transfer: a notification for the target, and a text of the caller for the back end.
struct TransferOptions {
    std::string notification;
    bool has_notification = false;
    std::string custom;
};

/// What `create_engine` gets.
struct EngineOptions {
    std::string local_agent;
    std::string backend;
    Parameters *parameters = nullptr;
    bool progress_thread = false;
    std::uint64_t progress_delay_us = 0;
    ThreadSync thread_sync = ThreadSync::kNone;
    bool telemetry = false;
};

/// One counted event of NIXL's telemetry.
struct TelemetryEvent {
    std::uint32_t kind;
    std::uint64_t value;
};

/// The base of an engine: one per agent and back end. The order of the virtual functions is the interface.
class Engine {
  public:
    explicit Engine(const EngineOptions &options)
        : backend_(options.backend), parameters_(*options.parameters), local_agent_(options.local_agent),
          telemetry_(options.telemetry) {}
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    virtual ~Engine() = default;

    // What the back end can do.
    virtual bool supports_remote() const = 0;
    virtual bool supports_local() const = 0;
    virtual bool supports_notifications() const = 0;
    virtual MemoryKinds memory_kinds() const = 0;

    // Memory and peers.
    virtual Status register_memory(const BlobRange &range, const MemoryKind &kind, Memory *&out) = 0;
    virtual Status deregister_memory(Memory *memory) = 0;
    virtual Status connect(const std::string &agent) = 0;
    virtual Status disconnect(const std::string &agent) = 0;
    virtual Status unload_memory(Memory *memory) = 0;

    // Transfers.
    virtual Status prepare(const Operation &operation, const TransferList &local, const TransferList &remote,
                           const std::string &agent, Request *&request, const TransferOptions *options) const = 0;
    virtual Status post(const Operation &operation, const TransferList &local, const TransferList &remote,
                        const std::string &agent, Request *&request, const TransferOptions *options) const = 0;
    virtual Status check(Request *request) const = 0;
    virtual Status release(Request *request) const = 0;

    // Memory views.
    virtual Status prepare_remote_view(const RemoteViewList &, MemoryView &, const TransferOptions *) const {
        return kNotSupported;
    }
    virtual Status prepare_local_view(const TransferList &, MemoryView &, const TransferOptions *) const {
        return kNotSupported;
    }
    virtual void release_view(MemoryView) const {}

    // Metadata.
    virtual Status public_data(const Memory *memory, std::string &out) const = 0;
    virtual Status connection_info(std::string &out) const = 0;
    virtual Status load_connection_info(const std::string &agent, const std::string &info) = 0;
    virtual Status load_remote_memory(const BlobRange &range, const MemoryKind &kind, const std::string &agent,
                                      Memory *&out) = 0;
    virtual Status load_local_memory(Memory *memory, Memory *&out) = 0;

    // Notifications.
    virtual Status take_notifications(Notifications &out) = 0;
    virtual Status notify(const std::string &agent, const std::string &message) const = 0;

    // Questions.
    virtual Status query_memory(const RegistrationList &, std::vector<QueryAnswer> &) const { return kNotSupported; }
    virtual Status estimate_cost(const Operation &, const TransferList &, const TransferList &, const std::string &,
                                 Request *const &, std::chrono::microseconds &, std::chrono::microseconds &,
                                 CostMethod &, const AgentOptions *) const {
        return kNotSupported;
    }

  protected:
    [[nodiscard]] const std::string &local_agent() const noexcept { return local_agent_; }

  private:
    // NIXL's inline code reads these fields.
    std::string backend_;
    Parameters parameters_;
    std::vector<TelemetryEvent> telemetry_events_;
    std::mutex telemetry_mutex_;
    bool failed_ = false;
    const std::string local_agent_;
    [[maybe_unused]] const bool telemetry_;

    friend struct EngineLayout;
};

// GCC and Clang lay out a class without virtual bases so that `offsetof` is a constant, and warn all the same.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
struct EngineLayout {
    static constexpr std::size_t backend = offsetof(Engine, backend_);
    static constexpr std::size_t parameters = offsetof(Engine, parameters_);
    static constexpr std::size_t telemetry_events = offsetof(Engine, telemetry_events_);
    static constexpr std::size_t failed = offsetof(Engine, failed_);
    static constexpr std::size_t local_agent = offsetof(Engine, local_agent_);
    static constexpr std::size_t telemetry = offsetof(Engine, telemetry_);
};
#pragma GCC diagnostic pop

/// The version that `Plugin::interface_version` states. NIXL compares it for equality.
inline constexpr int kInterfaceVersion = 1;
/// Entries of `Engine`'s table of virtual functions; two of them are destructors.
inline constexpr std::size_t kEngineSlots = 27;

/// What `nixl_plugin_init` returns. It stays valid as long as the process lives.
struct Plugin {
    int interface_version;
    Engine *(*create_engine)(const EngineOptions *options);
    void (*destroy_engine)(Engine *engine);
    const char *(*name)();
    const char *(*version)();
    Parameters (*default_parameters)();
    MemoryKinds (*memory_kinds)();
};

// The layout of x86-64 and AArch64 Linux with libstdc++.
static_assert(sizeof(std::string) == 32 && sizeof(Parameters) == 56 && sizeof(std::mutex) % 8 == 0);
static_assert(sizeof(Range) == 24 && sizeof(BlobRange) == 56 && sizeof(TransferRange) == 32);
static_assert(offsetof(TransferOptions, has_notification) == 32 && offsetof(TransferOptions, custom) == 40);
static_assert(offsetof(EngineOptions, parameters) == 64 && offsetof(EngineOptions, progress_delay_us) == 80);
static_assert(offsetof(EngineOptions, thread_sync) == 88 && offsetof(EngineOptions, telemetry) == 92);
static_assert(ListLayout<TransferRange>::kind == 8 && ListLayout<TransferRange>::ranges == 16);
static_assert(sizeof(TelemetryEvent) == 16);
static_assert(EngineLayout::backend == 8 && EngineLayout::parameters == 40 && EngineLayout::telemetry_events == 96);
static_assert(EngineLayout::failed == 120 + sizeof(std::mutex));
static_assert(EngineLayout::local_agent == EngineLayout::failed + 8);
static_assert(EngineLayout::telemetry == EngineLayout::local_agent + 32);
static_assert(offsetof(Plugin, create_engine) == 8 && sizeof(Plugin) == 56);

}  // namespace nixl_abi

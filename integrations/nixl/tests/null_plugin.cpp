// A NIXL back end that moves nothing: every transfer is done when it is posted, and notifications reach nobody.
// Benchmarks use it to measure NIXL's own cost. It also shows that the declarations of `nixl_abi.hpp` fit a NIXL.

#include "nixl_abi.hpp"

namespace {

using namespace nixl_abi;

class NullMemory final : public Memory {
  public:
    NullMemory() : Memory(true) {}
};

class NullRequest final : public Request {};

class NullEngine final : public Engine {
  public:
    using Engine::Engine;

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_notifications() const override { return true; }
    MemoryKinds memory_kinds() const override { return {kHostMemory, kGpuMemory}; }

    Status register_memory(const BlobRange &, const MemoryKind &, Memory *&out) override {
        out = new NullMemory;
        return kSuccess;
    }
    Status deregister_memory(Memory *memory) override {
        delete memory;
        return kSuccess;
    }
    Status connect(const std::string &) override { return kSuccess; }
    Status disconnect(const std::string &) override { return kSuccess; }
    Status unload_memory(Memory *memory) override {
        delete memory;
        return kSuccess;
    }

    Status prepare(const Operation &, const TransferList &local, const TransferList &remote, const std::string &,
                   Request *&request, const TransferOptions *) const override {
        if (local.ranges().size() != remote.ranges().size()) {
            return kInvalidParam;
        }
        request = new NullRequest;
        return kSuccess;
    }
    Status post(const Operation &, const TransferList &, const TransferList &, const std::string &, Request *&,
                const TransferOptions *) const override {
        return kSuccess;
    }
    Status check(Request *) const override { return kSuccess; }
    Status release(Request *request) const override {
        delete request;
        return kSuccess;
    }

    Status public_data(const Memory *, std::string &out) const override {
        out = "memory";
        return kSuccess;
    }
    Status connection_info(std::string &out) const override {
        out = local_agent();
        return kSuccess;
    }
    Status load_connection_info(const std::string &agent, const std::string &info) override {
        return agent == info ? kSuccess : kMismatch;
    }
    Status load_remote_memory(const BlobRange &range, const MemoryKind &, const std::string &, Memory *&out) override {
        out = new NullMemory;
        return range.blob == "memory" ? kSuccess : kMismatch;
    }
    Status load_local_memory(Memory *, Memory *&out) override {
        out = new NullMemory;
        return kSuccess;
    }
    Status take_notifications(Notifications &) override { return kSuccess; }
    Status notify(const std::string &, const std::string &) const override { return kSuccess; }
};

Plugin plugin{
    kInterfaceVersion,
    [](const EngineOptions *options) -> Engine * { return new NullEngine(*options); },
    [](Engine *engine) { delete engine; },
    [] { return "MULTIRAIL_NULL"; },
    [] { return "1"; },
    [] { return Parameters{{"answer", "42"}}; },
    [] { return MemoryKinds{kHostMemory, kGpuMemory}; },
};

}  // namespace

extern "C" {
__attribute__((visibility("default"))) Plugin *nixl_plugin_init() { return &plugin; }
__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}

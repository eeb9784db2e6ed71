// The two functions that NIXL looks for in a plug-in.

#include <exception>

#include "engine.hpp"
#include "host.hpp"
#include "nixl_abi.hpp"
#include "parameters.hpp"
#include "status.hpp"

namespace {

using multirail::nixl::complain;
using multirail::nixl::Host;

/// Looks at the process once: NIXL's library does not change while it runs.
const Host &host() {
    static const Host host;
    return host;
}

nixl_abi::Engine *create_engine(const nixl_abi::EngineOptions *options) {
    // No exception may cross into NIXL.
    try {
        if (const std::string why = host().refusal(options); !why.empty()) {
            complain("?", why);
            return nullptr;
        }
    } catch (const std::exception &error) {
        complain("?", error.what());
        return nullptr;
    }
    try {
        return new multirail::nixl::Engine(*options);
    } catch (const std::exception &error) {
        complain(options->local_agent, std::string("the back end was not created: ") + error.what());
        return nullptr;
    }
}

nixl_abi::Plugin plugin{
    nixl_abi::kInterfaceVersion,
    create_engine,
    [](nixl_abi::Engine *engine) { delete engine; },
    [] { return "MULTIRAIL"; },
    [] { return multirail_version(); },
    [] { return multirail::nixl::Parameters::defaults(); },
    [] { return nixl_abi::MemoryKinds{nixl_abi::kHostMemory, nixl_abi::kGpuMemory}; },
};

}  // namespace

extern "C" {

/// Returns null, and prints why, if the NIXL that loads the plug-in has another interface.
__attribute__((visibility("default"))) nixl_abi::Plugin *nixl_plugin_init() {
    try {
        if (const std::string why = host().refusal(); !why.empty()) {
            complain("?", "the back end MULTIRAIL does not work with this NIXL: " + why);
            return nullptr;
        }
    } catch (const std::exception &error) {
        complain("?", error.what());
        return nullptr;
    }
    return &plugin;
}

__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}

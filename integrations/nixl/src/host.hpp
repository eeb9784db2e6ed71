#pragma once

#include <string>

#include "nixl_abi.hpp"

namespace multirail::nixl {

/// The NIXL that has loaded the plug-in: where its library lies, and whether its interface is the one that
/// `nixl_abi.hpp` declares.
class Host {
  public:
    /// Looks at the libraries of this process.
    Host();

    /// Why the plug-in must not work with this NIXL, as a sentence that says what to do. Empty if it may.
    [[nodiscard]] std::string refusal() const;

    /// Why the options that NIXL gives to a new engine do not have the declared layout. Empty if they have.
    [[nodiscard]] std::string refusal(const nixl_abi::EngineOptions *options) const;

  private:
    [[nodiscard]] std::string find_version() const;
    [[nodiscard]] std::string differing_function() const;

    /// The folder of NIXL's library; empty if the process has none.
    std::string folder_;
    /// The version of NIXL's wheel; empty if the library comes from no wheel.
    std::string version_;
    /// The name under which NIXL knows this file: `NAME` of `libplugin_NAME.so`.
    std::string backend_;
};

}  // namespace multirail::nixl

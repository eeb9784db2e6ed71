#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace multirail::nixl {

/// What an agent's metadata says of the way to it. NIXL carries the bytes.
struct ConnectionInfo {
    std::string agent;
    /// The bytes of `mr_fabric_metadata`.
    std::string metadata;

    [[nodiscard]] std::string to_bytes() const;
    /// Empty if the bytes are of another back end or of another version.
    static std::optional<ConnectionInfo> of_bytes(std::string_view bytes);
};

/// A region's descriptor, as it travels in an agent's metadata.
std::string wrap_descriptor(std::string_view descriptor);
/// Empty if the bytes are of another back end or of another version.
std::optional<std::string> unwrap_descriptor(std::string_view bytes);

/// A notification as it travels. It carries the sender's name, because the target may know nothing of the sender.
std::string frame(std::string_view sender, std::string_view message);
/// The sender's name and the message. Empty if the sender was no agent.
std::optional<std::pair<std::string, std::string>> unframe(std::string_view bytes);

}  // namespace multirail::nixl

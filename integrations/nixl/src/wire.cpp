#include "wire.hpp"

#include <cstdint>

namespace multirail::nixl {

namespace {

/// Four letters and the version of what follows.
constexpr std::string_view kConnection = "MRNC\x01";
constexpr std::string_view kDescriptor = "MRND\x01";
constexpr std::size_t kLengthSize = 4;
/// The longest name of an agent.
constexpr std::uint32_t kMaxName = 1 << 16;

/// A length of 4 bytes, the lowest first, and a name.
void put_name(std::string &out, std::string_view name) {
    const auto length = static_cast<std::uint32_t>(name.size());
    for (std::size_t at = 0; at < kLengthSize; ++at) {
        out.push_back(static_cast<char>(length >> (8 * at)));
    }
    out.append(name);
}

std::optional<std::string> take_name(std::string_view &bytes) {
    if (bytes.size() < kLengthSize) {
        return std::nullopt;
    }
    std::uint32_t length = 0;
    for (std::size_t at = 0; at < kLengthSize; ++at) {
        length |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[at])) << (8 * at);
    }
    bytes.remove_prefix(kLengthSize);
    if (length == 0 || length > kMaxName || length > bytes.size()) {
        return std::nullopt;
    }
    std::string name(bytes.substr(0, length));
    bytes.remove_prefix(length);
    return name;
}

bool take_prefix(std::string_view &bytes, std::string_view prefix) {
    if (bytes.substr(0, prefix.size()) != prefix) {
        return false;
    }
    bytes.remove_prefix(prefix.size());
    return true;
}

}  // namespace

std::string ConnectionInfo::to_bytes() const {
    std::string bytes(kConnection);
    put_name(bytes, agent);
    return bytes.append(metadata);
}

std::optional<ConnectionInfo> ConnectionInfo::of_bytes(std::string_view bytes) {
    if (!take_prefix(bytes, kConnection)) {
        return std::nullopt;
    }
    auto agent = take_name(bytes);
    if (!agent) {
        return std::nullopt;
    }
    return ConnectionInfo{std::move(*agent), std::string(bytes)};
}

std::string wrap_descriptor(std::string_view descriptor) {
    return std::string(kDescriptor).append(descriptor);
}

std::optional<std::string> unwrap_descriptor(std::string_view bytes) {
    if (!take_prefix(bytes, kDescriptor)) {
        return std::nullopt;
    }
    return std::string(bytes);
}

std::string frame(std::string_view sender, std::string_view message) {
    std::string bytes;
    bytes.reserve(kLengthSize + sender.size() + message.size());
    put_name(bytes, sender);
    return bytes.append(message);
}

std::optional<std::pair<std::string, std::string>> unframe(std::string_view bytes) {
    auto sender = take_name(bytes);
    if (!sender) {
        return std::nullopt;
    }
    return std::pair(std::move(*sender), std::string(bytes));
}

}  // namespace multirail::nixl

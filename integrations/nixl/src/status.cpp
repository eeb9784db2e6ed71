#include "status.hpp"

#include <cstdio>

namespace multirail::nixl {

nixl_abi::Status to_status(mr_status status) {
    switch (status) {
    case MR_OK:
        return nixl_abi::kSuccess;
    case MR_PENDING:
        return nixl_abi::kInProgress;
    case MR_ERROR_PEER_DIED:
    case MR_ERROR_CLOSED:
    case MR_ERROR_UNREACHABLE:
        return nixl_abi::kRemoteDisconnect;
    case MR_ERROR_CANCELLED:
    case MR_ERROR_DEADLINE_EXCEEDED:
        // NIXL knows no deadlines. The engine cancels an operation at its deadline.
        return nixl_abi::kCanceled;
    case MR_ERROR_REVOKED:
    case MR_ERROR_NOT_FOUND:
        return nixl_abi::kNotFound;
    case MR_ERROR_LOCAL_ACCESS:
    case MR_ERROR_REMOTE_ACCESS:
    case MR_ERROR_PERMISSION:
        return nixl_abi::kNotAllowed;
    case MR_ERROR_INVALID_REQUEST:
    case MR_ERROR_OUT_OF_BOUNDS:
    case MR_ERROR_TOO_LARGE:
    case MR_ERROR_HANDLE:
        return nixl_abi::kInvalidParam;
    case MR_ERROR_UNSUPPORTED:
        return nixl_abi::kNotSupported;
    case MR_ERROR_VERSION:
    case MR_ERROR_PROTOCOL:
        return nixl_abi::kMismatch;
    default:
        return nixl_abi::kBackendError;
    }
}

bool may_leave_bytes(mr_status error) { return error < 0 && error != MR_ERROR_CANCELLED && error != MR_ERROR_HANDLE; }

std::string last_error() {
    std::string text(256, '\0');
    const std::size_t needed = mr_last_error(text.data(), text.size());
    if (needed > text.size()) {
        text.resize(needed);
        mr_last_error(text.data(), text.size());
    }
    return std::string(text.c_str());
}

void complain(const std::string &agent, const std::string &sentence) {
    std::fprintf(stderr, "multirail: NIXL agent %s: %s\n", agent.c_str(), sentence.c_str());
}

}  // namespace multirail::nixl

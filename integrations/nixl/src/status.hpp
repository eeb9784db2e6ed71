#pragma once

#include <string>

#include "multirail.h"
#include "nixl_abi.hpp"

namespace multirail::nixl {

/// NIXL's status for one of multirail.
nixl_abi::Status to_status(mr_status status);

/// Whether bytes of an operation that has ended with this error may still move for a moment.
bool may_leave_bytes(mr_status error);

/// The sentence of this thread's last error.
std::string last_error();

/// Reads bytes from a function of the C interface that needs a buffer of unknown size.
template <typename Read> mr_status read_bytes(const Read &read, std::string &out) {
    std::size_t needed = 0;
    out.resize(2048);
    mr_status status = read(out.data(), out.size(), &needed);
    while (status == MR_ERROR_BUFFER) {
        out.resize(needed);
        status = read(out.data(), out.size(), &needed);
    }
    out.resize(status == MR_OK ? needed : 0);
    return status;
}

/// Prints a sentence on standard error. NIXL's own log has only the number of a status.
void complain(const std::string &agent, const std::string &sentence);

}  // namespace multirail::nixl

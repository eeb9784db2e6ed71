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

/// Prints a sentence on standard error. NIXL's own log has only the number of a status.
void complain(const std::string &agent, const std::string &sentence);

}  // namespace multirail::nixl

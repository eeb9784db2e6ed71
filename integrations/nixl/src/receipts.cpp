#include "receipts.hpp"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "status.hpp"

namespace multirail::nixl {

namespace {

/// More rails than a host has: a p5.48xlarge has 32.
constexpr std::size_t kMostRails = 256;

/// The names that `path_policy` has for them.
constexpr std::array kPaths = {
    std::pair{MR_PATH_RDMA, "rdma"},       std::pair{MR_PATH_GPU_COPY, "gpu-copy"},
    std::pair{MR_PATH_MEMORY_COPY, "memory-copy"}, std::pair{MR_PATH_SOCKETS, "sockets"},
    std::pair{MR_PATH_STAGED, "staged"},
};

std::string names_of(std::uint32_t paths) {
    std::string names;
    for (const auto &[path, name] : kPaths) {
        if ((paths & path) != 0) {
            names.append(names.empty() ? "" : "+").append(name);
        }
    }
    return names;
}

}  // namespace

void Receipts::add(mr_op op, nixl_abi::Operation operation, const std::string &other) {
    mr_receipt receipt = MR_RECEIPT_INIT;
    std::vector<mr_rail_receipt> rails(kMostRails);
    std::size_t count = 0;
    if (mr_op_receipt(op, &receipt, rails.data(), rails.size(), &count) != MR_OK) {
        // A notification alone has none.
        return;
    }
    const std::string what = (operation == nixl_abi::kWrite ? "wrote to agent " : "read from agent ") + other;
    if (std::string json; each_) {
        const mr_status status = read_bytes(
            [&](char *buf, std::size_t len, std::size_t *needed) { return mr_op_receipt_json(op, buf, len, needed); },
            json);
        complain(agent_, what + ": " + (status == MR_OK ? json : last_error()));
    }
    const std::lock_guard lock(mutex_);
    Sum &sum = sums_[what];
    ++sum.transfers;
    sum.bytes += receipt.bytes;
    for (std::size_t rail = 0; rail < std::min(count, rails.size()); ++rail) {
        const mr_rail_receipt &share = rails[rail];
        sum.bytes_by_way[{share.transport, share.device, share.paths}] += share.bytes;
    }
}

void Receipts::print() const {
    const std::lock_guard lock(mutex_);
    for (const auto &[what, sum] : sums_) {
        std::string line =
            what + ": transfers " + std::to_string(sum.transfers) + ", bytes " + std::to_string(sum.bytes);
        const char *separator = "; ";
        for (const auto &[way, bytes] : sum.bytes_by_way) {
            const auto &[transport, device, paths] = way;
            const std::string by = transport.empty() ? "the calling thread" : transport + " " + device;
            line += separator + by + " by " + names_of(paths) + ": " + std::to_string(bytes);
            separator = ", ";
        }
        complain(agent_, line);
    }
}

}  // namespace multirail::nixl

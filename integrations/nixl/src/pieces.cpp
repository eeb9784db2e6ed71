#include "pieces.hpp"

#include "local_memory.hpp"
#include "remote_memory.hpp"

namespace multirail::nixl {

std::unique_ptr<Pieces> Pieces::of(const nixl_abi::TransferList &local, const nixl_abi::TransferList &remote) {
    const auto &here = local.ranges();
    const auto &there = remote.ranges();
    if (here.size() != there.size()) {
        return nullptr;
    }
    auto pieces = std::make_unique<Pieces>();
    pieces->local_.reserve(here.size());
    pieces->remote_.reserve(there.size());
    for (std::size_t at = 0; at < here.size(); ++at) {
        if (here[at].length != there[at].length || here[at].memory == nullptr || there[at].memory == nullptr) {
            return nullptr;
        }
        if (here[at].length != 0) {
            pieces->add(here[at], there[at]);
        }
    }
    return pieces;
}

mr_status Pieces::prepare(const std::shared_ptr<Connection> &connection, nixl_abi::Operation operation,
                          PreparedHandle &out) const {
    std::vector<mr_remote> imported(regions_.size());
    for (std::size_t at = 0; at < regions_.size(); ++at) {
        const mr_status status = regions_[at]->import(connection, imported[at]);
        if (status != MR_OK) {
            return status;
        }
    }
    std::vector<mr_remote_entry> entries(remote_);
    for (mr_remote_entry &entry : entries) {
        entry.remote = imported[entry.remote];
    }
    LocalListHandle local;
    RemoteListHandle remote;
    mr_status status = mr_local_list_new(local_.data(), local_.size(), local.out());
    if (status == MR_OK) {
        status = mr_remote_list_new(entries.data(), entries.size(), remote.out());
    }
    if (status == MR_OK) {
        const auto prepare = operation == nixl_abi::kWrite ? mr_prepare_write_list : mr_prepare_read_list;
        status = prepare(connection->peer(), local.number(), nullptr, remote.number(), nullptr, local_.size(), nullptr,
                         out.out());
    }
    return status;
}

void Pieces::add(const nixl_abi::TransferRange &local, const nixl_abi::TransferRange &remote) {
    const auto &here = static_cast<const LocalMemory &>(*local.memory);
    const auto &there = static_cast<const RemoteMemory &>(*remote.memory).region();
    // Neighbours in a list mostly lie in one region. A region that occurs again later is merely imported from its
    // own cache again.
    if (regions_.empty() || regions_.back() != there) {
        regions_.push_back(there);
    }
    local_.push_back({here.region(), local.address - here.base(), local.length});
    remote_.push_back({regions_.size() - 1, remote.address - there->base(), remote.length});
    bytes_ += local.length;
}

}  // namespace multirail::nixl

#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "handle.hpp"
#include "inbox.hpp"
#include "nixl_abi.hpp"
#include "outbox.hpp"
#include "parameters.hpp"
#include "receipts.hpp"
#include "remote.hpp"

namespace multirail::nixl {

/// NIXL's back end: one agent's fabric. Its own threads move the bytes, so it needs no progress thread of NIXL.
///
/// Any thread may call any function, in every thread mode of NIXL.
class Engine final : public nixl_abi::Engine {
  public:
    /// Opens the fabric, which listens for other agents. Throws `std::runtime_error` with a sentence for the user.
    explicit Engine(const nixl_abi::EngineOptions &options);
    ~Engine() override;

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_notifications() const override { return true; }
    nixl_abi::MemoryKinds memory_kinds() const override;

    nixl_abi::Status register_memory(const nixl_abi::BlobRange &range, const nixl_abi::MemoryKind &kind,
                                     nixl_abi::Memory *&out) override;
    /// Returns once no peer and no transfer can touch the memory any more.
    nixl_abi::Status deregister_memory(nixl_abi::Memory *memory) override;
    nixl_abi::Status connect(const std::string &agent) override;
    nixl_abi::Status disconnect(const std::string &agent) override;
    nixl_abi::Status unload_memory(nixl_abi::Memory *memory) override;

    nixl_abi::Status prepare(const nixl_abi::Operation &operation, const nixl_abi::TransferList &local,
                             const nixl_abi::TransferList &remote, const std::string &agent,
                             nixl_abi::Request *&request, const nixl_abi::TransferOptions *options) const override;
    nixl_abi::Status post(const nixl_abi::Operation &operation, const nixl_abi::TransferList &local,
                          const nixl_abi::TransferList &remote, const std::string &agent, nixl_abi::Request *&request,
                          const nixl_abi::TransferOptions *options) const override;
    nixl_abi::Status check(nixl_abi::Request *request) const override;
    nixl_abi::Status release(nixl_abi::Request *request) const override;

    nixl_abi::Status public_data(const nixl_abi::Memory *memory, std::string &out) const override;
    nixl_abi::Status connection_info(std::string &out) const override;
    nixl_abi::Status load_connection_info(const std::string &agent, const std::string &info) override;
    nixl_abi::Status load_remote_memory(const nixl_abi::BlobRange &range, const nixl_abi::MemoryKind &kind,
                                        const std::string &agent, nixl_abi::Memory *&out) override;
    nixl_abi::Status load_local_memory(nixl_abi::Memory *memory, nixl_abi::Memory *&out) override;

    nixl_abi::Status take_notifications(nixl_abi::Notifications &out) override;
    nixl_abi::Status notify(const std::string &agent, const std::string &message) const override;

    /// The time that earlier transfers with the agent suggest. `kNotSupported` before the first large one.
    nixl_abi::Status estimate_cost(const nixl_abi::Operation &operation, const nixl_abi::TransferList &local,
                                   const nixl_abi::TransferList &remote, const std::string &agent,
                                   nixl_abi::Request *const &request, std::chrono::microseconds &duration,
                                   std::chrono::microseconds &margin, nixl_abi::CostMethod &method,
                                   const nixl_abi::AgentOptions *options) const override;

  private:
    [[nodiscard]] std::shared_ptr<Remote> remote(const std::string &agent) const;
    nixl_abi::Status connect(Remote &agent, std::shared_ptr<Connection> &out) const;
    nixl_abi::Status fail(const char *what, mr_status status) const;

    /// Prints what its transfers and its rails have moved.
    void report() const;

    FabricHandle fabric_;
    /// Null unless the engine reports at its end.
    std::shared_ptr<Receipts> receipts_;
    /// Of transfers.
    std::chrono::milliseconds deadline_{};

    mutable std::mutex remotes_mutex_;
    /// By name. The agent itself is one of them.
    std::map<std::string, std::shared_ptr<Remote>> remotes_;

    mutable Outbox outbox_;
    std::unique_ptr<Inbox> inbox_;
};

}  // namespace multirail::nixl

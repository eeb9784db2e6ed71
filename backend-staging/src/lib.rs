//! A backend around another backend: it moves bytes through host memory where the inner device refuses to register a
//! region.
//!
//! A NIC can use GPU memory if the GPU exports it as a DMA-BUF, or if a kernel module tells the NIC the physical
//! addresses. On machines with neither, the NIC refuses the registration, and multirail reports an error unless both
//! processes allow staging ([`StagingPolicy`]). Then the region is registered here instead: it is *staged*.
//!
//! Each connection has a *staging buffer* of registered host memory in each process, cut into slots. For a write to a
//! staged region, the *initiator* (the process that posts the write) sends the bytes to a slot of the *target* (the
//! process that owns the region), and the target's worker copies them from the slot into the region. For a read, the
//! target's worker copies the bytes from the region into a slot, and sends them to the initiator. All slots work in
//! parallel. Small work requests share a slot, as its *pages*.
//!
//! Small pages of memory that both devices do reach may take the same way, because they then share requests of the
//! device: they are *coalesced* ([`Staged::coalescing`]).
//!
//! A *work request* (WR) is what the engine posts to an endpoint, as elsewhere. A *slot request* is a message by which
//! the initiator asks the target to copy a slot; the target answers each one by a *response*.
//! [`multirail_spi::staging`] has what is the same in loopback's own staging.
//!
//! The modules, in reading order:
//!
//! - `backend`: [`Staged`] opens the devices of the inner backend.
//! - `domain`: registers memory with the inner device, stages what the device refuses, and connects.
//! - `region`: the staged regions of this process; `gpu_memory`: the GPU memory that the inner device did register.
//! - `staging_buffer`: the memory layout of a staging buffer; `wire`: the slot requests and responses that two
//!   processes write into each other's buffer; `offer`: how they tell each other about their buffers.
//! - `run_queue`: the work requests of an initiator, as runs of pages; `initiator_slot`: a slot of its own.
//! - `page_table`: the pages of a slot; `imports`: the peers' regions that coalesced requests address; `key_hash`: how
//!   tables of regions hash keys.
//! - `copies`: copies between slots and regions, by the processor or by GPUs.
//! - `connection`: the connections of a domain, and the parts of the endpoint that an initiator or a target uses.
//! - `endpoint`: posts unstaged work requests to the inner endpoint, and passes staged ones to `initiator`; `target`
//!   serves the slot requests of peers.
//! - `receives`: receives into staged memory; `wr_id`: the work requests that this crate posts by itself.
//!
//! Cost: 8.3 MiB of registered memory in each process for each connection of a rail. If both devices have imms, one
//! message carries a slot's bytes and its request. If an imm wakes the peer's worker, each slot request and each response
//! carries one. Otherwise workers poll with naps, as they do without staging.
#![deny(unsafe_code)]

mod backend;
#[cfg(any(test, fuzzing))]
#[allow(unsafe_code, reason = "copies in place of a device")]
mod both_sides;
mod connection;
#[allow(unsafe_code, reason = "copies between slots and regions")]
mod copies;
#[allow(unsafe_code, reason = "passes on the safety contract of registration")]
mod domain;
#[allow(unsafe_code, reason = "passes on the safety contract of posting")]
mod endpoint;
#[cfg(fuzzing)]
#[allow(unsafe_code, reason = "reads a region at the end")]
pub mod fuzz;
mod gpu_memory;
mod imports;
#[allow(unsafe_code, reason = "starts copies from and to regions")]
mod initiator;
mod initiator_slot;
mod key_hash;
mod offer;
mod page_table;
#[allow(unsafe_code, reason = "registers memory for messages, and copies from it")]
mod receives;
#[allow(unsafe_code, reason = "sends an address to another thread")]
mod region;
mod run_queue;
#[allow(unsafe_code, reason = "owns memory that peers write to")]
mod staging_buffer;
#[allow(unsafe_code, reason = "starts copies from and to regions")]
mod target;
mod wire;
mod wr_id;

pub use backend::Staged;
pub use multirail_spi::StagingPolicy;

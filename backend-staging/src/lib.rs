//! Memory that a card refuses, moved through the host's: a backend around a backend.
//!
//! A card takes a GPU's memory by a DMA-BUF, or where a module of the kernel tells it of the address. On machines that
//! have neither it refuses, and so does multirail, unless both processes allow [`Staging`]: then such a region is
//! *staged*. Bytes to it go to a slot of the target's host memory, and the target's worker has the GPU copy them from
//! there; bytes from it are copied into a slot first. Both are pipelined over the slots of a connection.
//!
//! In reading order:
//!
//! - [`Staged`] opens the devices of another backend: `domain` registers with the card, and stages what that refuses; it
//!   connects with a ring for each side: `link`, `ring`.
//! - `region` is what peers may touch of this side's, and who is at it.
//! - `endpoint` posts to the card what needs no staging, and gives the rest to `outlet`, the initiator's end; what
//!   peers ask for is `service`'s. What the two write into each other's ring is `wire`.
//! - `copies` has the processor, or GPUs, move bytes between slots and regions; `far` is GPU memory that the card does
//!   take; `receives` are for messages; `ours` names the requests that are none of the engine's, `status` says why they
//!   failed.
//!
//! What it costs: 4 MiB of registered memory for each connection of a rail, and an imm for each ask and each answer,
//! which wakes the other side's worker; where the device wakes nobody, workers nap as they do without staging.
#![deny(unsafe_code)]

mod backend;
#[allow(unsafe_code, reason = "copies between slots and regions")]
mod copies;
#[allow(unsafe_code, reason = "hands the contract of registration on")]
mod domain;
#[allow(unsafe_code, reason = "hands the contract of posting on")]
mod endpoint;
mod far;
mod link;
mod ours;
#[allow(unsafe_code, reason = "begins copies from and to regions")]
mod outlet;
#[allow(unsafe_code, reason = "registers memory for messages, and copies from it")]
mod receives;
#[allow(unsafe_code, reason = "an address crosses threads")]
mod region;
#[allow(unsafe_code, reason = "owns memory that peers write to")]
mod ring;
#[allow(unsafe_code, reason = "begins copies from and to regions")]
mod service;
mod status;
mod wire;

pub use backend::Staged;
pub use multirail_spi::Staging;

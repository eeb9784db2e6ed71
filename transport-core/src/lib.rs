//! Types, backend traits and engine of multirail; knows no backend.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "maps memory")]
mod buffer;
mod control;
#[allow(unsafe_code, reason = "the one place that copies racing bytes")]
pub mod copy;
mod descriptor;
mod doorbell;
mod engine;
mod error;
#[allow(unsafe_code, reason = "hands the contract of registration on")]
mod fabric;
mod imm;
#[allow(unsafe_code, reason = "runs checked requests in the calling thread")]
mod link;
#[allow(unsafe_code, reason = "states the contract of an owner of memory")]
mod memory;
mod op;
mod operations;
mod options;
mod pages;
mod peer;
mod plan;
mod pool;
#[allow(unsafe_code, reason = "copies into and out of checked ranges")]
mod region;
mod remote;
#[allow(unsafe_code, reason = "states the contracts of registering and posting")]
pub mod spi;
mod sync;
mod time;
mod watchers;
#[allow(unsafe_code, reason = "borrows the descriptors that endpoints keep open")]
mod worker;

pub use buffer::HostBuffer;
pub use control::{Acceptor, Bootstrap, Channel, Listener, MAX_FRAME, RecvHalf, SendHalf, TcpBootstrap};
pub use descriptor::Descriptor;
pub use doorbell::{Bell, Doorbell};
pub use engine::{Progress, RailCounters};
pub use error::{Error, ErrorKind, Result};
pub use fabric::{Fabric, FabricBuilder, TransportConfig, TransportInfo};
pub use imm::{Expect, ImmCounter};
pub use memory::{Access, Locality, Memory, MemoryKind};
pub use op::{Cancel, Op, Outcome};
pub use options::{ImmMode, ReadOptions, SendOptions, WriteOptions, imm_count};
pub use pages::Pages;
pub use peer::{Peer, PeerClosed, PeerId};
pub use pool::{Message, NextMessage, RecvPool};
pub use region::Region;
pub use remote::RemoteRegion;
pub use time::{Clock, SystemClock, Time, VirtualClock};

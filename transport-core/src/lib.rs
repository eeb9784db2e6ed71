//! Types, backend traits and engine of multirail; knows no backend.
//!
//! Users depend on the facade `multirail`, which re-exports all of this and knows
//! the backends by name; backends implement [`spi`].
//!
//! In reading order:
//!
//! - [`Fabric`], [`FabricBuilder`]: opened transports, and what they are opened with.
//! - [`Region`], [`Descriptor`], [`RemoteRegion`]: memory here, as bytes, and there;
//!   [`Memory`] and [`HostBuffer`] own it, [`copy`] moves it; on Linux [`P2pAllocator`] takes devices'.
//! - [`Peer`] and its operations, with [`WriteOptions`] and [`Pages`]; [`PeerGroup`] asks
//!   many at once, an [`Explanation`] says what one would do. [`Op`] is their future,
//!   [`ImmCounter`] and [`RecvPool`] the other side of them. [`wait`] blocks on any future
//!   where there is no executor. A [`Signal`] is what a GPU waits for ([`ImmCounter::mirror`]), or
//!   writes to begin an operation ([`WriteOptions::when`]).
//! - [`Bootstrap`], [`Listener`]: how peers find each other; TCP is built in. A
//!   [`Token`] keeps strangers out, [`Fabric::tenant`] keeps peers apart.
//! - [`GrantPolicy`]: how much each peer may send.
//! - [`Clock`]: time is injected, as is every seed.
//! - [`observe`]: what a fabric is doing, and what each operation waits for.
//! - [`spi`]: what a backend implements.
//!
//! Inside: `engine` runs operations (one step is `Engine::step`), `op` keeps them,
//! `plan` splits them, `engine::worker` is the thread that drives an engine, `control` the
//! plane beside it.
//!
//! ```
//! use multirail_core::{Pages, imm_count};
//!
//! // Pages 4, 0 and 9 of a region, 8 KiB apart, behind a header of 512 bytes.
//! let pages = Pages::new([4, 0, 9]).stride(8192).offset(512);
//! assert_eq!(pages.len(), 3);
//! // A single write of 2.5 MiB with an imm per work request delivers three.
//! assert_eq!(imm_count(5 << 19), 3);
//! ```
//!
//! # Threads
//!
//! Everything public may be used from any thread, and every future polled by any
//! executor. A fabric owns a worker thread per rail group and one control thread;
//! a caller-driven fabric has no workers, and [`Fabric::step`] drives it; connections may
//! be served by a runtime of the caller's, too ([`FabricBuilder::control_on`]).
//!
//! # Cleanup
//!
//! The last [`Fabric`] closes it: peers are told, what is posted is taken back,
//! threads are joined, every waiter has its answer. Dropping an [`Op`] requests a
//! cancel; the memory it uses stays held until the hardware is done with it.

#![deny(unsafe_code)]

mod descriptor;
mod engine;
mod explain;
#[allow(unsafe_code, reason = "hands the contract of registration on")]
mod fabric;
#[cfg(fuzzing)]
pub mod fuzz;
mod group;
mod imm;
mod index;
mod no_transport;
pub mod observe;
mod op;
mod operations;
mod options;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "owns memory of devices")]
mod p2pmem;
mod pages;
mod peer;
mod plan;
mod pool;
mod prepared;
#[allow(unsafe_code, reason = "copies into and out of checked ranges")]
mod region;
mod remote;
mod request;
mod retained;
mod striping;
mod submit;
#[cfg(test)]
mod tests;
mod trigger;

#[cfg(feature = "tls")]
pub use control::TlsBootstrap;
pub use control::{
    Acceptor, Bootstrap, Channel, Incoming, MAX_FRAME, RecvHalf, SendHalf, TcpBootstrap, Token,
};
pub use descriptor::Descriptor;
pub use engine::flow_control::{EvenShares, Grant, GrantPolicy, GrantRequest};
pub use engine::{RailCounters, StepReport};
pub use explain::{Explanation, RailPlan, TransportChoice};
pub use fabric::{
    Fabric, FabricBuilder, GroupLocation, ListedGroup, Listener, Pinning, RailGroups, TransportConfig,
    TransportInfo, WeakFabric, Workers,
};
pub use group::{Barrier, PeerGroup, ScatterPart};
pub use imm::{Arrivals, Expect, ImmCounter, Mirror, NextArrivals, OnPeerClosed};
use multirail_control as control;
pub use multirail_spi as spi;
pub use no_transport::{NoCommonTransport, OfferedTransport};
pub use observe::{Dump, Recording};
pub use op::{Cancel, Op, OpId, Outcome, wait};
pub use options::{ImmMode, ReadOptions, SendOptions, WriteOptions, imm_count};
#[cfg(target_os = "linux")]
pub use p2pmem::{P2pAllocator, P2pMemory};
pub use pages::Pages;
pub use peer::{Drain, Peer, PeerClosed, PeerId};
pub use pool::{Message, NextMessage, RecvPool};
pub use prepared::PreparedWrite;
pub use region::Region;
pub use remote::RemoteRegion;
#[cfg(unix)]
pub use spi::DmaBuf;
pub(crate) use spi::sync;
pub use spi::{
    Access, Clock, Error, ErrorKind, Fence, HostBuffer, Locality, Memory, MemoryKind, Result, Signal,
    Staging, SystemClock, Time, VirtualClock, WakeupHandle, WakeupPipe, copy,
};
pub use trigger::Trigger;

//! The public API of multirail: fabrics, regions, peers and operations. This crate knows no backend.
//!
//! Users depend on the facade `multirail`, which re-exports this crate and knows the backends by name. Backends
//! implement [`spi`].
//!
//! In reading order:
//!
//! - [`Fabric`], [`FabricBuilder`]: opened transports, and their settings.
//! - [`Region`], [`Descriptor`], [`RemoteRegion`]: local memory, the bytes that describe it, and a peer's memory.
//!   [`Memory`] and [`HostBuffer`] own memory, [`copy`] moves it. On Linux, [`P2pAllocator`] allocates memory of
//!   devices.
//! - [`Catalogue`], [`RemoteCatalogue`]: many regions at once, found by address.
//! - [`Peer`] and its operations, with [`WriteOptions`] and [`Pages`]. [`PeerGroup`] addresses many peers at once. An
//!   [`Explanation`] says what an operation would do. [`Op`] is the future of an operation. The target uses
//!   [`ImmCounter`] and [`RecvPool`]. [`wait`] blocks on any future if there is no executor. A GPU waits for a
//!   [`Signal`] ([`ImmCounter::mirror`]), or writes one to begin an operation ([`WriteOptions::when`]).
//! - [`PeerHandle`]: a peer that comes back. It connects again by a [`ReconnectPolicy`], and gives the current
//!   [`Peer`].
//! - [`Notifications`]: bytes that tell a peer of the end of a transfer ([`WriteOptions::notify`]), or of anything else
//!   ([`Peer::notify`]).
//! - [`Bootstrap`], [`Listener`]: how peers find each other; TCP is built in. With a [`Token`] only authenticated peers
//!   connect. [`Fabric::tenant`] separates groups of peers.
//! - [`GrantPolicy`]: how much each peer may send.
//! - [`Clock`]: time is injected, as is every seed.
//! - [`observe`]: what a fabric does, and what each operation waits for.
//! - [`admin`]: a socket for other programs, which look at the rails and take devices out of service.
//! - [`way`]: the cost model of the four ways that pages can take.
//! - [`spi`]: the traits that a backend implements.
//!
//! Below: `multirail-engine` runs operations (one step is `Engine::step`), and `multirail-control` is the control
//! plane.
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
//! Any thread may use all public items, and any executor may poll the futures. A fabric has a worker thread per rail
//! group and one control thread. A caller-driven fabric has no workers: [`Fabric::step`] drives it. A runtime of the
//! caller can serve the connections instead of the control thread ([`FabricBuilder::control_on`]).
//!
//! # Cleanup
//!
//! Dropping the last clone of a [`Fabric`] closes it: the fabric tells its peers, ends its operations, joins its
//! threads, and answers every waiter. Dropping an [`Op`] requests a cancel. The library keeps the operation's memory
//! until the hardware has finished with it.

#![deny(unsafe_code)]

pub mod admin;
mod catalogue;
mod coalescing;
mod descriptor;
mod explain;
#[allow(unsafe_code, reason = "passes the contract of registration on to the caller")]
mod fabric;
#[cfg(fuzzing)]
pub mod fuzz;
mod group;
mod imm;
mod list;
mod no_transport;
mod notifications;
pub mod observe;
mod operations;
mod options;
mod outgoing;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "owns memory of devices")]
mod p2pmem;
mod pages;
mod path_policy;
mod peer;
mod peer_handle;
mod pool;
mod prepared;
mod region;
mod remote;
mod span_link;
mod striping;
#[cfg(test)]
mod tests;
mod trace_context;

pub use catalogue::{Catalogue, RemoteCatalogue};
#[cfg(feature = "tls")]
pub use control::TlsBootstrap;
pub use control::{
    Acceptor, Bootstrap, Channel, Incoming, MAX_FRAME, RecvHalf, SendHalf, TcpBootstrap, Token,
};
pub use descriptor::Descriptor;
pub use engine::plan::way;
pub use engine::{
    Cancel, EvenShares, Grant, GrantPolicy, GrantRequest, ImmMode, Message, Op, OpId, OperationCounters,
    Outcome, PeerId, RailCounters, RailReceipt, Receipt, SizeCounters, StepReport, Trigger, wait,
};
pub use explain::{Explanation, RailPlan, TransportChoice};
pub use fabric::{
    Fabric, FabricBuilder, GroupLocation, ListedGroup, Listener, PeerCounters, Pinning, RailGroups,
    RegistrationCounters, TransportConfig, TransportInfo, WeakFabric, Workers,
};
pub use group::{Barrier, PeerGroup, ScatterPart};
pub use imm::{Arrivals, Expect, ImmCounter, Mirror, NextArrivals, OnPeerClosed};
pub use list::{LocalList, RegionList, RemoteList, Selection};
use multirail_control as control;
use multirail_engine as engine;
pub use multirail_spi as spi;
pub use no_transport::{NoCommonTransport, OfferedTransport};
pub use notifications::{NextNotification, Notification, Notifications};
pub use observe::{Dump, Recording};
pub use options::{ReadOptions, SendOptions, WriteOptions, imm_count};
#[cfg(target_os = "linux")]
pub use p2pmem::{P2pAllocator, P2pMemory};
pub use pages::Pages;
pub use path_policy::PathPolicy;
pub use peer::{Drain, Peer, PeerClosed};
pub use peer_handle::{AddressSource, PeerHandle, RebindableTransfer, ReconnectPolicy};
pub use pool::{NextMessage, RecvPool};
pub use prepared::PreparedTransfer;
pub use region::Region;
pub use remote::RemoteRegion;
pub use span_link::{SpanLink, set_span_link};
#[cfg(unix)]
pub use spi::DmaBuf;
pub use spi::{
    Access, Clock, CoalescePolicy, Error, ErrorKind, Flush, HostBuffer, HostRange, Locality, Memory,
    MemoryKind, Paths, Result, Signal, StagingPolicy, SystemClock, Time, VirtualClock, WakeupHandle,
    WakeupPipe, copy,
};
pub use trace_context::TraceContext;

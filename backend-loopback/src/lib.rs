//! Loopback: memory copies on one host.
//!
//! A real backend (the fastest way to move memory between two places of one
//! host) and the test bench of everything above it. A target keeps a *segment*
//! per peer: a lane for immediate data and messages, and a board of lease words,
//! one per region. An initiator in the same process shares it; one in another
//! process maps it.
//!
//! Read in this order: `ring`, `lane` and `board` lie in a `segment`;
//! `region`, `orphan`, `registration` and `remote` are memory, ours and theirs; `peer`, `peers`,
//! `offer`, `host` and `connector` bring two domains together; `runner`, with
//! `held` and `shortcut`, moves bytes for the `endpoint` and `direct`; `staging`, `outlet` and
//! `stage` move those that only their owner can reach, `gpu` has GPUs move theirs; `attached` is a peer in the
//! endpoint's eyes, `ended` what it has to report, `door` where it sleeps; `link` says how a device
//! behaves that `model` stands in for; `domain` and `backend` hold it together. On Linux, `server`,
//! `dial`, `turn`, `wire`, `mapping`, `process`, `foreign` and its `guard` reach other processes,
//! and `refusal` says why the kernel does not.
//!
//! ```
//! use multirail_loopback::Loopback;
//! use multirail_spi::Backend;
//!
//! assert_eq!(Loopback::new().probe().unwrap()[0].name, "lo0");
//! ```
//!
//! # Trust
//!
//! Processes of one user trust each other with the *contents* of what they
//! register: a peer process maps the file of a shared region and could ignore
//! bounds, rights and leases, as it could with ptrace. What a peer cannot do is
//! break this process: files are checked for size and seals before they are
//! mapped, and everything read from shared memory or a socket is bounded and
//! checked. A hostile or dying peer spoils its own lane and board, no others.
//! Other users are refused at the socket (the effective user ids must be one, root's
//! too), and so is whoever lacks an offer's secret. Memory without a file is reached by
//! the rules of ptrace, which ask for more (see `foreign`); a staged region is moved by
//! its owner, who checks bounds, rights and revocation itself. `docs/trust.md` has the
//! details.
//!
//! # Threads and cleanup
//!
//! Domains may be used from any thread; an endpoint by one at a time. On Linux a
//! domain has one more thread, which hands files to peers and notices their
//! deaths; it ends with the last of domain, endpoint and regions. A region that is
//! dropped while a peer is inside keeps its memory until the peer has left or died.

mod attached;
mod backend;
mod board;
mod connector;
#[cfg(target_os = "linux")]
mod dial;
mod direct;
mod domain;
mod door;
mod ended;
mod endpoint;
#[cfg(target_os = "linux")]
mod foreign;
#[cfg(all(fuzzing, target_os = "linux"))]
pub mod fuzz;
mod gpu;
#[cfg(target_os = "linux")]
mod guard;
mod held;
mod host;
mod lane;
mod link;
#[cfg(target_os = "linux")]
mod mapping;
mod model;
mod null;
mod offer;
mod orphan;
mod outlet;
mod peer;
mod peers;
mod posted_writes;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod refusal;
mod region;
mod registration;
mod remote;
mod ring;
mod runner;
mod segment;
#[cfg(target_os = "linux")]
mod server;
mod shortcut;
mod stage;
mod staging;
mod status;
#[cfg(target_os = "linux")]
mod turn;
#[cfg(target_os = "linux")]
mod wire;

pub use backend::{Loopback, LoopbackConfig};
pub use gpu::GpuSide;
pub use link::LinkModel;
pub use multirail_spi::Staging;
pub use null::{Null, Switch};

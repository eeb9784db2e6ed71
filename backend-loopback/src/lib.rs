//! Loopback: memory copies on one host.
//!
//! Loopback is a real backend, the fastest way to move memory within one host. It is also the test bench of every
//! layer above it: with a link model, its devices are as slow and as unreliable as the model says.
//!
//! A target makes a *segment* per peer. The segment has a message ring, which carries immediate data and messages,
//! and a lease table, which has one word per region of the target. An initiator in the same process shares the
//! segment; an initiator in another process maps it. To write or read, the initiator enters the lease of the region,
//! copies, and leaves.
//!
//! The modules in reading order. Each one uses only modules above it:
//!
//! | module | content |
//! |---|---|
//! | `host`, `offer` | the identity of a host; the bytes that two domains exchange |
//! | `wakeup` | waking an endpoint |
//! | `segment` | shared memory: `message_ring`, `lease_table`, `staging_buffer`, and the checks before it is mapped |
//! | `other_process` | peers in other processes: the server's protocol, the portable path, `process_vm_writev` |
//! | `status` | the statuses of failures, and their text |
//! | `inbound`, `regions` | the target's half of a connection; the registered regions |
//! | `outbound`, `peer_table` | the initiator's half of a connection; the slots of peers |
//! | `imports` | regions of peers, how this side reaches them, copies between processes |
//! | `completions` | events that wait to be polled |
//! | `gpu`, `staging` | copies by GPUs; copies by the target's worker |
//! | `link_model` | the behaviour of a modelled device |
//! | `config`, `domain_state` | the configuration of devices; the state that the parts of a domain share |
//! | `endpoint`, `direct` | running requests in a worker; in the calling thread |
//! | `domain`, `backend` | an opened device with its server thread; the list of devices |
//! | `null` | devices that move no byte |
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
//! Processes of one user trust each other with the *contents* of the memory that they register: a peer process maps
//! the file of a shared region and could ignore bounds, rights and leases, as it could with ptrace. A peer cannot
//! break this process: this side checks before it maps a file that nobody can resize it (on Linux by its seals), and
//! checks the bounds of everything that it reads from shared memory or a socket. A hostile or dying peer can spoil
//! only its own segment.
//!
//! The server refuses processes of other users (the effective user ids must be equal, root's too), and processes that
//! do not have an offer's secret. Memory without a file is reached by the rules of ptrace, which demand more (see
//! `other_process::vm_call`). The owner of a staged region copies its bytes, and checks bounds, rights and revocation
//! itself. `docs/trust.md` has the details.
//!
//! # Threads and cleanup
//!
//! Any thread may use a domain; one thread at a time may use an endpoint. A domain has a server thread,
//! which sends files to peers and notices when their processes die. The thread ends when the domain, its endpoint, its
//! regions and its imports are dropped. If a region is dropped while a peer is inside, its memory stays allocated until
//! the peer has left or is dead.

mod backend;
mod completions;
mod config;
mod direct;
mod domain;
mod domain_state;
mod endpoint;
#[cfg(fuzzing)]
pub mod fuzz;
mod gpu;
mod host;
mod imports;
mod inbound;
mod link_model;
mod null;
mod offer;
mod other_process;
mod outbound;
mod peer_table;
mod regions;
mod segment;
mod staging;
mod status;
mod wakeup;

pub use backend::Loopback;
pub use config::LoopbackConfig;
pub use gpu::GpuSide;
pub use link_model::{BrokenPath, LinkModel};
pub use multirail_spi::StagingPolicy;
pub use null::{Null, Switch};

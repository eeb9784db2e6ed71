//! multirail's verbs backend: RoCE v2 and InfiniBand over libibverbs' reliable connections.
//!
//! [`Verbs`] opens ports of RDMA cards. It opens libibverbs at run time: a program also builds and starts on a machine
//! without libibverbs, and then reports what is missing.
//!
//! An endpoint has a completion queue and two shared receive queues. One has receives without buffers, which arriving
//! imms take. The other has buffers for messages. Each peer has queue pairs of its own: several for writes and reads,
//! and one for messages.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux has RDMA cards"))]

mod backend;
mod config;
mod connector;
mod destroyer;
mod device;
mod device_memory;
mod domain;
mod endpoint;
mod flush;
mod gid;
mod objects;
mod peers;
mod port;
mod posted;
mod queue_pair;
mod receives;
mod region;
mod retries;
mod send_queues;
#[cfg(all(test, target_os = "linux"))]
mod soft_roce;
mod status;
mod submit;

pub use backend::Verbs;
pub use config::VerbsConfig;
pub use objects::libibverbs_opens;

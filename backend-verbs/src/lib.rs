//! multirail's verbs backend: RoCE v2 and InfiniBand over libibverbs' reliable connections.
//!
//! [`Verbs`] opens ports of RDMA cards. libibverbs is opened at run time: a machine without it
//! builds and starts, and says what is missing.
//!
//! A transport core endpoint is a completion queue with two shared receive queues: one of receives
//! without buffers, that writes with imm take, one of message buffers. Each peer has queue pairs of
//! its own, several for writes and reads, and one for messages.
#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "there is no card to open"))]

mod backend;
mod config;
mod connector;
mod device;
mod domain;
mod endpoint;
mod far;
mod flush;
mod gid;
mod objects;
mod peers;
mod port;
mod posted;
mod queue_pair;
mod receives;
mod region;
mod send_queues;
#[cfg(all(test, target_os = "linux"))]
mod soft_roce;
mod status;
mod submit;

pub use backend::Verbs;
pub use config::VerbsConfig;
pub use objects::libibverbs_opens;

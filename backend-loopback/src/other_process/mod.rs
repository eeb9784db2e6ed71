//! What this side needs to reach peers in other processes of this host. Linux only.
//!
//! A [`client`] asks a target's server by the [`protocol`], and gets files. [`process`] identifies the process at the
//! other end of a socket. [`vm_call`] are the kernel's calls on memory of another process, [`guard_page`] makes sure
//! that a call reaches the right one, and [`ptrace_diagnosis`] says why the kernel refuses. [`gpu_memory`] hands
//! memory of GPUs over.

mod client;
pub(crate) mod gpu_memory;
mod guard_page;
pub(crate) mod process;
pub(crate) mod protocol;
pub(crate) mod ptrace_diagnosis;
mod timed_lock;
pub(crate) mod vm_call;

pub(crate) use client::{TargetConnection, short_of_memory};
pub(crate) use guard_page::GuardPage;
pub(crate) use process::Process;

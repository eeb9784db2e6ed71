//! A simulated EFA device, see README.md.

#![cfg(target_os = "linux")]

mod completions;
mod config;
mod device;
mod efadv;
mod faults;
mod host;
mod memory;
mod name;
mod p5;
mod page;
mod poll;
mod post;
mod queue_pair;
mod remote;
mod request;
mod status;
mod work;

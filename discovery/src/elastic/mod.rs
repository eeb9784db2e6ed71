//! Connected peers that follow a directory.
//!
//! [`ElasticGroup`] watches the directory and has a slot for each member (`slots`). A `link_task` connects to a member,
//! and again when the connection is lost. Each change of the connected members makes a new [`Epoch`].

mod connected_member;
mod epoch;
mod group;
mod link_task;
mod slots;
#[cfg(test)]
mod tests;

pub use connected_member::ConnectedMember;
pub use epoch::Epoch;
pub use group::{ElasticGroup, ElasticOptions};
use link_task::LinkTask;
use slots::{GroupState, SlotId};

//! Striping: which rail groups carry an operation, and which of its pieces each of them carries.

use std::sync::Arc;

use crate::engine::op::OpId;
use crate::engine::peer::{CountedRails, Link};
use crate::engine::plan::RailRange;
use crate::engine::{SharedState, Work};
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, ImmMode, Result};

/// The bytes that are worth handing to another group, whose thread may have to be woken. They take 100 µs to copy, or
/// 40 µs by four devices of 100 Gbps.
const MIN_SHARE: u64 = 2 << 20;

/// The links that carry an operation.
pub(crate) enum Shares<'a> {
    One(&'a Link),
    /// Several links, each with its pieces.
    Many(Vec<(&'a Link, RailRange)>),
}

impl<'a> Shares<'a> {
    /// Chooses the links for `work`; `link` is the first link of the transport to use.
    ///
    /// Only rail groups that reach both regions count. A large operation is shared by all of them, by their capacity.
    /// Any other operation goes to the group with the smallest backlog. Among equals that is the group of the last
    /// operation: its thread is awake, and its caches know pages that move again and again.
    ///
    /// # Errors
    /// `Unreachable` if no rail group reaches both regions.
    pub fn new(peer: &'a PeerInner, link: &'a Link, work: &Work, operation: &'static str) -> Result<Self> {
        let links = peer.links_of(link.engine.transport);
        if links.len() == 1 || work.remote.is_none() {
            return Ok(Self::One(link));
        }
        let of = |counted: CountedRails| {
            let capacities = links.iter().map(move |link| (link, link.capacity(work, counted)));
            capacities.filter(|(_, capacity)| *capacity > 0)
        };
        let mut reach = of(CountedRails::InService);
        let mut groups = reach.clone().count() as u64;
        if groups == 0 {
            // What no rail in service reaches goes over those that are retired.
            reach = of(CountedRails::All);
            groups = reach.clone().count() as u64;
        }
        if groups == 0 {
            let why = "no pair of rails joins the rails that the local region is registered on with those of the \
                       remote region; register one of them on all rails";
            return Err(Error::new(ErrorKind::Unreachable, operation, why));
        }
        let shares = (work.bytes() / MIN_SHARE).clamp(1, groups).min(work.pieces.len().max(1).into());
        let first = match shares == groups {
            true => 0,
            false => peer.least_backlog(reach.clone().map(|(link, _)| link)),
        };
        let mut chosen = reach.clone().skip(first).chain(reach.take(first)).take(shares as usize);
        if shares == 1 {
            return Ok(Self::One(chosen.next().map_or(link, |(link, _)| link)));
        }
        // Engines change the capacities meanwhile, so each is read once from here on.
        let chosen: Vec<_> = chosen.collect();
        let whole: u64 = chosen.iter().map(|(_, capacity)| *capacity).sum();
        if whole == 0 {
            return Ok(Self::One(link));
        }
        let mut from = 0;
        let parts = chosen.into_iter().map(|(link, capacity)| {
            let pieces = work.shape.part(work.pieces, from, from + capacity, whole);
            from += capacity;
            (link, pieces)
        });
        Ok(Self::Many(parts.collect()))
    }
}

/// The op table slots of an operation, in each engine that carries a share of it.
pub(crate) enum OpSlots<'a> {
    One(OpSlot<'a>),
    /// Several slots, each with its pieces, and the countdown of the shares that must end before the imm.
    Many(Vec<(OpSlot<'a>, RailRange)>, Option<Arc<SharedState>>),
}

impl<'a> OpSlots<'a> {
    /// Takes a slot of each engine that is to carry a share of `work`. Several slots need an allocation.
    ///
    /// # Errors
    /// Those of [`Shares::new`], and `Busy` if an op table is full.
    pub fn take(peer: &'a PeerInner, link: &'a Link, work: &Work, operation: &'static str) -> Result<Self> {
        let parts = match Shares::new(peer, link, work, operation)? {
            Shares::One(link) => {
                prefer(peer, link);
                return Ok(Self::One(OpSlot::take(link, operation)?));
            }
            Shares::Many(parts) => parts,
        };
        let announced = work.imm.is_some() && work.imm_mode == ImmMode::Last;
        let countdown = announced.then(|| Arc::new(SharedState::new(parts.len() as u32, None)));
        let slots = parts.into_iter().map(|(link, pieces)| Ok((OpSlot::take(link, operation)?, pieces)));
        Ok(Self::Many(slots.collect::<Result<_>>()?, countdown))
    }
}

/// Prefers the group of `link` for the next operation.
fn prefer(peer: &PeerInner, link: &Link) {
    let group = link.engine.group;
    if peer.preferred_group.load() != group {
        peer.preferred_group.store(group);
    }
}

/// A slot of an engine's op table. Dropping it gives the slot back, unless an operation was submitted with it.
pub(crate) struct OpSlot<'a> {
    pub link: &'a Link,
    id: OpId,
    is_kept: bool,
}

impl<'a> OpSlot<'a> {
    /// Returns `Busy` if all slots are taken.
    pub fn take(link: &'a Link, operation: &'static str) -> Result<Self> {
        Ok(Self { link, id: link.engine.insert(operation)?, is_kept: false })
    }

    /// The operation's id.
    pub fn id(&self) -> OpId {
        self.id
    }

    /// Keeps the slot for an operation. Returns the operation's id.
    pub fn keep(mut self) -> OpId {
        self.is_kept = true;
        self.id
    }
}

impl Drop for OpSlot<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.link.engine.table.take_back(self.id);
        }
    }
}

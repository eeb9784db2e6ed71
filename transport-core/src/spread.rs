//! Operations over several rail groups: which of them carry one, and how much each.

use std::sync::Arc;

use crate::engine::peer::Link;
use crate::engine::{ImmCountdown, Work};
use crate::peer::PeerInner;
use crate::plan::RailRange;
use crate::submit::Place;
use crate::{Error, ErrorKind, ImmMode, Result};

/// Bytes that are worth handing to another group, whose thread may have to be woken:
/// 100 µs of copying, or 40 µs of four cards of 100 Gbps.
const SHARE: u64 = 2 << 20;

/// A backlog from which on the next operation goes to another group: handing pages that
/// are moved again and again from one core's caches to another's costs up to four times
/// their copy (benches/README.md), waiting for so much 100 µs.
const BEHIND: u64 = 4 << 20;

/// With which engines an operation has slots.
pub(crate) enum Places<'a> {
    One(Place<'a>),
    /// What falls to each, and where they meet before the imm.
    Many(Vec<(Place<'a>, RailRange)>, Option<Arc<ImmCountdown>>),
}

/// Which links carry an operation.
pub(crate) enum Shares<'a> {
    One(&'a Link),
    /// And which of its pieces each.
    Many(Vec<(&'a Link, RailRange)>),
}

impl PeerInner {
    /// Slots with the engines that carry `work`. More than one is an allocation.
    pub(crate) fn places<'a>(
        &'a self,
        link: &'a Link,
        work: &Work,
        operation: &'static str,
    ) -> Result<Places<'a>> {
        let parts = match self.shares(link, work, operation)? {
            Shares::One(link) => {
                self.settle(link);
                return Ok(Places::One(Place::take(link, operation)?));
            }
            Shares::Many(parts) => parts,
        };
        let announced = work.imm.is_some() && work.imm_mode == ImmMode::Last;
        let imm_countdown = announced.then(|| Arc::new(ImmCountdown::new(parts.len() as u32)));
        let places = parts.into_iter().map(|(link, pieces)| Ok((Place::take(link, operation)?, pieces)));
        Ok(Places::Many(places.collect::<Result<_>>()?, imm_countdown))
    }

    /// Of the rail groups that reach both regions all by their capacity if `work` is
    /// large, else the one that has least before it, and among equals the one that was
    /// taken last: its thread is awake, and its caches know the pages that are moved again
    /// and again. `link` is the transport's first.
    pub(crate) fn shares<'a>(
        &'a self,
        link: &'a Link,
        work: &Work,
        operation: &'static str,
    ) -> Result<Shares<'a>> {
        let links = self.route(link.engine.transport);
        if links.len() == 1 || work.remote.is_none() {
            return Ok(Shares::One(link));
        }
        let reach =
            links.iter().map(|link| (link, capacity(link, work))).filter(|(_, capacity)| *capacity > 0);
        let groups = reach.clone().count() as u64;
        if groups == 0 {
            let why = "the local region is registered near rails that are paired with none the remote one is registered near; register one of them on all rails";
            return Err(Error::new(ErrorKind::Unreachable, operation, why));
        }
        let shares = (work.bytes() / SHARE).clamp(1, groups).min(work.pieces.len().max(1).into());
        let first = match shares == groups {
            true => 0,
            false => self.first(reach.clone().map(|(link, _)| link)),
        };
        let mut turns = reach.clone().skip(first).chain(reach.take(first)).take(shares as usize);
        if shares == 1 {
            return Ok(Shares::One(turns.next().map_or(link, |(link, _)| link)));
        }
        let whole: u64 = turns.clone().map(|(_, capacity)| capacity).sum();
        let mut from = 0;
        let parts = turns.map(|(link, capacity)| {
            let pieces = work.pieces.part(from, from + capacity, whole);
            from += capacity;
            (link, pieces)
        });
        Ok(Shares::Many(parts.collect()))
    }

    /// Which of `links` an operation begins with that does not need all of them.
    fn first<'a>(&self, links: impl Iterator<Item = &'a Link>) -> usize {
        let home = self.home.load();
        let behind = |link: &Link| match link.backlog.weight() / BEHIND {
            0 => (0, link.engine.group != home),
            times => (times, false),
        };
        links.enumerate().min_by_key(|(_, link)| behind(link)).map_or(0, |(at, _)| at)
    }

    /// The next operation goes the same way if it may.
    fn settle(&self, link: &Link) {
        let group = link.engine.group;
        if self.home.load() != group {
            self.home.store(group);
        }
    }
}

/// What the rails of a link carry that reach both regions, relative to other links.
fn capacity(link: &Link, work: &Work) -> u64 {
    let (transport, first) = (link.engine.transport, link.engine.first_rail);
    let reaches = |rail: usize| work.is_local_on(transport, rail) && work.is_remote_on(rail);
    let rails = link.rails.iter().enumerate().filter(|(rail, _)| reaches(first + rail));
    rails.filter_map(|(_, paired)| Some(u64::from(paired.as_ref()?.weight))).sum()
}

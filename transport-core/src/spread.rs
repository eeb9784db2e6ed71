//! Operations over several rail groups: which of them carry one, and how much each.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::{Gate, Work};
use crate::link::Link;
use crate::peer::PeerInner;
use crate::{Error, ErrorKind, ImmMode, Op, Result, Time};

/// Bytes that are worth handing to another group, whose thread may have to be woken:
/// a millisecond's quarter of copying, and 40 µs of four cards of 100 Gbps.
const SHARE: u64 = 2 << 20;

impl PeerInner {
    /// Hands an operation to the groups of `links` that reach both regions: to all of
    /// them by their capacity if it is large, else to one, each in its turn.
    ///
    /// A large one that an imm announces allocates, as does one of more than one group.
    pub(crate) fn submit_over(
        self: &Arc<Self>,
        links: &[Link],
        work: Work,
        times: (Time, Time),
        operation: &'static str,
    ) -> Result<Op> {
        let reach =
            links.iter().map(|link| (link, capacity(link, &work))).filter(|(_, capacity)| *capacity > 0);
        let groups = reach.clone().count() as u64;
        if groups == 0 {
            let why = "the local region is registered near rails that are paired with none the remote one is registered near; register one of them on all rails";
            return Err(Error::new(ErrorKind::Unreachable, operation, why));
        }
        let shares = (work.bytes() / SHARE).clamp(1, groups).min(work.items.len().max(1).into());
        let first = self.turn.fetch_add(1, Ordering::Relaxed) as usize % groups as usize;
        let turns = reach.clone().skip(first).chain(reach.take(first)).take(shares as usize);
        if shares == 1 {
            let (link, _) = turns.clone().next().unwrap_or((&links[0], 0));
            let id = link.engine.insert(operation)?;
            return Ok(self.submit_to(link, id, work, times, operation));
        }
        // All have a place in their tables before any begins.
        let mut places = Vec::with_capacity(shares as usize);
        for (link, _) in turns.clone() {
            match link.engine.insert(operation) {
                Ok(id) => places.push((link, id)),
                Err(error) => {
                    places.into_iter().for_each(|(link, id)| link.engine.give_back(id));
                    return Err(error);
                }
            }
        }
        let gated = work.imm.is_some() && work.imm_mode == ImmMode::Last;
        let gate = gated.then(|| Arc::new(Gate::new(shares as u32)));
        let whole: u64 = turns.clone().map(|(_, capacity)| capacity).sum();
        let mut from = 0;
        let parts = places.into_iter().zip(turns).map(|((link, id), (_, capacity))| {
            let items = work.items.part(from, from + capacity, whole);
            from += capacity;
            self.submit_to(link, id, Work { items, gate: gate.clone(), ..work.clone() }, times, operation)
        });
        Ok(Op::all(parts.collect()))
    }
}

/// What the rails of a link carry that reach both regions, relative to other links.
fn capacity(link: &Link, work: &Work) -> u64 {
    let (transport, first) = (link.engine.transport, link.engine.first_rail);
    let reaches = |rail: usize| {
        let here = work.local.as_ref().is_none_or(|region| region.regions[transport][rail].is_some());
        here && work.remote.as_ref().is_none_or(|remote| remote.imports[rail].is_some())
    };
    let rails = link.rails.iter().enumerate().filter(|(rail, _)| reaches(first + rail));
    rails.filter_map(|(_, paired)| Some(u64::from(paired.as_ref()?.weight))).sum()
}

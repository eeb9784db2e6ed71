//! The requests that a rail has posted, in order: the engine always knows which of them are unacknowledged.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// The most pieces in one run: as many as [`InflightRun`]'s bit mask holds.
pub(crate) const MAX_RUN: u32 = u64::BITS;

/// Consecutive pieces of one operation that are posted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index in the op table.
    pub op: u32,
    /// The first piece, as its operation's plan counts.
    pub first_piece: u32,
    /// The number of pieces, at most [`MAX_RUN`].
    pub count: u32,
    /// What each piece takes of the rail's send window, in bytes.
    pub cost: u64,
}

/// A request that is posted and not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PostedPiece {
    pub id: u64,
    /// Index in the op table.
    pub op: u32,
    pub piece: u32,
}

#[derive(Debug)]
struct InflightRun {
    run: Run,
    /// One bit per piece that is not acknowledged.
    unacknowledged: u64,
}

/// Posted runs, oldest first. A request is *acknowledged* once the engine has seen its completion or its failure.
///
/// The id of a request is the sequence number of its run since the rail was opened, times [`MAX_RUN`], plus the
/// request's index in the run. So a completion finds its run without a search, in whatever order completions arrive.
#[derive(Debug, Default)]
pub(crate) struct Inflight {
    runs: VecDeque<InflightRun>,
    /// The sequence number of `runs[0]`.
    first: u64,
    /// Places in the send queue that all posted requests take.
    used_slots: usize,
    /// The sum of the costs of the unacknowledged requests, evicted ones excluded.
    cost_in_flight: u64,
    /// The cost of all requests that were ever posted.
    posted_cost: u64,
    /// Evicted runs, by sequence number. Their unacknowledged requests still count in `used_slots`, but not in
    /// `cost_in_flight`.
    evicted: BTreeMap<u64, InflightRun>,
}

impl Inflight {
    /// The id of the first request of a run that will be posted after `runs_before` other runs.
    #[inline]
    pub fn id_of(&self, runs_before: usize) -> u64 {
        (self.first + (self.runs.len() + runs_before) as u64) * u64::from(MAX_RUN)
    }

    /// The number of the oldest run of an operation that `counts`, and that operation.
    #[cold]
    pub fn oldest(&self, counts: impl Fn(u32) -> bool) -> Option<(u64, u32)> {
        let evicted = self.evicted.iter().map(|(number, inflight)| (*number, inflight));
        let mut all = evicted.chain((self.first..).zip(&self.runs));
        let found = all.find(|(_, inflight)| inflight.unacknowledged != 0 && counts(inflight.run.op));
        found.map(|(number, inflight)| (number, inflight.run.op))
    }

    /// The cost of all requests that are acknowledged or evicted.
    pub fn ended_cost(&self) -> u64 {
        self.posted_cost - self.cost_in_flight
    }

    /// Places in the send queue that are taken. An acknowledged request keeps its place until all requests of its
    /// run and of all earlier runs are acknowledged: this bounds the memory of `runs`.
    pub fn used_slots(&self) -> usize {
        self.used_slots
    }

    /// What the unacknowledged requests take of the rail's send window, in bytes.
    #[inline]
    pub fn cost_in_flight(&self) -> u64 {
        self.cost_in_flight
    }

    /// The cost of each request of the oldest run.
    #[inline]
    pub fn oldest_cost(&self) -> u64 {
        self.runs.front().map_or(0, |oldest| oldest.run.cost)
    }

    #[inline]
    pub fn push(&mut self, run: Run) {
        debug_assert!((1..=MAX_RUN).contains(&run.count));
        self.runs.push_back(InflightRun { run, unacknowledged: mask(0..run.count) });
        self.used_slots += run.count as usize;
        let cost = run.cost * u64::from(run.count);
        self.cost_in_flight += cost;
        self.posted_cost += cost;
    }

    /// Acknowledges `count` requests, beginning with `id`, all of one run. Returns their operation and how many of
    /// them were unacknowledged; `None` if there were none.
    #[inline]
    pub fn acknowledge(&mut self, id: u64, count: u32) -> Option<(u32, u32)> {
        let index = usize::try_from((id / u64::from(MAX_RUN)).checked_sub(self.first)?).ok()?;
        let run = self.runs.get_mut(index)?;
        let start = (id % u64::from(MAX_RUN)) as u32;
        let ended = run.unacknowledged & mask(start..start.saturating_add(count).min(MAX_RUN));
        run.unacknowledged &= !ended;
        self.cost_in_flight -= run.run.cost * u64::from(ended.count_ones());
        let op = run.run.op;
        while let Some(front) = self.runs.front().filter(|front| front.unacknowledged == 0) {
            self.used_slots -= front.run.count as usize;
            self.runs.pop_front();
            self.first += 1;
        }
        (ended != 0).then_some((op, ended.count_ones()))
    }

    /// Evicts all unacknowledged requests from the send window, so that others can be posted. Returns their
    /// operations.
    #[cold]
    pub fn evict(&mut self) -> Vec<u32> {
        let mut ops = Vec::new();
        for (sequence, inflight) in (self.first..).zip(self.runs.drain(..)) {
            self.first = sequence + 1;
            if inflight.unacknowledged != 0 {
                ops.push(inflight.run.op);
                self.evicted.insert(sequence, inflight);
            }
        }
        self.cost_in_flight = 0;
        let unacknowledged = |inflight: &InflightRun| inflight.unacknowledged.count_ones() as usize;
        self.used_slots = self.evicted.values().map(unacknowledged).sum();
        ops
    }

    /// As [`Inflight::acknowledge`], for evicted requests.
    #[cold]
    pub fn acknowledge_evicted(&mut self, id: u64, count: u32) -> Option<(u32, u32)> {
        let sequence = id / u64::from(MAX_RUN);
        let inflight = self.evicted.get_mut(&sequence)?;
        let start = (id % u64::from(MAX_RUN)) as u32;
        let ended = inflight.unacknowledged & mask(start..start.saturating_add(count).min(MAX_RUN));
        inflight.unacknowledged &= !ended;
        self.used_slots -= ended.count_ones() as usize;
        let op = inflight.run.op;
        if inflight.unacknowledged == 0 {
            self.evicted.remove(&sequence);
        }
        (ended != 0).then_some((op, ended.count_ones()))
    }

    /// The unacknowledged request with this id.
    #[cold]
    pub fn find(&self, id: u64) -> Option<PostedPiece> {
        let (sequence, index) = (id / u64::from(MAX_RUN), (id % u64::from(MAX_RUN)) as u32);
        let posted = sequence.checked_sub(self.first).and_then(|at| self.runs.get(usize::try_from(at).ok()?));
        let inflight = posted.or_else(|| self.evicted.get(&sequence))?;
        let is_open = inflight.unacknowledged & (1_u64 << index) != 0;
        is_open.then(|| PostedPiece { id, op: inflight.run.op, piece: inflight.run.first_piece + index })
    }

    /// Each unacknowledged request, oldest first.
    pub fn unacknowledged(&self) -> impl Iterator<Item = PostedPiece> + '_ {
        let evicted = self.evicted.iter().map(|(sequence, inflight)| (*sequence, inflight));
        evicted.chain((self.first..).zip(&self.runs)).flat_map(|(sequence, inflight)| {
            let open = (0..MAX_RUN).filter(|index| inflight.unacknowledged & (1_u64 << index) != 0);
            open.map(move |index| PostedPiece {
                id: sequence * u64::from(MAX_RUN) + u64::from(index),
                op: inflight.run.op,
                piece: inflight.run.first_piece + index,
            })
        })
    }
}

/// A mask of the bits `bits`, whose end is at most [`MAX_RUN`].
#[inline]
fn mask(bits: Range<u32>) -> u64 {
    let below = |end: u32| u64::MAX.checked_shr(u64::BITS - end).unwrap_or(0);
    below(bits.end) & !below(bits.start)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        /// Compares with a map, for any order of completions and for repeated and invented ids; now and then it
        /// evicts all requests.
        #[test]
        fn knows_what_is_unacknowledged(script in prop::collection::vec(any::<(bool, u16)>(), 1..if cfg!(miri) { 12 } else { 400 })) {
            let mut inflight = Inflight::default();
            let mut model = BTreeMap::new();
            // The first id that is not evicted.
            let mut kept = 0;
            for (post, number) in script {
                if post && number % 16 == 0 {
                    let ops: std::collections::BTreeSet<_> = inflight.evict().into_iter().collect();
                    prop_assert!(ops.into_iter().eq(model.range(kept..).map(|(_, op)| *op).collect::<std::collections::BTreeSet<_>>()));
                    kept = inflight.id_of(0);
                } else if post {
                    let run = Run { op: u32::from(number), first_piece: 0, count: u32::from(number) % MAX_RUN + 1, cost: u64::from(number) };
                    model.extend((0..u64::from(run.count)).map(|index| (inflight.id_of(0) + index, run.op)));
                    inflight.push(run);
                } else {
                    let (id, count) = (u64::from(number % 3200), u32::from(number) % 80);
                    let run = u64::from(MAX_RUN);
                    let end = (id + u64::from(count)).min((id / run + 1) * run);
                    let ended: Vec<_> = model.extract_if(id..end.max(id), |_, _| true).collect();
                    let expected = ended.first().map(|(_, op)| (*op, ended.len() as u32));
                    let acknowledged = inflight.acknowledge(id, count).or_else(|| inflight.acknowledge_evicted(id, count));
                    prop_assert_eq!(acknowledged, expected);
                }
                // All pieces of a run have the number of the request in the run.
                    let posted = |(id, op): (&u64, &u32)| PostedPiece { id: *id, op: *op, piece: (id % u64::from(MAX_RUN)) as u32 };
                prop_assert!(inflight.unacknowledged().eq(model.iter().map(posted)));
                for id in [u64::from(number), u64::from(number % 3200)] {
                    prop_assert_eq!(inflight.find(id).map(|posted| posted.op), model.get(&id).copied());
                }
                prop_assert!(inflight.used_slots() >= model.len());
                prop_assert_eq!(inflight.cost_in_flight(), model.range(kept..).map(|(_, op)| u64::from(*op)).sum::<u64>());
                prop_assert!(inflight.used_slots() <= model.range(..kept).count() + ((inflight.id_of(0) - kept) as usize));
            }
        }
    }
}

//! A rail's posted work in sequence: which bytes are unacknowledged, always.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Pieces in one run: a turn of the rotation, and the bits of a mask.
pub(crate) const RUN: u32 = 32;

/// Consecutive pieces of one operation, posted in one turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index in the op table.
    pub op: u32,
    /// The first piece of its plan.
    pub item: u32,
    /// How many, at most `RUN`.
    pub count: u32,
    /// What each of them takes of the rail's window.
    pub charge: u64,
}

#[derive(Debug)]
struct PostedRun {
    run: Run,
    /// A bit per piece that is not acknowledged.
    open: u32,
}

/// Posted runs, oldest first. The id of a request is its run's place in the
/// sequence since the rail was opened, and its place in the run: finding it takes
/// no search, in whatever order completions come.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    runs: VecDeque<PostedRun>,
    /// The sequence number of `runs[0]`.
    first: u64,
    /// Pieces of all runs in the window.
    held: usize,
    /// What those that are not acknowledged take of the rail's window.
    charged: u64,
    /// Runs that were set aside, by sequence number. They take a place of `held` for each piece
    /// that is not acknowledged, and nothing of the window.
    aside: BTreeMap<u64, PostedRun>,
}

impl Posted {
    /// The id of the first request of the `ahead`-th run from now.
    #[inline]
    pub fn id_of(&self, ahead: usize) -> u64 {
        (self.first + (self.runs.len() + ahead) as u64) * u64::from(RUN)
    }

    /// Pieces in the window. Acknowledged ones count while their run, or an
    /// earlier one, is open: that bounds the window's memory.
    pub fn held(&self) -> usize {
        self.held
    }

    /// What is not acknowledged takes of the rail's window.
    #[inline]
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// What each request of the oldest run takes of it.
    #[inline]
    pub fn oldest_charge(&self) -> u64 {
        self.runs.front().map_or(0, |oldest| oldest.run.charge)
    }

    #[inline]
    pub fn push(&mut self, run: Run) {
        debug_assert!((1..=RUN).contains(&run.count));
        self.runs.push_back(PostedRun { run, open: mask(0..run.count) });
        self.held += run.count as usize;
        self.charged += run.charge * u64::from(run.count);
    }

    /// Acknowledges `count` requests from id `id` on; a joined completion never
    /// crosses a run. Gives their operation and how many of them were outstanding.
    #[inline]
    pub fn acknowledge(&mut self, id: u64, count: u32) -> Option<(u32, u32)> {
        let place = usize::try_from((id / u64::from(RUN)).checked_sub(self.first)?).ok()?;
        let run = self.runs.get_mut(place)?;
        let start = (id % u64::from(RUN)) as u32;
        let ended = run.open & mask(start..start.saturating_add(count).min(RUN));
        run.open &= !ended;
        self.charged -= run.run.charge * u64::from(ended.count_ones());
        let op = run.run.op;
        while let Some(front) = self.runs.front().filter(|front| front.open == 0) {
            self.held -= front.run.count as usize;
            self.runs.pop_front();
            self.first += 1;
        }
        (ended != 0).then_some((op, ended.count_ones()))
    }

    /// Sets aside all that is not acknowledged: it does not hold up the others any more. Gives
    /// its operations.
    #[cold]
    pub fn set_aside(&mut self) -> Vec<u32> {
        let mut ops = Vec::new();
        for (sequence, posted) in (self.first..).zip(self.runs.drain(..)) {
            self.first = sequence + 1;
            if posted.open != 0 {
                ops.push(posted.run.op);
                self.aside.insert(sequence, posted);
            }
        }
        self.charged = 0;
        self.held = self.aside.values().map(|posted| posted.open.count_ones() as usize).sum();
        ops
    }

    /// As [`Posted::acknowledge`], for what was set aside.
    #[cold]
    pub fn acknowledge_aside(&mut self, id: u64, count: u32) -> Option<(u32, u32)> {
        let sequence = id / u64::from(RUN);
        let posted = self.aside.get_mut(&sequence)?;
        let start = (id % u64::from(RUN)) as u32;
        let ended = posted.open & mask(start..start.saturating_add(count).min(RUN));
        posted.open &= !ended;
        self.held -= ended.count_ones() as usize;
        let op = posted.run.op;
        if posted.open == 0 {
            self.aside.remove(&sequence);
        }
        (ended != 0).then_some((op, ended.count_ones()))
    }

    /// Id and operation of each request that is unacknowledged, oldest first.
    pub fn unacknowledged(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let aside = self.aside.iter().map(|(sequence, posted)| (*sequence, posted));
        aside.chain((self.first..).zip(&self.runs)).flat_map(|(sequence, posted)| {
            let open = (0..RUN).filter(|place| posted.open & (1 << place) != 0);
            open.map(move |place| (sequence * u64::from(RUN) + u64::from(place), posted.run.op))
        })
    }
}

fn mask(places: Range<u32>) -> u32 {
    let below = |end: u32| ((1_u64 << end) - 1) as u32;
    below(places.end) & !below(places.start)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        /// Against a map: any order of completions, and repeated or made-up ids; all is set aside now
        /// and then.
        #[test]
        fn knows_what_is_unacknowledged(script in prop::collection::vec(any::<(bool, u16)>(), 1..if cfg!(miri) { 12 } else { 400 })) {
            let mut posted = Posted::default();
            let mut model = BTreeMap::new();
            // The first id that is not set aside.
            let mut kept = 0;
            for (post, number) in script {
                if post && number % 16 == 0 {
                    let ops: std::collections::BTreeSet<_> = posted.set_aside().into_iter().collect();
                    prop_assert!(ops.into_iter().eq(model.range(kept..).map(|(_, op)| *op).collect::<std::collections::BTreeSet<_>>()));
                    kept = posted.id_of(0);
                } else if post {
                    let run = Run { op: u32::from(number), item: 0, count: u32::from(number) % RUN + 1, charge: u64::from(number) };
                    model.extend((0..u64::from(run.count)).map(|place| (posted.id_of(0) + place, run.op)));
                    posted.push(run);
                } else {
                    let (id, count) = (u64::from(number % 1600), u32::from(number) % 40);
                    let run = u64::from(RUN);
                    let end = (id + u64::from(count)).min((id / run + 1) * run);
                    let ended: Vec<_> = model.extract_if(id..end.max(id), |_, _| true).collect();
                    let expected = ended.first().map(|(_, op)| (*op, ended.len() as u32));
                    let acknowledged = posted.acknowledge(id, count).or_else(|| posted.acknowledge_aside(id, count));
                    prop_assert_eq!(acknowledged, expected);
                }
                prop_assert!(posted.unacknowledged().eq(model.iter().map(|(id, op)| (*id, *op))));
                prop_assert!(posted.held() >= model.len());
                prop_assert_eq!(posted.charged(), model.range(kept..).map(|(_, op)| u64::from(*op)).sum::<u64>());
                prop_assert!(posted.held() <= model.range(..kept).count() + ((posted.id_of(0) - kept) as usize));
            }
        }
    }
}

//! How the rails of two sides pair, for any number of rails on each side.

/// The pairs of `ours` local rails with `theirs` remote rails.
///
/// There are as many pairs as the larger side has rails, so that no rail is left out. Blocks of rails pair with
/// blocks, so that the devices of one GPU pair with the devices of one GPU: pair `k` of `n` joins local rail
/// `k * ours / n` with remote rail `k * theirs / n`. Each rail sends over one pair, its first. The other pairs of the
/// smaller side's rails only receive. Both sides compute the same list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pairing {
    ours: usize,
    theirs: usize,
}

impl Pairing {
    /// Returns `None` if one side has no rail.
    pub fn new(ours: usize, theirs: usize) -> Option<Self> {
        (ours > 0 && theirs > 0).then_some(Self { ours, theirs })
    }

    /// How many pairs there are.
    pub fn len(self) -> usize {
        self.ours.max(self.theirs)
    }

    /// The local rail of pair `pair`.
    pub fn local(self, pair: usize) -> usize {
        pair * self.ours / self.len()
    }

    /// The remote rail of pair `pair`.
    pub fn remote(self, pair: usize) -> usize {
        pair * self.theirs / self.len()
    }

    /// Whether the local rail of `pair` sends over this pair.
    pub fn sends(self, pair: usize) -> bool {
        self.first(self.local(pair)) == pair
    }

    /// The first pair of local rail `rail`.
    pub fn first(self, rail: usize) -> usize {
        (rail * self.len()).div_ceil(self.ours)
    }

    /// The same pairs from the other side's view.
    pub fn mirrored(self) -> Self {
        Self { ours: self.theirs, theirs: self.ours }
    }

    /// The rate that each local rail can reach to the peer: its own rate, or its share of the rate of a remote rail
    /// that several local rails send to. Rates may have any unit; 0 stands for unknown. If one rate is unknown, all
    /// rails of a side count as equal.
    pub fn weights(self, ours: &[u32], theirs: &[u32]) -> Vec<u32> {
        let known = |rates: &[u32], rails| rates.len() == rails && rates.iter().all(|rate| *rate > 0);
        let remote_of = |rail: usize| self.remote(self.first(rail));
        let sharers = |remote| (0..self.ours).filter(|rail| remote_of(*rail) == remote).count() as u32;
        let (local, remote): (Vec<_>, Vec<_>) = if known(ours, self.ours) && known(theirs, self.theirs) {
            (ours.to_vec(), theirs.to_vec())
        } else {
            // Equal rates, large enough to be divided by any number of rails that share one.
            (vec![u32::MAX; self.ours], vec![u32::MAX; self.theirs])
        };
        let rate = |rail: usize| local[rail].min(remote[remote_of(rail)] / sharers(remote_of(rail))).max(1);
        (0..self.ours).map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_pair_with_blocks() {
        let pairs = |ours, theirs| {
            let pairing = Pairing::new(ours, theirs).unwrap();
            (0..pairing.len()).map(|pair| (pairing.local(pair), pairing.remote(pair))).collect::<Vec<_>>()
        };
        assert_eq!(pairs(2, 2), [(0, 0), (1, 1)]);
        assert_eq!(pairs(4, 2), [(0, 0), (1, 0), (2, 1), (3, 1)]);
        assert_eq!(pairs(2, 3), [(0, 0), (0, 1), (1, 2)]);
        assert_eq!(Pairing::new(0, 3), None);
    }

    #[test]
    fn weights_follow_the_narrower_end() {
        let weights = |ours: &[u32], theirs: &[u32]| {
            Pairing::new(ours.len(), theirs.len()).unwrap().weights(ours, theirs)
        };
        assert_eq!(weights(&[100; 4], &[200; 2]), [100; 4]);
        assert_eq!(weights(&[100; 4], &[100; 2]), [50; 4]);
        assert_eq!(weights(&[100, 100, 100], &[100, 100]), [50, 50, 100]);
        assert_eq!(weights(&[100, 400], &[400, 200]), [100, 200]);
        let unknown = weights(&[0, 100, 100], &[100, 100]);
        assert_eq!((unknown[0], unknown[0] * 2 + 1), (unknown[1], unknown[2]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn every_rail_has_a_pair_and_sends_over_one(ours in 1_usize..40, theirs in 1_usize..40) {
            let pairing = Pairing::new(ours, theirs).unwrap();
            for rail in 0..ours {
                let of_rail: Vec<_> = (0..pairing.len()).filter(|pair| pairing.local(*pair) == rail).collect();
                prop_assert_eq!(of_rail.first(), Some(&pairing.first(rail)));
                prop_assert_eq!(of_rail.iter().filter(|pair| pairing.sends(**pair)).count(), 1);
            }
            for pair in 0..pairing.len() {
                let mirrored = pairing.mirrored();
                prop_assert_eq!(mirrored.local(pair), pairing.remote(pair));
                prop_assert_eq!(mirrored.remote(pair), pairing.local(pair));
                prop_assert!(mirrored.local(pair) < theirs);
            }
        }
    }
}

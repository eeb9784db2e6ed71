//! Counts by imm value. If a single value has a count, as in a ping-pong or in a loop of steps, no hash is needed.

use foldhash::HashMap;

/// The most distinct imm values with a count above zero, per peer. More of them mean that nobody takes arrivals off the
/// counts. Then further new values are refused.
pub(super) const MAX_VALUES: usize = 1 << 20;

/// The counts of the imm values of one peer.
#[derive(Default)]
pub struct Values {
    /// One value that is not among the others, and its count. It may be replaced while its count is zero and there are
    /// no others.
    first: (u32, u64),
    /// The other values with a count above zero. Hashed with a seed of its own, because the peer chooses the values.
    others: HashMap<u32, u64>,
}

impl Values {
    /// The count of `imm`.
    #[inline]
    pub fn count(&self, imm: u32) -> u64 {
        if imm == self.first.0 { self.first.1 } else { self.others.get(&imm).copied().unwrap_or(0) }
    }

    /// Counts one more arrival of `imm`. Returns its count, or `None` if there are too many values.
    #[inline]
    pub fn add(&mut self, imm: u32) -> Option<u64> {
        if self.first.1 == 0 && self.others.is_empty() {
            self.first.0 = imm;
        }
        if imm == self.first.0 {
            self.first.1 += 1;
            return Some(self.first.1);
        }
        if self.others.len() >= MAX_VALUES && !self.others.contains_key(&imm) {
            return None;
        }
        let count = self.others.entry(imm).or_default();
        *count += 1;
        Some(*count)
    }

    /// Takes `n` off the count of `imm` if it is at least `n`. Returns whether it did.
    #[inline]
    pub fn take(&mut self, imm: u32, n: u64) -> bool {
        if imm == self.first.0 {
            let left = self.first.1.checked_sub(n);
            self.first.1 = left.unwrap_or(self.first.1);
            return left.is_some();
        }
        let Some(count) = self.others.get_mut(&imm).filter(|count| **count >= n) else { return n == 0 };
        *count -= n;
        if *count == 0 {
            self.others.remove(&imm);
        }
        true
    }

    /// Takes the whole count of `imm`, and returns it.
    pub fn take_all(&mut self, imm: u32) -> u64 {
        let count = self.count(imm);
        self.take(imm, count);
        count
    }
}

#[cfg(test)]
impl Values {
    /// Sets the count of the only value.
    pub fn set(&mut self, imm: u32, count: u64) {
        self.first = (imm, count);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn counts_as_a_map_does(script in prop::collection::vec((0_u32..4, 0_u64..4), 1..200)) {
            let (mut values, mut model) = (Values::default(), BTreeMap::<u32, u64>::new());
            for (imm, n) in script {
                let count = model.entry(imm).or_default();
                match n {
                    0 => {
                        *count += 1;
                        prop_assert_eq!(values.add(imm), Some(*count));
                    }
                    3 => prop_assert_eq!(values.take_all(imm), std::mem::take(count)),
                    _ => {
                        let left = count.checked_sub(n);
                        prop_assert_eq!(values.take(imm, n), left.is_some());
                        *count = left.unwrap_or(*count);
                    }
                }
                for (imm, count) in &model {
                    prop_assert_eq!(values.count(*imm), *count);
                }
                prop_assert!(values.others.values().all(|count| *count > 0));
            }
        }
    }
}

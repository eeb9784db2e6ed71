//! Ranges of addresses, in order.

/// Finds the range that holds an address and the bytes behind it, in O(log n) steps. Ranges may overlap; then a search
/// takes one step more for each range that overlaps others and begins before the address.
#[derive(Debug, Default, Clone)]
pub(super) struct AddressIndex {
    /// By their first address.
    ranges: Vec<AddressRange>,
}

#[derive(Debug, Clone, Copy)]
struct AddressRange {
    start: u64,
    /// The address behind the last byte.
    end: u64,
    /// The highest `end` of this range and of all before it.
    highest_end: u64,
    /// What the range belongs to.
    number: u32,
}

impl AddressIndex {
    /// An index of the ranges `(first address, length)`, numbered in their order. None may reach beyond the last
    /// address.
    pub fn new(ranges: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let range = |(number, (start, len)): (u32, (u64, u64))| {
            let end = start.saturating_add(len);
            AddressRange { start, end, highest_end: end, number }
        };
        let mut ranges: Vec<_> = (0..).zip(ranges).map(range).collect();
        ranges.sort_by_key(|range| range.start);
        let mut highest = 0;
        for range in &mut ranges {
            highest = highest.max(range.end);
            range.highest_end = highest;
        }
        Self { ranges }
    }

    /// The number of a range that holds `len` bytes from `address` on, and the bytes of the range before them. Of
    /// several, the one that begins last.
    pub fn find(&self, address: u64, len: u64) -> Option<(u32, u64)> {
        let end = address.checked_add(len)?;
        let behind = self.ranges.partition_point(|range| range.start <= address);
        let candidates = self.ranges[..behind].iter().rev().take_while(|range| range.highest_end >= end);
        let found = candidates.into_iter().find(|range| range.end >= end)?;
        Some((found.number, address - found.start))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn finds_what_a_search_of_all_finds(
            ranges in prop::collection::vec((0..100_u64, 1..30_u64), 0..12),
            address in 0..140_u64,
            len in 0..40_u64,
        ) {
            let holds = |(start, size): &(u64, u64)| *start <= address && address + len <= start + size;
            let want = ranges.iter().filter(|range| holds(range)).map(|(start, _)| address - start).min();
            let found = AddressIndex::new(ranges.clone()).find(address, len);
            prop_assert_eq!(found.map(|(_, offset)| offset), want);
            if let Some((number, offset)) = found {
                prop_assert!(holds(&ranges[number as usize]) && ranges[number as usize].0 + offset == address);
            }
        }
    }

    #[test]
    fn the_end_of_all_addresses_is_no_end() {
        let index = AddressIndex::new([(u64::MAX - 10, 10), (0, 5)]);
        assert_eq!(index.find(u64::MAX - 5, 5), Some((0, 5)));
        assert_eq!(index.find(u64::MAX - 5, 6), None);
        assert_eq!(index.find(5, 0), Some((1, 5)));
        assert_eq!(AddressIndex::default().find(0, 0), None);
    }
}

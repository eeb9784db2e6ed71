//! The entries of a list. Entries at equal distances are stored as one run.

use crate::{Error, ErrorKind, Result};

/// An entry: a range of one of the list's regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// The region's number in the list.
    pub region: u32,
    /// The bytes from the region's start to the entry.
    pub offset: u64,
    /// The bytes of the entry; not 0.
    pub len: u64,
}

/// Entries of the same length in the same region, each `stride` bytes behind the one before.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: Entry,
    stride: u64,
    /// The index of the first entry in the list.
    start: u32,
    /// The index behind the last entry.
    end: u32,
}

/// The entries of a list, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Entries {
    runs: Vec<Run>,
}

impl Run {
    fn entry(&self, index: u32) -> Entry {
        Entry { offset: self.first.offset + u64::from(index - self.start) * self.stride, ..self.first }
    }

    /// Whether the entry behind the last one may be `next`. A run of one entry has no stride yet.
    fn continues_with(&self, next: Entry, stride: u64) -> bool {
        let is_alike = self.first.region == next.region && self.first.len == next.len;
        is_alike && self.entry(self.end - 1).offset.checked_add(stride) == Some(next.offset)
    }
}

impl Entries {
    /// The number of entries.
    pub fn len(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// Appends `count` entries; the first is `first`, and each further one lies `stride` bytes behind the one before.
    /// Entries that continue the last run are joined to it. The caller has checked the bounds, and that `count` is not
    /// 0.
    ///
    /// # Errors
    /// `TooLarge` if the list would have 2^32 - 1 entries or more.
    pub fn push(&mut self, first: Entry, count: u32, stride: u64, operation: &'static str) -> Result<()> {
        let start = self.len();
        let end = start.checked_add(count).filter(|end| *end < u32::MAX).ok_or_else(|| {
            let why =
                format!("the list has {start} entries, and {count} more are too many: use several lists");
            Error::new(ErrorKind::TooLarge, operation, why)
        })?;
        if let Some(last) = self.runs.last_mut() {
            // A last run of one entry takes the distance to the next entry as its stride. A longer run keeps its stride.
            let own = if count > 1 { Some(stride) } else { None };
            let stride = match last.end - last.start {
                1 => own.or_else(|| first.offset.checked_sub(last.first.offset)),
                _ => Some(last.stride).filter(|stride| own.is_none_or(|own| own == *stride)),
            };
            if let Some(stride) = stride.filter(|stride| last.continues_with(first, *stride)) {
                (last.stride, last.end) = (stride, end);
                return Ok(());
            }
        }
        self.runs.push(Run { first, stride, start, end });
        Ok(())
    }

    /// The bytes from the first to the last entry of each run.
    pub fn spans(&self) -> impl Iterator<Item = Entry> {
        self.runs.iter().map(|run| {
            let last = run.entry(run.end - 1);
            Entry { len: last.offset - run.first.offset + last.len, ..run.first }
        })
    }

    /// The entry with this index, which is below [`Entries::len`].
    #[inline]
    pub fn get(&self, index: u32) -> Entry {
        // The guess is right if all runs have as many entries as the first, as in a KV cache of equal layers.
        let guess = self.runs.get((index / self.runs[0].end) as usize);
        match guess.filter(|run| run.start <= index && index < run.end) {
            Some(run) => run.entry(index),
            None => self.runs[self.runs.partition_point(|run| run.end <= index)].entry(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        /// Compares with a list that is written out, for entries pushed one by one and in strides, asked for in any
        /// order.
        #[test]
        fn entries_are_those_that_were_pushed(
            pushes in prop::collection::vec((0_u32..3, 0_u64..5, 1_u64..3, 1_u32..5, 0_u64..4), 0..60),
            asked in prop::collection::vec(any::<u32>(), 0..60),
        ) {
            let (mut entries, mut model) = (Entries::default(), Vec::new());
            for (region, offset, len, count, stride) in pushes {
                let first = Entry { region, offset, len };
                entries.push(first, count, stride, "test")?;
                model.extend((0..u64::from(count)).map(|index| Entry { offset: offset + index * stride, ..first }));
            }
            prop_assert_eq!(entries.len() as usize, model.len());
            let all = 0..model.len() as u32;
            let any = asked.iter().filter_map(|index| index.checked_rem(model.len() as u32));
            for index in all.chain(any) {
                prop_assert_eq!(entries.get(index), model[index as usize]);
            }
        }
    }

    #[test]
    fn entries_at_equal_distances_are_one_run() -> Result<()> {
        let mut entries = Entries::default();
        for index in 0..1000 {
            entries.push(Entry { region: 0, offset: index * 4096, len: 64 }, 1, 0, "test")?;
        }
        assert_eq!((entries.len(), entries.runs.len()), (1000, 1));
        Ok(())
    }

    #[test]
    fn a_list_has_fewer_than_2_to_the_32_entries() -> Result<()> {
        let (mut entries, entry) = (Entries::default(), Entry { region: 0, offset: 0, len: 1 });
        entries.push(entry, u32::MAX - 1, 0, "test")?;
        let refused = entries.push(entry, 1, 0, "test").map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::TooLarge));
        Ok(())
    }
}

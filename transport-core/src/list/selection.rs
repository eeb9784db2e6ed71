//! Selections of a list's entries.

use std::ops::{Range, RangeFull};

use crate::{Error, ErrorKind, Result};

/// The entries of a list that a transfer uses, in the order of the transfer: all of them (`..`), a range of indices, or
/// a slice of indices. An index may occur several times.
///
/// ```
/// # use multirail_core::Selection;
/// let all: Selection = (..).into();
/// let some: Selection = (&[3, 1, 3]).into();
/// let blocks: Selection = (16..32).into();
/// ```
#[derive(Debug, Clone)]
pub struct Selection<'a>(Choice<'a>);

#[derive(Debug, Clone)]
enum Choice<'a> {
    All,
    Range(Range<u32>),
    Indices(&'a [u32]),
}

/// A selection with indices of its own.
pub(crate) enum OwnedSelection {
    All,
    Range(Range<u32>),
    Indices(Vec<u32>),
}

impl Selection<'_> {
    /// The number of entries that are selected of a list of `entries` entries.
    ///
    /// # Errors
    /// `InvalidRequest` if an index is not below `entries`.
    pub(super) fn count(&self, entries: u32, side: &str, operation: &'static str) -> Result<usize> {
        let (count, largest) = match &self.0 {
            Choice::All => return Ok(entries as usize),
            Choice::Range(range) => (range.len(), range.end.saturating_sub(1)),
            Choice::Indices(indices) => (indices.len(), indices.iter().copied().max().unwrap_or(0)),
        };
        if count > 0 && largest >= entries {
            let why = format!("the {side} selection names entry {largest} of a list of {entries} entries");
            return Err(Error::new(ErrorKind::InvalidRequest, operation, why));
        }
        Ok(count)
    }

    /// The same selection, with indices of its own.
    pub(crate) fn to_owned(&self) -> OwnedSelection {
        match &self.0 {
            Choice::All => OwnedSelection::All,
            Choice::Range(range) => OwnedSelection::Range(range.clone()),
            Choice::Indices(indices) => OwnedSelection::Indices(indices.to_vec()),
        }
    }

    /// The index of the entry at `position` in the transfer, which is below [`Selection::count`].
    #[inline]
    pub(super) fn at(&self, position: usize) -> u32 {
        match &self.0 {
            Choice::All => position as u32,
            Choice::Range(range) => range.start + position as u32,
            Choice::Indices(indices) => indices[position],
        }
    }
}

impl From<RangeFull> for Selection<'_> {
    fn from(_: RangeFull) -> Self {
        Self(Choice::All)
    }
}

impl From<Range<u32>> for Selection<'_> {
    fn from(range: Range<u32>) -> Self {
        Self(Choice::Range(range))
    }
}

impl<'a> From<&'a [u32]> for Selection<'a> {
    fn from(indices: &'a [u32]) -> Self {
        Self(Choice::Indices(indices))
    }
}

impl<'a> From<&'a Vec<u32>> for Selection<'a> {
    fn from(indices: &'a Vec<u32>) -> Self {
        Self(Choice::Indices(indices))
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Selection<'a> {
    fn from(indices: &'a [u32; N]) -> Self {
        Self(Choice::Indices(indices))
    }
}

/// The same selection.
impl<'a> From<&Self> for Selection<'a> {
    fn from(selection: &Selection<'a>) -> Self {
        selection.clone()
    }
}

impl<'a> From<&'a OwnedSelection> for Selection<'a> {
    fn from(selection: &'a OwnedSelection) -> Self {
        match selection {
            OwnedSelection::All => (..).into(),
            OwnedSelection::Range(range) => range.clone().into(),
            OwnedSelection::Indices(indices) => indices.into(),
        }
    }
}

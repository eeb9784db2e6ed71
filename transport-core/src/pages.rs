//! Lists of pages inside a region.

use std::ops::Range;
use std::sync::Arc;

use crate::{Error, ErrorKind, Result};

/// Pages of a region: page `i` of an operation lies at
/// `offset + indices[i] * stride` bytes.
///
/// Cloning shares the list, so one list serves many operations.
#[derive(Debug, Clone)]
pub struct Pages {
    indices: Arc<[u32]>,
    max_index: u32,
    stride: Option<u64>,
    offset: u64,
}

impl Pages {
    /// The pages of these indices, in this order, one page size apart.
    pub fn new(indices: impl Into<Arc<[u32]>>) -> Self {
        let indices = indices.into();
        let max_index = indices.iter().copied().max().unwrap_or(0);
        Self { indices, max_index, stride: None, offset: 0 }
    }

    /// Bytes from one index to the next; by default the operation's page size.
    pub fn stride(mut self, bytes: usize) -> Self {
        self.stride = Some(bytes as u64);
        self
    }

    /// Bytes from the region's start to index 0.
    pub fn offset(mut self, bytes: usize) -> Self {
        self.offset = bytes as u64;
        self
    }

    /// How many pages.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Checks every page against a region of `region` bytes, by the largest index alone.
    pub(crate) fn check(&self, page: u64, region: u64, side: &str) -> Result<()> {
        let stride = self.stride.unwrap_or(page);
        let end = u64::from(self.max_index)
            .checked_mul(stride)
            .and_then(|at| at.checked_add(self.offset))
            .and_then(|at| at.checked_add(page));
        match end {
            Some(end) if end <= region => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfBounds,
                "write_pages",
                format!(
                    "{side} page {} (offset {}, stride {stride}, page {page}) ends beyond the region of {region} bytes",
                    self.max_index, self.offset
                ),
            )),
        }
    }

    /// Ready to compute addresses of pages of `page` bytes.
    pub(crate) fn layout(&self, page: u64) -> PageLayout {
        PageLayout {
            indices: Arc::clone(&self.indices),
            stride: self.stride.unwrap_or(page),
            offset: self.offset,
        }
    }
}

/// A checked page list with its stride settled.
#[derive(Debug, Clone)]
pub(crate) struct PageLayout {
    indices: Arc<[u32]>,
    stride: u64,
    offset: u64,
}

impl PageLayout {
    /// Where pages `items` lie, in order. In bounds because [`Pages::check`] saw
    /// the largest index; `items` is below the number of pages.
    #[inline]
    pub(crate) fn places(&self, items: Range<u32>) -> impl ExactSizeIterator<Item = u64> + '_ {
        let (stride, offset) = (self.stride, self.offset);
        let indices = self.indices[items.start as usize..items.end as usize].iter();
        indices.map(move |index| offset + u64::from(*index) * stride)
    }
}

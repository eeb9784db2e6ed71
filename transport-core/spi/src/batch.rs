//! Requests that are posted under one doorbell. They are grouped into runs: requests that differ only in their bytes.
//!
//! Most requests of a batch are pieces of one operation. A run holds their common fields once. So an endpoint reads
//! only three numbers for each request (a [`Piece`]).

use crate::WorkRequest;

/// Where the bytes of one request of a run are: their local address, their remote address and their length.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// First local byte.
    pub local: *mut u8,
    /// First remote byte.
    pub remote: u64,
    /// The number of bytes.
    pub len: u64,
}

// SAFETY: the pointer is a plain address here; who may dereference it, and when,
// is the contract of `Endpoint::post`.
unsafe impl Send for Piece {}

#[derive(Debug, Clone, Copy)]
struct Run {
    /// The first request. The others differ from it in their bytes, and their ids count up from its id.
    template: WorkRequest,
    /// The index behind the run's last piece.
    end: usize,
}

/// Work requests in order, joined into runs.
#[derive(Debug, Default)]
pub struct Batch {
    runs: Vec<Run>,
    pieces: Vec<Piece>,
}

impl Batch {
    /// An empty batch that takes `requests` requests without allocating.
    pub fn with_capacity(requests: usize) -> Self {
        Self { runs: Vec::with_capacity(requests), pieces: Vec::with_capacity(requests) }
    }

    /// Removes all requests, and keeps the allocation.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.pieces.clear();
    }

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Appends one request.
    pub fn push(&mut self, request: WorkRequest) {
        self.push_run(request, |pieces| {
            pieces.push(Piece { local: request.local, remote: request.remote, len: request.len });
        });
    }

    /// Appends a run. `fill` appends the bytes of each request. Their ids count up from the template's id; the
    /// template's own bytes are ignored.
    #[inline]
    pub fn push_run(&mut self, template: WorkRequest, fill: impl FnOnce(&mut Vec<Piece>)) {
        let before = self.pieces.len();
        fill(&mut self.pieces);
        if self.pieces.len() > before {
            self.runs.push(Run { template, end: self.pieces.len() });
        }
    }

    /// The runs, each as its template and the bytes of its requests. No run is empty.
    #[inline]
    pub fn runs(&self) -> impl Iterator<Item = (&WorkRequest, &[Piece])> {
        let mut start = 0;
        self.runs.iter().map(move |run| {
            let pieces = &self.pieces[start..run.end];
            start = run.end;
            (&run.template, pieces)
        })
    }

    /// The requests one by one.
    pub fn requests(&self) -> impl Iterator<Item = WorkRequest> + '_ {
        self.runs().flat_map(|(template, pieces)| {
            pieces.iter().enumerate().map(move |(index, piece)| template.with_piece(index, piece))
        })
    }
}

/// The pairs that [`extend_by_pairs`] appends per turn of its loop: the loop's own instructions are a third of those of
/// a page otherwise.
const BLOCK: usize = 8;

/// Appends `make(a, b)` for each pair of elements of two slices that are equally long. If they are not, the longer one's
/// end is left out.
#[inline(always)]
pub fn extend_by_pairs<T>(into: &mut Vec<T>, a: &[u32], b: &[u32], mut make: impl FnMut(u32, u32) -> T) {
    let count = a.len().min(b.len());
    into.reserve(count);
    let (blocks, rest) = into.spare_capacity_mut()[..count].as_chunks_mut::<BLOCK>();
    let ((a_blocks, a_rest), (b_blocks, b_rest)) =
        (a[..count].as_chunks::<BLOCK>(), b[..count].as_chunks::<BLOCK>());
    for ((block, a), b) in blocks.iter_mut().zip(a_blocks).zip(b_blocks) {
        for at in 0..BLOCK {
            block[at].write(make(a[at], b[at]));
        }
    }
    for ((place, a), b) in rest.iter_mut().zip(a_rest).zip(b_rest) {
        place.write(make(*a, *b));
    }
    // SAFETY: the loops have written the next `count` elements, for which there is capacity.
    unsafe { into.set_len(into.len() + count) };
}

impl WorkRequest {
    /// The request with this `index` in the run of which this request is the template.
    #[inline]
    pub fn with_piece(&self, index: usize, piece: &Piece) -> Self {
        Self { id: self.id + index as u64, local: piece.local, remote: piece.remote, len: piece.len, ..*self }
    }
}

impl FromIterator<WorkRequest> for Batch {
    fn from_iter<I: IntoIterator<Item = WorkRequest>>(requests: I) -> Self {
        let mut batch = Self::default();
        requests.into_iter().for_each(|request| batch.push(request));
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_appended_in_order() {
        for (here, there) in [(0, 0), (1, 1), (7, 9), (8, 8), (9, 8), (64, 64), (67, 67)] {
            let (a, b): (Vec<u32>, Vec<u32>) = ((0..here).collect(), (100..100 + there).collect());
            let mut pairs = vec![(7, 7)];
            extend_by_pairs(&mut pairs, &a, &b, |a, b| (a, b));
            let expected = std::iter::once((7, 7)).chain(a.into_iter().zip(b));
            assert_eq!(pairs, expected.collect::<Vec<_>>());
        }
    }
}

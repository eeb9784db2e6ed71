//! The fast path of a request to the same region as the one before.

use multirail_spi::{Access, Piece, WorkKind, WorkRequest, copy, copy::CopyStrategy};

use crate::imports::{Import, RegionLocation};
use crate::segment::lease_table::DEVICE_MEMORY;

/// Bytes after which a batch renews its lease. A revoke never waits for more bytes.
const LEASE_BYTES: u64 = 4 << 20;

/// The address, bounds and rights of the last request's import. The next request to that import needs no lookup.
pub(super) struct FastPath {
    rkey: u64,
    peer: u32,
    /// True for each `WorkKind` that may take this path. Only mapped memory has such kinds.
    allowed: [bool; 3],
    base: *mut u8,
    len: u64,
    /// Bytes until the lease is renewed.
    left: u64,
}

impl Default for FastPath {
    fn default() -> Self {
        Self { rkey: 0, peer: 0, allowed: [false; 3], base: std::ptr::null_mut(), len: 0, left: 0 }
    }
}

impl FastPath {
    /// The path to an import whose lease was just entered.
    pub(super) fn new(import: &Import) -> Self {
        let mut it =
            Self { rkey: import.rkey, peer: import.target.peer.0, left: LEASE_BYTES, ..Self::default() };
        if let RegionLocation::Mapped(base) = import.location {
            (it.base, it.len) = (base.as_ptr(), import.len);
            it.allowed[WorkKind::Write as usize] = import.access.contains(Access::REMOTE_WRITE);
            it.allowed[WorkKind::Read as usize] = import.access.contains(Access::REMOTE_READ);
        }
        it
    }

    /// Moves the bytes of the first of `pieces`, as many as may take this path. Returns how many.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`]; the lease is held.
    #[inline]
    pub(super) unsafe fn copy_pieces(&mut self, template: &WorkRequest, pieces: &[Piece]) -> usize {
        let is_same = template.rkey == self.rkey
            && template.peer.0 == self.peer
            && template.imm.is_none()
            && template.lkey & DEVICE_MEMORY == 0
            && self.allowed[template.kind as usize];
        if !is_same {
            return 0;
        }
        let writes = template.kind == WorkKind::Write;
        // SAFETY: (both) by the caller; what the template asks for was just found allowed.
        let moved = unsafe {
            match template.strategy {
                CopyStrategy::Plain => self.one_by_one(CopyStrategy::Plain, writes, pieces),
                CopyStrategy::Stream => self.by_fours(writes, pieces),
            }
        };
        copy::finish(template.strategy);
        moved
    }

    /// # Safety
    /// As [`copy_pieces`](Self::copy_pieces), and the pieces are of a request that may take this path.
    #[inline(always)]
    unsafe fn one_by_one(&mut self, strategy: CopyStrategy, writes: bool, pieces: &[Piece]) -> usize {
        let mut moved = 0;
        for piece in pieces {
            // For a piece without bytes, the subtraction wraps around, and the piece takes the slow path.
            if piece.len.wrapping_sub(1) >= self.left || !self.holds(piece) {
                break;
            }
            self.left -= piece.len;
            let (to, from) = self.ends(writes, piece);
            // SAFETY: in the held import's range; the local span is by the caller.
            unsafe { copy::copy(strategy, to, from, piece.len as usize) };
            moved += 1;
        }
        moved
    }

    /// Streams four pieces side by side wherever the next four have equal lengths and the lease lasts for all of
    /// them, else one piece.
    ///
    /// # Safety
    /// As [`one_by_one`](Self::one_by_one).
    #[inline(never)]
    unsafe fn by_fours(&mut self, writes: bool, pieces: &[Piece]) -> usize {
        let mut moved = 0;
        loop {
            let rest = &pieces[moved..];
            if let Some(four) = rest.first_chunk::<4>()
                && let len = four[0].len
                && len.wrapping_sub(1) < self.left / 4
                && four.iter().all(|piece| piece.len == len && self.holds(piece))
            {
                self.left -= 4 * len;
                let ends = four.each_ref().map(|piece| self.ends(writes, piece));
                // SAFETY: all four in the held import's range; the local spans are by
                // the caller.
                unsafe { copy::stream_four(ends.map(|ends| ends.0), ends.map(|ends| ends.1), len as usize) };
                moved += 4;
                continue;
            }
            // SAFETY: by the caller.
            match unsafe { self.one_by_one(CopyStrategy::Stream, writes, &rest[..rest.len().min(1)]) } {
                0 => return moved,
                one => moved += one,
            }
        }
    }

    /// Returns true if the piece lies in the import.
    #[inline(always)]
    fn holds(&self, piece: &Piece) -> bool {
        piece.remote <= self.len && piece.len <= self.len - piece.remote
    }

    /// The destination and the source of the piece's bytes.
    #[inline(always)]
    fn ends(&self, writes: bool, piece: &Piece) -> (*mut u8, *const u8) {
        let remote = self.base.wrapping_add(piece.remote as usize);
        if writes { (remote, piece.local) } else { (piece.local, remote) }
    }

    /// Counts bytes that took another path under the same lease.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }

    /// Returns true if the lease must be renewed.
    pub(super) fn is_spent(&self) -> bool {
        self.left == 0
    }
}

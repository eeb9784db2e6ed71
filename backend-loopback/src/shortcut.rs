//! The way of a request that follows another one to the same region.

use multirail_spi::{Access, Piece, WorkKind, WorkRequest, copy, copy::CopyStrategy};

use crate::gpu::FAR;
use crate::remote::{Import, Place};

/// Bytes after which a lease is renewed, so that revoking never waits long.
const LEASE_BYTES: u64 = 4 << 20;

/// What the next request needs to follow the last one without another look-up.
pub(crate) struct Shortcut {
    rkey: u64,
    peer: u32,
    /// Whether it may go this way, by `WorkKind`: never to foreign memory.
    allowed: [bool; 3],
    base: *mut u8,
    len: u64,
    /// Bytes until the lease is renewed.
    left: u64,
}

impl Default for Shortcut {
    fn default() -> Self {
        Self { rkey: 0, peer: 0, allowed: [false; 3], base: std::ptr::null_mut(), len: 0, left: 0 }
    }
}

impl Shortcut {
    /// To an import that was just entered.
    pub(crate) fn new(import: &Import) -> Self {
        let mut it =
            Self { rkey: import.rkey, peer: import.target.peer.0, left: LEASE_BYTES, ..Self::default() };
        #[allow(irrefutable_let_patterns, reason = "one of two where processes connect")]
        if let Place::Here(base) = import.place {
            (it.base, it.len) = (base.as_ptr(), import.len);
            it.allowed[WorkKind::Write as usize] = import.access.contains(Access::REMOTE_WRITE);
            it.allowed[WorkKind::Read as usize] = import.access.contains(Access::REMOTE_READ);
        }
        it
    }

    /// Moves the first of `pieces`, as many as may go this way, and says how many.
    ///
    /// # Safety
    /// As [`multirail_spi::Endpoint::post`]; the lease is held.
    #[inline]
    pub(crate) unsafe fn follow(&mut self, template: &WorkRequest, pieces: &[Piece]) -> usize {
        let follows = template.rkey == self.rkey
            && template.peer.0 == self.peer
            && template.imm.is_none()
            && template.lkey & FAR == 0
            && self.allowed[template.kind as usize];
        if !follows {
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
    /// As [`follow`](Self::follow), and the pieces are of a request that may go this way.
    #[inline(always)]
    unsafe fn one_by_one(&mut self, strategy: CopyStrategy, writes: bool, pieces: &[Piece]) -> usize {
        let mut moved = 0;
        for piece in pieces {
            // A piece of no bytes wraps around and goes the long way.
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

    /// Streams four equal pieces side by side wherever the next four are equal and the
    /// lease lasts for them, else one.
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

    /// Whether the import has the piece's remote bytes.
    #[inline(always)]
    fn holds(&self, piece: &Piece) -> bool {
        piece.remote <= self.len && piece.len <= self.len - piece.remote
    }

    /// Where the piece's bytes go, and where they come from.
    #[inline(always)]
    fn ends(&self, writes: bool, piece: &Piece) -> (*mut u8, *const u8) {
        let there = self.base.wrapping_add(piece.remote as usize);
        if writes { (there, piece.local) } else { (piece.local, there) }
    }

    /// Counts bytes that went another way under the same lease.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }

    /// Whether the lease is to be renewed.
    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }
}

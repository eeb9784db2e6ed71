//! The memory that two peers share: the target makes it, the initiator maps it.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use multirail_spi::{
    HostBuffer, Memory, Result,
    copy::{CopyStrategy, copy},
};

use crate::board::{Lease, SLOTS};
use crate::lane::{self, ENTRIES, MESSAGE, PAYLOADS};
use crate::ring::Cell;

/// What lies in the shared memory. All of it is atomic or raw: the other side
/// may write any byte at any time. Zeroed memory is its initial state.
#[repr(C)]
pub(crate) struct Layout {
    pub(crate) state: CachePadded<State>,
    pub(crate) tail: CachePadded<AtomicU64>,
    /// Message payloads in use, a bit each: set by the initiator, cleared by the target.
    pub(crate) taken: CachePadded<AtomicU32>,
    pub(crate) cells: [Cell<AtomicU64>; ENTRIES],
    pub(crate) board: [Lease; SLOTS],
    pub(crate) payloads: [UnsafeCell<[u8; MESSAGE]>; PAYLOADS],
}

/// Flags by which one side asks the other to ring.
#[repr(C)]
pub(crate) struct State {
    /// The consumer sleeps: ring.
    pub(crate) armed: AtomicU32,
    /// The initiator found the lane full: ring when there is room again.
    pub(crate) starved: AtomicU32,
    /// The target has closed the connection.
    pub(crate) closed: AtomicU32,
}

// SAFETY: the payloads are only reached through raw pointers, by `copy`.
unsafe impl Sync for Layout {}
// SAFETY: plain memory.
unsafe impl Send for Layout {}

/// What may lie in a segment.
///
/// # Safety
/// All of it is atomic or raw, and zeroed memory is a value of it.
pub(crate) unsafe trait Plain: Send + Sync {
    /// Bytes at the beginning that the owner touches before a peer is admitted.
    const HEAD: usize;
}

// SAFETY: atomics and raw payloads.
unsafe impl Plain for Layout {
    const HEAD: usize = std::mem::offset_of!(Layout, board);
}

/// A mapped [`Layout`], ours or the peer's.
pub(crate) struct Segment<T = Layout> {
    layout: NonNull<T>,
    owner: Owner,
}

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "keeps the bytes mapped"))]
enum Owner {
    Ours(HostBuffer),
    /// For a peer in this process; `None` once it was put aside.
    Private(Option<HostBuffer>),
    #[cfg(target_os = "linux")]
    Theirs(#[expect(dead_code, reason = "keeps the bytes mapped")] multirail_spi::Mapping),
}

// SAFETY: `layout` points into `owner`, which is `Send + Sync`; what is `Plain` is too.
unsafe impl<T: Plain> Send for Segment<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Segment<T> {}

impl<T: Plain> Segment<T> {
    /// Exact size of the shared file.
    const SIZE: usize = size_of::<T>();

    /// A new one, zeroed. Its head has memory at once, the rest once it is [committed](Self::commit).
    pub(crate) fn create() -> Result<Self> {
        let segment = Self::of(HostBuffer::sparse(Self::SIZE)?);
        segment.commit_first(T::HEAD)?;
        Ok(segment)
    }

    /// Puts memory under all of it: then no touch of it finds memory short.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_first(Self::SIZE)
    }

    #[cfg(target_os = "linux")]
    fn commit_first(&self, len: usize) -> Result<()> {
        self.file().map_or(Ok(()), |file| crate::mapping::commit("connect", file, len))
    }

    #[cfg(not(target_os = "linux"))]
    fn commit_first(&self, _: usize) -> Result<()> {
        Ok(())
    }

    fn of(buffer: HostBuffer) -> Self {
        Self { layout: checked(buffer.as_ptr(), buffer.len()), owner: Owner::Ours(buffer) }
    }

    /// The peer's, from its file.
    #[cfg(target_os = "linux")]
    pub(crate) fn map(file: std::os::fd::BorrowedFd<'_>) -> Result<Self> {
        let mapping = crate::mapping::map("connect", file, Self::SIZE, true)?;
        Ok(Self { layout: checked(mapping.start().as_ptr(), Self::SIZE), owner: Owner::Theirs(mapping) })
    }

    /// The file behind it, to be handed to the peer.
    #[cfg(target_os = "linux")]
    pub(crate) fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.owner {
            Owner::Ours(buffer) => buffer.shared_file(),
            Owner::Private(_) | Owner::Theirs(_) => None,
        }
    }

    /// What is in it.
    #[inline]
    pub(crate) fn layout(&self) -> &T {
        // SAFETY: `checked` saw size and alignment, `owner` keeps the bytes
        // mapped, and every field tolerates concurrent writes.
        unsafe { self.layout.as_ref() }
    }
}

impl Segment {
    /// One for a peer in this process: without a file, and perhaps one that was put aside.
    pub(crate) fn private() -> Result<Self> {
        let aside = ASIDE.lock().expect("segments").pop();
        let buffer = aside.map_or_else(|| HostBuffer::private(Self::SIZE), Ok)?;
        Ok(Self { layout: checked(buffer.as_ptr(), buffer.len()), owner: Owner::Private(Some(buffer)) })
    }

    /// The last who knew a private segment lets go of it; the first `leases` of its board
    /// were used. Put aside if it is soon zeroed: a new one costs many times as much.
    pub(crate) fn retire(&mut self, leases: usize) {
        if !matches!(self.owner, Owner::Private(_)) {
            return;
        }
        let layout = self.layout();
        let is_small = leases <= MOST_LEASES && !layout.has_messages();
        if is_small {
            layout.reset(leases);
        }
        let Owner::Private(buffer) = &mut self.owner else { return };
        let mut aside = ASIDE.lock().expect("segments");
        if is_small && aside.len() < MOST_ASIDE {
            aside.extend(buffer.take());
        }
    }
}

impl Layout {
    /// Whether payloads may have been touched: an entry says so, or may have been overwritten.
    fn has_messages(&self) -> bool {
        let tail = self.tail.load(Ordering::Acquire) as usize;
        tail > ENTRIES || self.cells[..tail].iter().any(lane::is_message)
    }

    /// Zeroes what was used, nobody else looking any more.
    fn reset(&self, leases: usize) {
        let tail = self.tail.swap(0, Ordering::Relaxed) as usize;
        self.cells[..tail.min(ENTRIES)].iter().for_each(Cell::reset);
        self.board[..leases].iter().for_each(Lease::reset);
        self.taken.store(0, Ordering::Relaxed);
        for flag in [&self.state.armed, &self.state.starved, &self.state.closed] {
            flag.store(0, Ordering::Relaxed);
        }
    }
}

/// Private segments that nobody uses, zeroed.
static ASIDE: Mutex<Vec<HostBuffer>> = Mutex::new(Vec::new());
/// Of so many at most: four fabrics of 32 devices each, all connected. A few pages each.
const MOST_ASIDE: usize = 384;
/// Leases of a segment that is put aside: a page of them.
const MOST_LEASES: usize = 512;

/// Reads a byte of every page, so that its first use finds it mapped.
pub(crate) fn touch<T: Plain>(layout: &T) {
    /// The smallest page there is.
    const PAGE: usize = 4096;
    let start = std::ptr::from_ref(layout).cast::<u8>();
    let mut byte = 0_u8;
    for offset in (0..size_of::<T>()).step_by(PAGE) {
        // SAFETY: inside the layout; the other side may write there at any time, as `copy` bears.
        unsafe { copy(CopyStrategy::Plain, &raw mut byte, start.add(offset), 1) };
    }
    std::hint::black_box(byte);
}

fn checked<T>(start: *mut u8, len: usize) -> NonNull<T> {
    assert!(len == size_of::<T>() && (start as usize).is_multiple_of(align_of::<T>()));
    NonNull::new(start.cast()).expect("a mapping is not null")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_zero(segment: &Segment) -> bool {
        let len = std::mem::offset_of!(Layout, payloads);
        let start = std::ptr::from_ref(segment.layout()).cast::<u8>();
        // SAFETY: in bounds of a segment that nobody else knows.
        (0..len).all(|at| unsafe { start.add(at).read() } == 0)
    }

    #[test]
    fn what_was_put_aside_is_zero() {
        for (imms, messages, leases) in [(0, 0, 0), (3, 0, 2), (5, 1, 512), (ENTRIES, 0, 1), (1, 0, 513)] {
            let mut segment = Segment::private().unwrap();
            assert!(is_zero(&segment));
            let layout = segment.layout();
            layout.state.closed.store(1, Ordering::Relaxed);
            for imm in 0..imms {
                assert!(lane::send_imm(layout, imm as u32, || {}));
            }
            for _ in 0..messages {
                // SAFETY: the bytes are a local array's.
                assert!(unsafe { lane::send_message(layout, [7; 9].as_ptr(), 9, None, || {}) });
            }
            layout.board[..leases].iter().for_each(|lease| lease.open(3));
            segment.retire(leases);
            let kept = matches!(segment.owner, Owner::Private(None));
            assert_eq!(kept, messages == 0 && leases <= MOST_LEASES, "{imms} {messages} {leases}");
        }
    }
}

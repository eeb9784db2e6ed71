//! The memory that two peers share: the target makes it, the initiator maps it.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;
use transport_core::{HostBuffer, Memory, Result};

use crate::board::{Lease, SLOTS};
use crate::lane::{ENTRIES, MESSAGE, PAYLOADS};
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
pub(crate) unsafe trait Plain: Send + Sync {}

// SAFETY: atomics and raw payloads.
unsafe impl Plain for Layout {}

/// A mapped [`Layout`], ours or the peer's.
pub(crate) struct Segment<T = Layout> {
    layout: NonNull<T>,
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "keeps the bytes mapped"))]
    owner: Owner,
}

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "keeps the bytes mapped"))]
enum Owner {
    Ours(HostBuffer),
    #[cfg(target_os = "linux")]
    Theirs(#[expect(dead_code, reason = "keeps the bytes mapped")] transport_core::spi::Mapping),
}

// SAFETY: `layout` points into `owner`, which is `Send + Sync`; what is `Plain` is too.
unsafe impl<T: Plain> Send for Segment<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Segment<T> {}

impl<T: Plain> Segment<T> {
    /// Exact size of the shared file.
    const SIZE: usize = size_of::<T>();

    /// A new one, zeroed. Most of it is never touched.
    pub(crate) fn create() -> Result<Self> {
        Ok(Self::of(HostBuffer::sparse(Self::SIZE)?))
    }

    /// One for a peer in this process: no file, which is most of the cost of a new one.
    pub(crate) fn private() -> Result<Self> {
        Ok(Self::of(HostBuffer::private(Self::SIZE)?))
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
            Owner::Theirs(_) => None,
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

fn checked<T>(start: *mut u8, len: usize) -> NonNull<T> {
    assert!(len == size_of::<T>() && (start as usize).is_multiple_of(align_of::<T>()));
    NonNull::new(start.cast()).expect("a mapping is not null")
}

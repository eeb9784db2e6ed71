//! The memory that two peers share. The target makes a segment, the initiator maps it.
//!
//! [`ConnectionLayout`] is in the segment of every connection: a [`message_ring`] (a [`ring`] of entries, and message
//! payloads) and a [`lease_table`]. [`SharedStagingBuffer`](staging_buffer::SharedStagingBuffer) is in a second
//! segment, of connections that stage. Each domain has a [`ready_set`]. [`mapping`] checks the files behind segments and regions before they are mapped.

mod layout;
pub(crate) mod lease_table;
pub(crate) mod mapping;
pub(crate) mod message_ring;
pub(crate) mod ready_set;
mod ring;
pub(crate) mod staging_buffer;

use std::ptr::NonNull;
use std::sync::Mutex;

use multirail_spi::{
    HostBuffer, Memory, Result,
    copy::{CopyStrategy, copy},
};

pub(crate) use layout::ConnectionLayout;

/// A type that may lie in a segment.
///
/// # Safety
/// Every field is atomic or raw, and zeroed memory is a value of the type.
pub(crate) unsafe trait SegmentContent: Send + Sync {
    /// Bytes at the beginning that the owner accesses before a peer is admitted.
    const HEAD: usize;
}

/// Mapped memory that holds a `T`, made by this side or by the peer.
pub(crate) struct Segment<T = ConnectionLayout> {
    content: NonNull<T>,
    backing: Backing,
}

enum Backing {
    /// Made here, for another process.
    Own(HostBuffer),
    /// Made here, for a peer in this process. `None` once the buffer was kept for reuse.
    Private(Option<HostBuffer>),
    /// The peer's file, mapped here.
    Mapped(#[expect(dead_code, reason = "keeps the bytes mapped")] multirail_spi::Mapping),
}

// SAFETY: `content` points into `backing`, which is `Send + Sync`, as every `SegmentContent` is.
unsafe impl<T: SegmentContent> Send for Segment<T> {}
// SAFETY: as above.
unsafe impl<T: SegmentContent> Sync for Segment<T> {}

impl<T: SegmentContent> Segment<T> {
    /// Exact size of the shared file.
    const SIZE: usize = size_of::<T>();

    /// Makes a zeroed segment. Its head has memory at once, the rest after [`commit`](Self::commit).
    pub(crate) fn create() -> Result<Self> {
        let segment = Self::of(HostBuffer::sparse(Self::SIZE)?);
        segment.commit_first(T::HEAD)?;
        Ok(segment)
    }

    /// Allocates memory for the whole segment, so that no later access can find the system out of memory.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_first(Self::SIZE)
    }

    fn commit_first(&self, len: usize) -> Result<()> {
        self.file().map_or(Ok(()), |file| mapping::commit("connect", file, len))
    }

    fn of(buffer: HostBuffer) -> Self {
        Self { content: checked(buffer.as_ptr(), buffer.len()), backing: Backing::Own(buffer) }
    }

    /// Maps the peer's segment from its file.
    pub(crate) fn map(file: std::os::fd::BorrowedFd<'_>) -> Result<Self> {
        let mapping = mapping::map("connect", file, Self::SIZE, true)?;
        Ok(Self { content: checked(mapping.start().as_ptr(), Self::SIZE), backing: Backing::Mapped(mapping) })
    }

    /// The file that the server hands to the peer.
    pub(crate) fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.backing {
            Backing::Own(buffer) => buffer.shared_file(),
            Backing::Private(_) | Backing::Mapped(_) => None,
        }
    }

    /// The content.
    #[inline]
    pub(crate) fn content(&self) -> &T {
        // SAFETY: `checked` saw size and alignment, `backing` keeps the bytes
        // mapped, and every field tolerates concurrent writes.
        unsafe { self.content.as_ref() }
    }
}

impl Segment {
    /// Makes a segment for a peer in this process. It has no file, and may reuse the buffer of an earlier one.
    pub(crate) fn private() -> Result<Self> {
        let kept = REUSABLE.lock().expect("segments").pop();
        let buffer = kept.map_or_else(|| HostBuffer::private(Self::SIZE), Ok)?;
        Ok(Self { content: checked(buffer.as_ptr(), buffer.len()), backing: Backing::Private(Some(buffer)) })
    }

    /// Keeps the buffer of a private segment for reuse, if little of it has to be zeroed: a new buffer costs many
    /// times as much. The caller is the last user of the segment, and the first `leases` of its leases were used.
    pub(crate) fn recycle(&mut self, leases: usize) {
        if !matches!(self.backing, Backing::Private(_)) {
            return;
        }
        let content = self.content();
        let is_small = leases <= MAX_REUSED_LEASES && !content.has_messages();
        if is_small {
            content.reset(leases);
        }
        let Backing::Private(buffer) = &mut self.backing else { return };
        let mut kept = REUSABLE.lock().expect("segments");
        if is_small && kept.len() < MAX_REUSABLE {
            kept.extend(buffer.take());
        }
    }
}

/// The zeroed buffers of private segments that no connection uses.
static REUSABLE: Mutex<Vec<HostBuffer>> = Mutex::new(Vec::new());
/// Buffers kept at most: enough for four fabrics of 32 devices each, all connected. Each takes a few pages.
const MAX_REUSABLE: usize = 384;
/// The most used leases of a segment that is kept for reuse: a page of them.
const MAX_REUSED_LEASES: usize = 512;

/// Reads a byte of every page. The first use of a page then takes no page fault.
pub(crate) fn touch<T: SegmentContent>(content: &T) {
    /// The smallest page size that exists.
    const PAGE: usize = 4096;
    let start = std::ptr::from_ref(content).cast::<u8>();
    let mut byte = 0_u8;
    for offset in (0..size_of::<T>()).step_by(PAGE) {
        // SAFETY: inside the content; the other side may write there at any time, which `copy` tolerates.
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
    use std::sync::atomic::Ordering;

    use super::message_ring::RING_ENTRIES;
    use super::*;

    fn is_zero(segment: &Segment) -> bool {
        let len = std::mem::offset_of!(ConnectionLayout, payloads);
        let start = std::ptr::from_ref(segment.content()).cast::<u8>();
        // SAFETY: in bounds of a segment that only this test uses.
        (0..len).all(|at| unsafe { start.add(at).read() } == 0)
    }

    #[test]
    fn a_reused_segment_is_zero() {
        for (imms, messages, leases) in [(0, 0, 0), (3, 0, 2), (5, 1, 512), (RING_ENTRIES, 0, 1), (1, 0, 513)]
        {
            let mut segment = Segment::private().unwrap();
            assert!(is_zero(&segment));
            let layout = segment.content();
            layout.flags.closed.store(1, Ordering::Relaxed);
            for imm in 0..imms {
                assert!(message_ring::send_imm(layout, imm as u32, || {}));
            }
            for _ in 0..messages {
                // SAFETY: the bytes are a local array's.
                assert!(unsafe { message_ring::send_message(layout, [7; 9].as_ptr(), 9, None, || {}) });
            }
            layout.leases[..leases].iter().for_each(|lease| lease.open(3));
            segment.recycle(leases);
            let is_kept = matches!(segment.backing, Backing::Private(None));
            assert_eq!(is_kept, messages == 0 && leases <= MAX_REUSED_LEASES, "{imms} {messages} {leases}");
        }
    }
}

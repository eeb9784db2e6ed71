//! The memory that two peers share. The target makes a segment, the initiator maps it.
//!
//! [`ConnectionLayout`] is in the segment of every connection: a [`message_ring`] (a [`ring`] of entries, and message
//! payloads) and a [`lease_table`]. [`SharedStagingBuffer`](staging_buffer::SharedStagingBuffer) is in a second
//! segment, of connections that stage. Each domain has a [`ready_set`]. [`mapping`] checks the files behind segments
//! and regions before they are mapped.

mod layout;
pub(crate) mod lease_table;
pub(crate) mod mapping;
pub(crate) mod message_ring;
pub(crate) mod ready_set;
mod ring;
pub(crate) mod staging_buffer;

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use multirail_spi::{
    HostBuffer, Memory, Result,
    copy::{CopyStrategy, copy},
};

pub(crate) use layout::ConnectionLayout;
use mapping::FilePart;

/// A type that may lie in a segment.
///
/// # Safety
/// Every field is atomic or raw, and zeroed memory is a value of the type.
pub(crate) unsafe trait SegmentContent: Send + Sync {
    /// Bytes at the beginning that have memory from the creation on.
    const HEAD: usize;
}

/// Mapped memory that holds a `T`, made by this side or by the peer.
pub(crate) struct Segment<T = ConnectionLayout> {
    content: NonNull<T>,
    backing: Backing,
}

enum Backing {
    /// Made here, for another process, with the file until that process has it.
    Own {
        #[expect(dead_code, reason = "keeps the bytes mapped")]
        mapping: multirail_spi::Mapping,
        file: Mutex<Option<Arc<OwnedFd>>>,
    },
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
    #[cfg(not(miri))]
    pub(crate) fn create() -> Result<Self> {
        let (mapping, file) = HostBuffer::sparse(Self::SIZE)?.into_parts();
        if let Some(file) = &file {
            mapping::commit("connect", file.as_fd(), T::HEAD)?;
        }
        let content = checked(mapping.start().as_ptr(), Self::SIZE);
        Ok(Self { content, backing: Backing::Own { mapping, file: Mutex::new(file.map(Arc::new)) } })
    }

    /// Makes a zeroed segment, without a file.
    #[cfg(miri)]
    pub(crate) fn create() -> Result<Self> {
        let buffer = HostBuffer::private(Self::SIZE)?;
        Ok(Self { content: checked(buffer.as_ptr(), buffer.len()), backing: Backing::Private(Some(buffer)) })
    }

    /// Maps the peer's segment from its file.
    pub(crate) fn map(file: std::os::fd::BorrowedFd<'_>) -> Result<Self> {
        let committed = if commits_on_demand() { T::HEAD } else { Self::SIZE };
        let part = FilePart { committed, ..FilePart::whole(Self::SIZE) };
        let mapping = mapping::map("connect", file, part, true)?;
        if commits_on_demand() {
            // The file may have its memory elsewhere.
            mapping::commit_mapped("connect", mapping.start().as_ptr(), T::HEAD, true)?;
        }
        Ok(Self { content: checked(mapping.start().as_ptr(), Self::SIZE), backing: Backing::Mapped(mapping) })
    }

    /// The file that the server hands to the peer. `None` once it was handed over.
    pub(crate) fn file(&self) -> Option<Arc<OwnedFd>> {
        match &self.backing {
            Backing::Own { file, .. } => file.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            Backing::Private(_) | Backing::Mapped(_) => None,
        }
    }

    /// Closes the file, which the peer has.
    pub(crate) fn close_file(&self) {
        if let Backing::Own { file, .. } = &self.backing {
            drop(file.lock().unwrap_or_else(PoisonError::into_inner).take());
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
    /// Makes sure that no later access can find the system out of memory: where the two sides cannot commit memory as
    /// they need it, gives the whole segment its memory.
    pub(crate) fn commit(&self) -> Result<()> {
        if let Some(file) = self.file().filter(|_| !commits_on_demand()) {
            mapping::commit("connect", file.as_fd(), Self::SIZE)?;
            self.content().mark_committed();
        }
        Ok(())
    }

    /// Returns true if no other process maps the segment.
    pub(crate) fn is_private(&self) -> bool {
        matches!(self.backing, Backing::Private(_))
    }

    /// Makes a segment for a peer in this process. It has no file, and may reuse the buffer of an earlier one.
    pub(crate) fn private() -> Result<Self> {
        let kept = REUSABLE.lock().expect("segments").pop();
        let buffer = kept.map_or_else(|| HostBuffer::private(Self::SIZE), Ok)?;
        let content = checked(buffer.as_ptr(), buffer.len());
        let segment = Self { content, backing: Backing::Private(Some(buffer)) };
        // The kernel gets a page of private memory at its first access.
        segment.content().mark_committed();
        Ok(segment)
    }

    /// Keeps the buffer of a private segment for reuse, if little of it has to be zeroed: a new buffer costs many
    /// times as much. The caller is the last user of the segment, and `leases` of its leases were used.
    pub(crate) fn recycle(&mut self, leases: &[Range<usize>]) {
        if !matches!(self.backing, Backing::Private(_)) {
            return;
        }
        let content = self.content();
        let used = leases.iter().map(Range::len).sum::<usize>();
        let is_small = used <= MAX_REUSED_LEASES && !content.has_messages();
        if is_small {
            content.reset(leases.iter().flat_map(|range| &content.leases[range.clone()]));
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

/// Reads a byte of every page that has memory from the beginning. The first use of such a page then takes no page
/// fault.
pub(crate) fn touch<T: SegmentContent>(content: &T) {
    /// The smallest page size that exists.
    const PAGE: usize = 4096;
    let start = std::ptr::from_ref(content).cast::<u8>();
    let mut byte = 0_u8;
    for offset in (0..T::HEAD).step_by(PAGE) {
        // SAFETY: inside the content; the other side may write there at any time, which `copy` tolerates.
        unsafe { copy(CopyStrategy::Plain, &raw mut byte, start.add(offset), 1) };
    }
    std::hint::black_box(byte);
}

/// Puts memory under `part` of a segment, so that no access finds the system out of memory. If another process has the
/// segment too, both sides call this: neither trusts the other one to have done so.
///
/// # Errors
/// `Exhausted` if there is no memory.
pub(crate) fn commit_pages<T>(part: &[T]) -> Result<()> {
    if cfg!(miri) || !commits_on_demand() {
        return Ok(());
    }
    mapping::commit_mapped("connect", part.as_ptr().cast(), size_of_val(part), true)
}

/// Whether the kernel can put memory under a part of a mapping and report that there is none. Otherwise the target
/// gives a whole segment its memory before a peer gets it. Both sides run on one kernel, and so find the same.
fn commits_on_demand() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(mapping::can_commit_mapped)
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
        // What is committed stays so.
        let sender = std::mem::offset_of!(ConnectionLayout, sender);
        let is_kept = |at: &usize| (sender..sender + size_of::<layout::SenderState>()).contains(at);
        assert_eq!(segment.content().sender.tail.load(Ordering::Relaxed), 0);
        // SAFETY: in bounds of a segment that only this test uses.
        (0..len).filter(|at| !is_kept(at)).all(|at| unsafe { start.add(at).read() } == 0)
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn the_head_of_a_peers_segment_has_memory_once_it_is_mapped() {
        use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
        if !commits_on_demand() || multirail_spi::HostSharing::of_this_process().unwrap().is_portable() {
            return println!("skipped: the whole segment gets memory");
        }
        // A hostile peer's file, whose memory lies behind its end.
        let file = rustix::fs::memfd_create("hollow", MemfdFlags::ALLOW_SEALING).unwrap();
        let (size, head) = (Segment::<ConnectionLayout>::SIZE as u64, ConnectionLayout::HEAD as u64);
        rustix::fs::ftruncate(&file, size).unwrap();
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, size, 2 * head).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let _segment = Segment::<ConnectionLayout>::map(file.as_fd()).unwrap();
        assert!(rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap() >= head);
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
                assert!(unsafe { message_ring::send_message(layout, [7; 99].as_ptr(), 99, None, || {}) });
            }
            layout.leases[..leases].iter().for_each(|lease| lease.open(3));
            segment.recycle(std::slice::from_ref(&(0..leases)));
            let is_kept = matches!(segment.backing, Backing::Private(None));
            assert_eq!(is_kept, messages == 0 && leases <= MAX_REUSED_LEASES, "{imms} {messages} {leases}");
        }
    }
}

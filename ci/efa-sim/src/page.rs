//! The shared memory of a process: the regions, receives and arrivals of its cards. The other processes map it.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::p5::CARDS;

/// The number of regions of a card.
pub(crate) const REGIONS: usize = 1 << 14;
/// The number of queue pairs of a card.
pub(crate) const QUEUES: usize = 32;
/// The number of receives of a queue pair (p5: 8192).
pub(crate) const RECEIVES: usize = 8192;
/// The number of buffers of a receive (p5: 3).
pub(crate) const RECEIVE_BUFFERS: usize = 3;
/// The number of arrivals that are not polled yet. It exceeds the number of receives, because some arrivals take none.
const ARRIVALS: usize = 2 * RECEIVES;

/// The shared memory of a process. Zeroed memory is a valid page without regions and queues.
#[repr(C)]
pub(crate) struct ProcessPage {
    pub(crate) cards: [SharedCard; CARDS],
}

/// A card in shared memory.
#[repr(C)]
pub(crate) struct SharedCard {
    /// Not 0 if the card is dead: it answers no request any more.
    pub(crate) is_dead: AtomicU32,
    /// Held while a request looks up a region and accesses it.
    pub(crate) lock: Lock,
    pub(crate) regions: [SharedRegion; REGIONS],
    pub(crate) queues: [ReceiveQueue; QUEUES],
}

/// A region. The place is free while the key is 0.
#[repr(C)]
pub(crate) struct SharedRegion {
    pub(crate) key: AtomicU32,
    pub(crate) access: AtomicU32,
    pub(crate) addr: AtomicU64,
    pub(crate) len: AtomicU64,
}

impl ProcessPage {
    /// Initialises the locks of the first `cards` cards.
    pub(crate) fn prepare(&self, cards: usize) {
        for card in &self.cards[..cards] {
            card.lock.init();
            card.queues.iter().for_each(|queue| queue.lock.init());
        }
    }
}

impl SharedCard {
    /// Whether `key` gives `access` to `len` bytes at `addr`.
    pub(crate) fn allows(&self, key: u32, addr: u64, len: u64, access: u32) -> bool {
        let region = &self.regions[key as usize % REGIONS];
        let is_same = || key != 0 && region.key.load(Ordering::Acquire) == key;
        let (begin, size) = (region.addr.load(Ordering::Acquire), region.len.load(Ordering::Acquire));
        let is_inside = addr >= begin && addr - begin <= size && size - (addr - begin) >= len;
        // The key is read again at the end: if the place was reused meanwhile, the key has changed.
        is_same() && is_inside && region.access.load(Ordering::Acquire) & access == access && is_same()
    }
}

/// A buffer of a receive.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ReceiveBuffer {
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// A posted receive.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct PostedReceive {
    pub(crate) id: u64,
    pub(crate) buffers: [ReceiveBuffer; RECEIVE_BUFFERS],
}

/// A message or write of a peer that has arrived.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ArrivalRecord {
    /// The id of the receive that it took.
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) kind: ReceivedKind,
    pub(crate) from: [u8; 16],
    pub(crate) from_queue: u32,
}

/// The kind of an arrival.
#[repr(u32)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ReceivedKind {
    #[default]
    Message,
    MessageWithImm,
    Write,
    /// A write that took no receive.
    Unsolicited,
}

/// The receiving side of a queue pair.
#[repr(C)]
pub(crate) struct ReceiveQueue {
    lock: Lock,
    /// The number of the queue pair; 0 while there is none.
    pub(crate) number: AtomicU32,
    pub(crate) secret: AtomicU32,
    pub(crate) is_unsolicited: AtomicU32,
    /// The number of receives that arrivals have taken, and the number that were posted.
    taken: AtomicU32,
    posted: AtomicU32,
    /// The number of arrivals that were polled, and the number that were added.
    polled: AtomicU32,
    added: AtomicU32,
    receives: [UnsafeCell<PostedReceive>; RECEIVES],
    arrivals: [UnsafeCell<ArrivalRecord>; ARRIVALS],
}

// SAFETY: the rings are accessed only while the lock is held.
unsafe impl Sync for ReceiveQueue {}

impl ReceiveQueue {
    /// Empties the queue. No process finds it before its number is stored.
    pub(crate) fn open(&self) {
        self.lock.with(|| {
            for index in [&self.taken, &self.posted, &self.polled, &self.added] {
                index.store(0, Ordering::Release);
            }
        });
    }

    /// Closes the queue: no process finds it any more, and no delivery is in progress.
    pub(crate) fn close(&self) {
        self.lock.with(|| self.number.store(0, Ordering::Release));
    }

    /// Whether the queue belongs to the pair `number` with this `secret`.
    pub(crate) fn belongs_to(&self, number: u32, secret: u32) -> bool {
        self.number.load(Ordering::Acquire) == number && self.secret.load(Ordering::Acquire) == secret
    }

    /// Posts a receive. Returns false if `depth` receives are posted already.
    pub(crate) fn post(&self, receive: PostedReceive, depth: u32) -> bool {
        self.lock.with(|| {
            let (taken, posted) = (self.taken.load(Ordering::Acquire), self.posted.load(Ordering::Acquire));
            if posted.wrapping_sub(taken) >= depth {
                return false;
            }
            // SAFETY: the lock is held.
            unsafe { *self.receives[posted as usize % RECEIVES].get() = receive };
            self.posted.store(posted.wrapping_add(1), Ordering::Release);
            true
        })
    }

    /// The next receive, which stays in the queue.
    pub(crate) fn next(&self) -> Option<PostedReceive> {
        let (taken, posted) = (self.taken.load(Ordering::Acquire), self.posted.load(Ordering::Acquire));
        // SAFETY: the caller is in `deliver`, with the lock held.
        (taken != posted).then(|| unsafe { *self.receives[taken as usize % RECEIVES].get() })
    }

    /// Locks the queue and calls `act` with the next receive. `act` returns whether the receive was taken, and the
    /// arrival to add. Returns `None` without a call if there is no space for an arrival.
    pub(crate) fn deliver<T>(
        &self,
        act: impl FnOnce(Option<PostedReceive>) -> (bool, Option<ArrivalRecord>, T),
    ) -> Option<T> {
        self.lock.with(|| {
            let (polled, added) = (self.polled.load(Ordering::Acquire), self.added.load(Ordering::Acquire));
            if added.wrapping_sub(polled) as usize >= ARRIVALS {
                return None;
            }
            let (is_taken, arrival, result) = act(self.next());
            if is_taken {
                let taken = self.taken.load(Ordering::Acquire);
                self.taken.store(taken.wrapping_add(1), Ordering::Release);
            }
            if let Some(arrival) = arrival {
                // SAFETY: the lock is held.
                unsafe { *self.arrivals[added as usize % ARRIVALS].get() = arrival };
                self.added.store(added.wrapping_add(1), Ordering::Release);
            }
            Some(result)
        })
    }

    /// Removes the oldest arrival.
    pub(crate) fn pop_arrival(&self) -> Option<ArrivalRecord> {
        if self.polled.load(Ordering::Acquire) == self.added.load(Ordering::Acquire) {
            return None;
        }
        self.lock.with(|| {
            let polled = self.polled.load(Ordering::Acquire);
            // SAFETY: the lock is held, and only the owner polls.
            let arrival = unsafe { *self.arrivals[polled as usize % ARRIVALS].get() };
            self.polled.store(polled.wrapping_add(1), Ordering::Release);
            Some(arrival)
        })
    }
}

/// Maps the page in `file`, and extends the file to the size of a page first.
pub(crate) fn map(file: &File) -> Result<*mut ProcessPage> {
    let size = size_of::<ProcessPage>();
    // The file is sparse: untouched parts take no memory.
    if file.metadata()?.len() < size as u64 {
        file.set_len(size as u64)?;
    }
    // SAFETY: a new mapping.
    let page = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), size, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    match page == libc::MAP_FAILED {
        true => Err(Error::last_os_error()),
        false => Ok(page.cast()),
    }
}

/// Unmaps a page.
///
/// # Safety
/// The page was mapped by [`map`], and no code uses it any more.
pub(crate) unsafe fn unmap(page: *mut ProcessPage) {
    // SAFETY: by the caller.
    unsafe { libc::munmap(page.cast(), size_of::<ProcessPage>()) };
}

/// A robust, process-shared pthread mutex: a lock between processes that outlives its holder. Zeroed memory needs
/// [`init`](Lock::init) first.
#[repr(C)]
pub(crate) struct Lock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a process-shared mutex may be used by any thread of any process.
unsafe impl Sync for Lock {}

impl Lock {
    /// Initialises the lock, which no thread uses yet.
    pub(crate) fn init(&self) {
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        // SAFETY: the first call initialises the attributes and the last one destroys them; the mutex is in memory that
        // all its users share.
        unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr());
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(self.0.get(), attributes.as_ptr());
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
        }
    }

    /// Waits until the present holder releases the lock, for at most a second, because a stopped process never does.
    pub(crate) fn await_holder(&self) {
        // SAFETY: plain data; as in `with`.
        unsafe {
            let mut until: libc::timespec = std::mem::zeroed();
            libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut until);
            until.tv_sec += 1;
            match libc::pthread_mutex_timedlock(self.0.get(), &raw const until) {
                libc::ETIMEDOUT => return,
                libc::EOWNERDEAD => drop(libc::pthread_mutex_consistent(self.0.get())),
                _ => {}
            }
            libc::pthread_mutex_unlock(self.0.get());
        }
    }

    /// Runs `act` while the lock is held. A holder that died leaves consistent rings, because their indices change
    /// last: at worst the item that it was adding is missing.
    pub(crate) fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        // SAFETY: the lock was initialised when the page was made, and the thread that locks it unlocks it.
        unsafe {
            if libc::pthread_mutex_lock(self.0.get()) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(self.0.get());
            }
            let result = act();
            libc::pthread_mutex_unlock(self.0.get());
            result
        }
    }
}

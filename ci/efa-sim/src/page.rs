//! The memory of a process that the others reach: its cards' keys, queues and what came in.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::p5::CARDS;

/// Regions of a card.
pub(crate) const REGIONS: usize = 1 << 14;
/// Queue pairs of a card.
pub(crate) const QUEUES: usize = 32;
/// Receives of a queue pair (p5: 8192).
pub(crate) const RECEIVES: usize = 8192;
/// Buffers of a receive (p5: 3).
pub(crate) const RECEIVE_BUFFERS: usize = 3;
/// What came in and was not polled yet. More than receives, as some need none.
const ARRIVALS: usize = 2 * RECEIVES;

/// Everything of a process. Zeroed memory is an empty one.
#[repr(C)]
pub(crate) struct ProcessPage {
    pub(crate) cards: [SharedCard; CARDS],
}

/// A card.
#[repr(C)]
pub(crate) struct SharedCard {
    /// It answers nobody any more.
    pub(crate) is_dead: AtomicU32,
    /// Held while memory is looked up and accessed.
    pub(crate) lock: Lock,
    pub(crate) regions: [SharedRegion; REGIONS],
    pub(crate) queues: [ReceiveQueue; QUEUES],
}

/// A region; nothing while its key is 0.
#[repr(C)]
pub(crate) struct SharedRegion {
    pub(crate) key: AtomicU32,
    pub(crate) access: AtomicU32,
    pub(crate) addr: AtomicU64,
    pub(crate) len: AtomicU64,
}

impl ProcessPage {
    /// Makes the locks of so many cards.
    pub(crate) fn prepare(&self, cards: usize) {
        for card in &self.cards[..cards] {
            card.lock.init();
            card.queues.iter().for_each(|queue| queue.lock.init());
        }
    }
}

impl SharedCard {
    /// Whether `key` stands for memory at `addr` that may be used so.
    pub(crate) fn allows(&self, key: u32, addr: u64, len: u64, access: u32) -> bool {
        let region = &self.regions[key as usize % REGIONS];
        let is_it = || key != 0 && region.key.load(Ordering::Acquire) == key;
        let (begin, size) = (region.addr.load(Ordering::Acquire), region.len.load(Ordering::Acquire));
        let is_inside = addr >= begin && addr - begin <= size && size - (addr - begin) >= len;
        // The key last: it is another one when the place was taken again meanwhile.
        is_it() && is_inside && region.access.load(Ordering::Acquire) & access == access && is_it()
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

/// Something that a peer did.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ArrivalRecord {
    /// Of the receive that it took.
    pub(crate) id: u64,
    pub(crate) status: u32,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) kind: ReceivedKind,
    pub(crate) from: [u8; 16],
    pub(crate) from_queue: u32,
}

/// What kind of thing.
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
    /// Its number, 0 while there is none.
    pub(crate) number: AtomicU32,
    pub(crate) secret: AtomicU32,
    pub(crate) is_unsolicited: AtomicU32,
    /// Receives that were taken, and that were posted.
    taken: AtomicU32,
    posted: AtomicU32,
    /// Arrivals that were polled, and that came.
    polled: AtomicU32,
    came: AtomicU32,
    receives: [UnsafeCell<PostedReceive>; RECEIVES],
    arrivals: [UnsafeCell<ArrivalRecord>; ARRIVALS],
}

// SAFETY: the rings are touched with the lock held only.
unsafe impl Sync for ReceiveQueue {}

impl ReceiveQueue {
    /// Makes an empty one, which nobody finds before its number is stored.
    pub(crate) fn open(&self) {
        self.lock.with(|| {
            for index in [&self.taken, &self.posted, &self.polled, &self.came] {
                index.store(0, Ordering::Release);
            }
        });
    }

    /// Nobody finds it any more, and nothing of what was delivered is under way.
    pub(crate) fn close(&self) {
        self.lock.with(|| self.number.store(0, Ordering::Release));
    }

    /// Whether it is that of the pair `number` with this `secret`.
    pub(crate) fn is(&self, number: u32, secret: u32) -> bool {
        self.number.load(Ordering::Acquire) == number && self.secret.load(Ordering::Acquire) == secret
    }

    /// Posts a receive; whether there was room.
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

    /// The receive that is next; it is not taken by that.
    pub(crate) fn next(&self) -> Option<PostedReceive> {
        let (taken, posted) = (self.taken.load(Ordering::Acquire), self.posted.load(Ordering::Acquire));
        // SAFETY: the caller is in `deliver`, with the lock held.
        (taken != posted).then(|| unsafe { *self.receives[taken as usize % RECEIVES].get() })
    }

    /// With the queue locked, and room for an arrival: what `act` makes of the next receive. It says
    /// whether that was used up, and what arrived.
    pub(crate) fn deliver<T>(
        &self,
        act: impl FnOnce(Option<PostedReceive>) -> (bool, Option<ArrivalRecord>, T),
    ) -> Option<T> {
        self.lock.with(|| {
            let (polled, came) = (self.polled.load(Ordering::Acquire), self.came.load(Ordering::Acquire));
            if came.wrapping_sub(polled) as usize >= ARRIVALS {
                return None;
            }
            let (is_taken, arrival, result) = act(self.next());
            if is_taken {
                let taken = self.taken.load(Ordering::Acquire);
                self.taken.store(taken.wrapping_add(1), Ordering::Release);
            }
            if let Some(arrival) = arrival {
                // SAFETY: the lock is held.
                unsafe { *self.arrivals[came as usize % ARRIVALS].get() = arrival };
                self.came.store(came.wrapping_add(1), Ordering::Release);
            }
            Some(result)
        })
    }

    /// The oldest arrival.
    pub(crate) fn arrived(&self) -> Option<ArrivalRecord> {
        if self.polled.load(Ordering::Acquire) == self.came.load(Ordering::Acquire) {
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

/// Maps the page in `file`, which is made as long as it must be.
pub(crate) fn map(file: &File) -> Result<*mut ProcessPage> {
    let size = size_of::<ProcessPage>();
    // Sparse: what nobody touches takes no memory.
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

/// Takes a mapping away again.
///
/// # Safety
/// It is one of [`map`]'s, and nobody uses it any more.
pub(crate) unsafe fn unmap(page: *mut ProcessPage) {
    // SAFETY: by the caller.
    unsafe { libc::munmap(page.cast(), size_of::<ProcessPage>()) };
}

/// A robust, process-shared pthread mutex. Zeroed memory is none yet: [`init`](Lock::init) first.
#[repr(C)]
pub(crate) struct Lock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: that is what it is for.
unsafe impl Sync for Lock {}

impl Lock {
    /// Makes the lock, which nobody uses yet.
    pub(crate) fn init(&self) {
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        // SAFETY: the attributes are initialised by the first call, and destroyed last; the mutex is
        // in memory that all its users share.
        unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr());
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(self.0.get(), attributes.as_ptr());
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
        }
    }

    /// Waits for who holds it now, but no longer than a second: one that is stopped is not waited for.
    pub(crate) fn pass(&self) {
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

    /// Runs `act` while no other process or thread does. A holder that died left rings whose
    /// indices are moved last: at worst what it was about to add is not there.
    pub(crate) fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        // SAFETY: initialised when the page was made; unlocked by the thread that locked.
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

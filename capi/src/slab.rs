//! Objects behind numbers. A number of an object that was released is never valid again.
//!
//! A handle has the kind of its object (6 bits), the generation of its slot (34 bits), and the slot's index (24 bits). Each
//! slot has one atomic word: its generation, whether it is live, and the number of guards. So looking an object up is one
//! compare-and-exchange, and no thread waits for another. A slot that has used up its generations is not used again.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

use crate::abi::*;
use crate::failure::Failure;
use crate::fork::{forks, watch};

const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 34;
const MAX_GENERATION: u64 = (1 << GENERATION_BITS) - 1;
/// The most objects of a kind.
const MAX_SLOTS: u32 = 1 << INDEX_BITS;

/// In a slot's word: the guards, then this bit, then the generation.
const LIVE: u64 = 1 << 29;
const GUARDS: u64 = LIVE - 1;
const GENERATION_SHIFT: u32 = 30;

/// The slots of the first segment; each further one has twice as many.
const FIRST: u32 = 64;
const SEGMENTS: usize = (INDEX_BITS - FIRST.ilog2() + 1) as usize;

/// The objects of one kind.
pub struct Slab<T: 'static> {
    kind: u64,
    /// The name of the kind, with its article.
    name: &'static str,
    segments: [AtomicPtr<Slot<T>>; SEGMENTS],
    /// The free slots, as a stack: a number that grows with each change, and the index of the first slot plus one.
    free: AtomicU64,
    /// The slots that were used at least once.
    used: AtomicU32,
}

struct Slot<T> {
    word: AtomicU64,
    /// In the stack of free slots: the index of the next one plus one.
    next: AtomicU32,
    /// The forks that lay behind the process that made the object.
    forks: AtomicU32,
    index: u32,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a value is written by the thread that has taken its slot off the stack, read through guards, and taken by the
// thread that makes the slot's word neither live nor guarded. The word's atomic changes order these.
unsafe impl<T: Send + Sync> Sync for Slab<T> {}

/// An object that stays while this lives, even if its handle is released meanwhile.
pub struct Guard<T: 'static> {
    slab: &'static Slab<T>,
    slot: &'static Slot<T>,
}

impl<T: Send + Sync> Slab<T> {
    /// A slab for objects of a kind, 1 to 63. `name` is for errors: "a region".
    pub const fn new(kind: u8, name: &'static str) -> Self {
        assert!(kind > 0 && kind < 64);
        Self {
            kind: kind as u64,
            name,
            segments: [const { AtomicPtr::new(ptr::null_mut()) }; SEGMENTS],
            free: AtomicU64::new(0),
            used: AtomicU32::new(0),
        }
    }

    /// Keeps an object. Returns its handle.
    ///
    /// # Errors
    /// `MR_ERROR_EXHAUSTED` if there are 2^24 objects of this kind.
    pub fn insert(&'static self, value: T) -> Result<u64, Failure> {
        let Some(index) = self.pop().or_else(|| self.fresh()) else {
            let why = format!("there are {MAX_SLOTS} objects of this kind: {}; release some", self.name);
            return Err(Failure::new(MR_ERROR_EXHAUSTED, why));
        };
        let slot = self.slot(index).ok_or_else(|| self.unknown("its slot is missing"))?;
        // SAFETY: the slot is neither live nor free, so only this thread uses it.
        unsafe { (*slot.value.get()).write(value) };
        slot.forks.store(forks(), Relaxed);
        let generation = slot.word.load(Relaxed) >> GENERATION_SHIFT;
        slot.word.store(generation << GENERATION_SHIFT | LIVE, Release);
        Ok(self.kind << (INDEX_BITS + GENERATION_BITS) | generation << INDEX_BITS | u64::from(index))
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// `MR_ERROR_HANDLE`, `MR_ERROR_FORKED`.
    #[inline]
    pub fn find(&'static self, handle: u64) -> Result<Guard<T>, Failure> {
        self.guard(handle, LIVE)
    }

    /// Releases a handle. The object is dropped with the last guard.
    ///
    /// # Errors
    /// As [`Slab::find`].
    #[inline]
    pub fn take(&'static self, handle: u64) -> Result<Guard<T>, Failure> {
        self.guard(handle, 0)
    }

    /// Adds a guard, and leaves the slot live or not.
    #[inline]
    fn guard(&'static self, handle: u64, live: u64) -> Result<Guard<T>, Failure> {
        let index = handle as u32 & (MAX_SLOTS - 1);
        let slot = match handle >> (INDEX_BITS + GENERATION_BITS) == self.kind {
            true => self.slot(index),
            false => None,
        };
        let Some(slot) = slot else { return Err(self.wrong(handle)) };
        let generation = handle >> INDEX_BITS & MAX_GENERATION;
        let mut word = slot.word.load(Relaxed);
        loop {
            if word & !GUARDS != generation << GENERATION_SHIFT | LIVE {
                return Err(self.wrong(handle));
            }
            if slot.forks.load(Relaxed) != forks() {
                return Err(forked(self.name));
            }
            if word & GUARDS == GUARDS {
                return Err(Failure::new(MR_ERROR_BUSY, "too many calls use this object at once"));
            }
            let guarded = (word & !LIVE | live) + 1;
            match slot.word.compare_exchange_weak(word, guarded, Acquire, Relaxed) {
                Ok(_) => return Ok(Guard { slab: self, slot }),
                Err(now) => word = now,
            }
        }
    }

    /// The slot with this index, if it was ever used.
    #[inline]
    fn slot(&self, index: u32) -> Option<&'static Slot<T>> {
        let (segment, offset) = place(index);
        let slots = self.segments[segment].load(Acquire);
        // SAFETY: a segment that is there has `FIRST << segment` slots, which are never freed.
        (!slots.is_null()).then(|| unsafe { &*slots.add(offset) })
    }

    /// An index that was never used.
    #[cold]
    fn fresh(&self) -> Option<u32> {
        watch();
        let index =
            self.used.fetch_update(Relaxed, Relaxed, |used| (used < MAX_SLOTS).then_some(used + 1)).ok()?;
        let (segment, _) = place(index);
        if self.segments[segment].load(Acquire).is_null() {
            let slots: Box<[Slot<T>]> =
                (0..FIRST << segment).map(|offset| Slot::new((FIRST << segment) - FIRST + offset)).collect();
            let slots = Box::into_raw(slots);
            let first = slots.cast::<Slot<T>>();
            if self.segments[segment].compare_exchange(ptr::null_mut(), first, AcqRel, Acquire).is_err() {
                // SAFETY: another thread was faster, and this segment is known here alone.
                drop(unsafe { Box::from_raw(slots) });
            }
        }
        Some(index)
    }

    #[inline]
    fn pop(&self) -> Option<u32> {
        let mut head = self.free.load(Acquire);
        loop {
            let index = (head as u32).checked_sub(1)?;
            let next = self.slot(index)?.next.load(Relaxed);
            match self.free.compare_exchange_weak(head, follow(head, next), Acquire, Acquire) {
                Ok(_) => return Some(index),
                Err(now) => head = now,
            }
        }
    }

    #[cold]
    fn wrong(&self, handle: u64) -> Failure {
        if handle == 0 {
            return self.unknown("the handle is 0");
        }
        match crate::handles::name_of_kind(handle >> (INDEX_BITS + GENERATION_BITS)) {
            Some(name) if name == self.name => self.unknown("the handle was released"),
            Some(name) => self.unknown(&format!("this is the handle of {name}")),
            None => self.unknown("the number is no handle"),
        }
    }

    #[cold]
    fn unknown(&self, why: &str) -> Failure {
        Failure::new(MR_ERROR_HANDLE, format!("{why}; {} is needed", self.name))
    }
}

impl<T> Slab<T> {
    /// The name of the kind.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Puts a slot on the stack of free slots.
    #[inline]
    fn push(&self, slot: &Slot<T>) {
        let mut head = self.free.load(Relaxed);
        loop {
            slot.next.store(head as u32, Relaxed);
            match self.free.compare_exchange_weak(head, follow(head, slot.index + 1), Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// The stack's word after `head`, with another first slot. The number above it makes a change visible that ends with
/// the same first slot.
fn follow(head: u64, first: u32) -> u64 {
    (head >> 32).wrapping_add(1) << 32 | u64::from(first)
}

/// The segment of an index, and its offset there.
#[inline]
fn place(index: u32) -> (usize, usize) {
    let shifted = index + FIRST;
    let segment = shifted.ilog2() - FIRST.ilog2();
    (segment as usize, (shifted - (FIRST << segment)) as usize)
}

#[cold]
fn forked(name: &str) -> Failure {
    let why = format!(
        "this handle of {name} is from before a fork, and its threads run in the parent only; open a fabric in the \
         child, or start processes by posix_spawn()"
    );
    Failure::new(MR_ERROR_FORKED, why)
}

impl<T> Slot<T> {
    fn new(index: u32) -> Self {
        Self {
            word: AtomicU64::new(0),
            next: AtomicU32::new(0),
            forks: AtomicU32::new(0),
            index,
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }
}

impl<T> Deref for Guard<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is counted in the slot's word, so nobody takes the value.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T> Drop for Guard<T> {
    #[inline]
    fn drop(&mut self) {
        let before = self.slot.word.fetch_sub(1, AcqRel);
        if before & (GUARDS | LIVE) != 1 {
            return;
        }
        // SAFETY: the slot is neither live nor guarded: this thread alone has the value, and takes it once.
        let value = unsafe { (*self.slot.value.get()).assume_init_read() };
        let generation = before >> GENERATION_SHIFT;
        if generation < MAX_GENERATION {
            self.slot.word.store((generation + 1) << GENERATION_SHIFT, Relaxed);
            self.slab.push(self.slot);
        }
        drop(value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn handles_are_never_valid_twice() {
        static SLAB: Slab<Arc<()>> = Slab::new(1, "a test");
        let value = Arc::new(());
        let first = SLAB.insert(value.clone()).unwrap();
        let guard = SLAB.find(first).unwrap();
        drop(SLAB.take(first).unwrap());
        assert_eq!(Arc::strong_count(&guard), 2, "the guard keeps the value");
        assert_eq!(SLAB.find(first).err().map(|why| why.status()), Some(MR_ERROR_HANDLE));
        drop(guard);
        assert_eq!(Arc::strong_count(&value), 1);
        let second = SLAB.insert(value.clone()).unwrap();
        assert_ne!(first, second);
        assert!(SLAB.take(first).is_err() && SLAB.find(second).is_ok());
        for wrong in [0, 1, second ^ 1 << 63, second + 1, u64::MAX] {
            assert_eq!(SLAB.find(wrong).err().map(|why| why.status()), Some(MR_ERROR_HANDLE), "{wrong:#x}");
        }
    }

    #[test]
    fn a_slot_without_generations_is_not_used_again() {
        static SLAB: Slab<u8> = Slab::new(1, "a test");
        let first = SLAB.insert(1).unwrap();
        let slot = SLAB.slot(0).unwrap();
        slot.word.store(MAX_GENERATION << GENERATION_SHIFT | LIVE, Relaxed);
        drop(SLAB.take(first | MAX_GENERATION << INDEX_BITS).unwrap());
        let next = SLAB.insert(2).unwrap();
        assert_eq!((next as u32 & (MAX_SLOTS - 1), *SLAB.find(next).unwrap()), (1, 2));
    }

    #[test]
    fn places_cover_every_index_once() {
        let mut next = (0_usize, 0_usize);
        for index in 0..FIRST * 40 {
            assert_eq!(place(index), next);
            assert_eq!((FIRST << next.0) - FIRST + next.1 as u32, index);
            next.1 += 1;
            if next.1 == (FIRST as usize) << next.0 {
                next = (next.0 + 1, 0);
            }
        }
        assert_eq!(place(MAX_SLOTS - 1).0, SEGMENTS - 1);
    }

    /// Threads insert, share, find and release handles at once; each value is dropped once, and none is seen later.
    #[test]
    fn threads_share_handles() {
        static SLAB: Slab<Counted> = Slab::new(1, "a test");
        static ALIVE: AtomicUsize = AtomicUsize::new(0);
        static SHARED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
        struct Counted(u64);
        impl Drop for Counted {
            fn drop(&mut self) {
                assert_eq!(self.0 >> 32, 7, "dropped once");
                self.0 = 0;
                ALIVE.fetch_sub(1, Relaxed);
            }
        }
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|threads| {
            for thread in 0..4 {
                threads.spawn(move || {
                    for round in 0..rounds {
                        ALIVE.fetch_add(1, Relaxed);
                        let mine = SLAB.insert(Counted(7 << 32 | round)).unwrap();
                        let theirs = SHARED[(thread + round as usize) % 4].swap(mine, AcqRel);
                        if let Ok(found) = SLAB.find(theirs) {
                            assert_eq!(found.0 >> 32, 7);
                        }
                        let taken = SLAB.take(theirs);
                        assert_eq!(taken.is_ok(), theirs != 0, "whoever has swapped it out releases it");
                    }
                });
            }
        });
        for shared in &SHARED {
            drop(SLAB.take(shared.swap(0, Relaxed)).unwrap());
        }
        assert_eq!(ALIVE.load(Relaxed), 0);
    }
}

//! The steady state allocates nothing: counted, over null devices and over loopback.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use benches::list_load::ListLoad;
use benches::{Driven, FabricPair, LIMIT, shuffled};
use transport_core::{Pages, WriteOptions};

/// The system's allocator, counting what this thread asks of it.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's; the count touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no count any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PAGES: u32 = 512;
const PAGE: usize = 4096;

/// Allocations of `rounds` runs of `post`, after as many that warm everything up.
fn allocations(rounds: usize, mut post: impl FnMut()) -> u64 {
    (0..rounds).for_each(|_| post());
    let before = ALLOCATIONS.get();
    (0..rounds).for_each(|_| post());
    ALLOCATIONS.get() - before
}

#[test]
fn prepared_writes_allocate_nothing() {
    let bytes = PAGES as usize * PAGE;
    for pair in [FabricPair::null(Driven::ByCaller, 4, bytes), FabricPair::open(Driven::ByCaller, bytes)] {
        let pair = pair.expect("devices open");
        let (from, to) = (Pages::new(shuffled(PAGES, 1)), Pages::new(shuffled(PAGES, 2)));
        let options = WriteOptions::new();
        let prepared = pair.peer.prepare_write_pages(&pair.src, &from, &pair.dst, &to, PAGE, &options);
        let prepared = prepared.expect("prepared");
        let post = || assert_eq!(prepared.post().unwrap().wait(LIMIT).unwrap().bytes, bytes as u64);
        assert_eq!(allocations(100, post), 0);
    }
}

#[test]
fn prepared_lists_allocate_nothing() {
    for pair in [FabricPair::null(Driven::ByCaller, 4, PAGE), FabricPair::open(Driven::ByCaller, PAGE)] {
        let pair = pair.expect("devices open");
        let load = ListLoad::new(&pair, 16, PAGES).expect("lists");
        let options = WriteOptions::new();
        let list = pair.peer.prepare_write_list(&load.local, &load.from, &load.remote, &load.to, &options);
        let list = list.expect("prepared");
        let post = || assert_eq!(list.post().unwrap().wait(LIMIT).unwrap().bytes, list.bytes());
        assert_eq!(allocations(100, post), 0);
    }
}

#[test]
fn writes_in_the_calling_thread_allocate_nothing() {
    let pair = FabricPair::open(Driven::ByCaller, PAGE).expect("loopback opens");
    assert_eq!(allocations(100, || pair.write(0, PAGE).expect("write")), 0);
}

#[test]
fn the_count_counts() {
    assert!(allocations(1, || drop(std::hint::black_box(Box::new(1)))) > 0);
}

//! Memory of dropped regions lives until libfabric can write to it no more.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use multirail_spi::{
    Access, Batch, Completions, Event, HostBuffer, Memory, MemoryRegion, PeerSlot, WorkKind, WorkRequest,
    copy::CopyStrategy,
};
use side::{LIMIT, Side};

/// More than sockets take in.
const LARGE: usize = 64 << 20;

/// A region of one side.
struct Target {
    memory: Arc<HostBuffer>,
    region: Option<Arc<dyn MemoryRegion>>,
}

impl Target {
    fn of(side: &Side, len: usize) -> Self {
        let memory = Arc::new(HostBuffer::new(len).unwrap());
        // SAFETY: nobody holds references into the buffer.
        let region = unsafe { side.domain.register(Arc::clone(&memory) as _, Access::REMOTE_WRITE) };
        Self { memory, region: Some(region.unwrap()) }
    }

    fn byte(&self, place: usize) -> u8 {
        assert!(place < self.memory.len());
        // SAFETY: allocated for as long as `self` lives. What peers write is looked at with an atomic load.
        unsafe { AtomicU8::from_ptr(self.memory.as_ptr().add(place)) }.load(Ordering::Relaxed)
    }

    /// Whether the backend still has the memory.
    fn is_retained(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }
}

/// What both sides told.
#[derive(Default)]
struct Told {
    moved: usize,
    ended: u64,
}

fn poll(side: &mut Side, told: &mut Told) {
    let mut completions = Completions::with_room(64);
    side.endpoint.poll(&mut completions);
    for event in completions.as_slice() {
        match event {
            Event::Done { count, .. } => told.ended += u64::from(*count),
            Event::Failed { .. } | Event::FailedUnconfirmed { .. } => told.ended += 1,
            Event::EndpointChanged => told.moved += 1,
            _ => {}
        }
    }
}

fn until(what: &str, mut step: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !step() {
        assert!(begun.elapsed() < LIMIT, "{what}");
    }
}

/// A writer, connected to a target.
struct Scene {
    target: Side,
    writer: Side,
    to_writer: PeerSlot,
    to_target: PeerSlot,
    source: Target,
    told: Told,
}

impl Scene {
    fn open() -> Option<Self> {
        let (target, writer) = (Side::open()?, Side::open()?);
        let (to_writer, to_target) = target.meet(&writer);
        let source = Target::of(&writer, LARGE);
        // SAFETY: allocated and so long; nobody else uses it yet.
        unsafe { std::ptr::write_bytes(source.memory.as_ptr(), 7, LARGE) };
        Some(Self { target, writer, to_writer, to_target, source, told: Told::default() })
    }

    /// Begins a write over all of `into`.
    fn begin(&mut self, into: &Target) {
        let key = into.region.as_ref().unwrap().key();
        let remote = self.writer.domain.import(self.to_target, &key, LIMIT).unwrap();
        let request = WorkRequest {
            id: 1,
            peer: self.to_target,
            kind: WorkKind::Write,
            local: self.source.memory.as_ptr(),
            lkey: self.source.region.as_ref().unwrap().lkey(),
            len: into.memory.len() as u64,
            remote: remote.base(),
            rkey: remote.rkey(),
            imm: None,
            strategy: CopyStrategy::Plain,
        };
        let batch: Batch = [request].into_iter().collect();
        until("a write is posted", || {
            poll(&mut self.target, &mut self.told);
            poll(&mut self.writer, &mut self.told);
            // SAFETY: the source outlives the endpoint, and an import is numbers.
            unsafe { self.writer.endpoint.post(&batch) }.accepted == 1
        });
    }

    /// Begins a write, and stops it in its middle.
    fn stop_amid(&mut self, into: &Target) {
        self.begin(into);
        until("the first byte", || {
            poll(&mut self.writer, &mut self.told);
            poll(&mut self.target, &mut self.told);
            into.byte(0) == 7
        });
        assert_eq!(into.byte(LARGE - 1), 0, "it is over already");
    }

    /// Both go on, until `ends`: no byte may land in memory that the backend has let go.
    fn go_on(&mut self, into: &Target, what: &str, mut ends: impl FnMut(&Self) -> bool) {
        const STEP: usize = 4096;
        let landed = |into: &Target| (0..LARGE).step_by(STEP).filter(|place| into.byte(*place) == 7).count();
        let mut let_go = None;
        until(what, || {
            if let_go.is_none() && !into.is_retained() {
                let_go = Some(landed(into));
            }
            poll(&mut self.writer, &mut self.told);
            poll(&mut self.target, &mut self.told);
            ends(self)
        });
        if let Some(before) = let_go {
            assert_eq!(landed(into), before, "pages that bytes landed in, after the memory was let go");
        }
    }

    fn part(&mut self) {
        self.target.domain.connector().disconnect(self.to_writer);
        self.target.endpoint.abort(self.to_writer);
    }
}

#[test]
fn a_write_that_goes_on_after_its_region_is_dropped() {
    let Some(mut scene) = Scene::open() else { return };
    let mut into = Target::of(&scene.target, LARGE);
    scene.stop_amid(&into);
    into.region = None;
    scene.go_on(&into, "the write ends", |scene| scene.told.ended == 1);
    scene.part();
    scene.go_on(&into, "the memory is let go", |_| !into.is_retained());
}

#[test]
fn a_write_of_a_lost_peer_that_goes_on_after_its_region_is_dropped() {
    for is_dropped_first in [true, false] {
        let Some(mut scene) = Scene::open() else { return };
        let mut into = Target::of(&scene.target, LARGE);
        scene.stop_amid(&into);
        if is_dropped_first {
            into.region = None;
        }
        scene.part();
        if !is_dropped_first {
            // The peer is gone as far as it goes.
            until("the slot is free", || {
                poll(&mut scene.target, &mut scene.told);
                scene.target.domain.connector().prepare().is_ok_and(|(slot, _)| {
                    scene.target.domain.connector().disconnect(slot);
                    slot == scene.to_writer
                })
            });
            into.region = None;
        }
        scene.go_on(&into, "the memory is let go, and the write ends", |scene| {
            !into.is_retained() && scene.told.ended == 1
        });
    }
}

#[test]
fn memory_that_no_peer_can_have_reached_goes_at_once() {
    let Some(mut side) = Side::open() else { return };
    let mut alone = Target::of(&side, 4096);
    alone.region = None;
    assert!(!alone.is_retained(), "nobody was told of the endpoint");
    let Some(other) = Side::open() else { return };
    let (slot, _) = side.meet(&other);
    let mut told = Told::default();
    let mut reached = Target::of(&side, 4096);
    reached.region = None;
    assert!(reached.is_retained());
    side.domain.connector().disconnect(slot);
    until("the memory is let go", || {
        poll(&mut side, &mut told);
        !reached.is_retained()
    });
    let mut later = Target::of(&side, 4096);
    later.region = None;
    assert!(!later.is_retained(), "nobody was told of the next endpoint");
}

#[test]
fn memory_does_not_pile_up_while_a_peer_stays() {
    let Some(mut scene) = Scene::open() else { return };
    let mut dropped = Vec::new();
    while scene.told.moved == 0 {
        assert!(dropped.len() * LARGE <= 512 << 20, "nothing comes of so much memory");
        let mut into = Target::of(&scene.target, LARGE);
        into.region = None;
        dropped.push(into);
        poll(&mut scene.target, &mut scene.told);
        poll(&mut scene.writer, &mut scene.told);
    }
    assert_eq!(dropped.len() * LARGE, 256 << 20);
    // The writer has not been told of the next endpoint, and goes on with the old one.
    let before = Target::of(&scene.target, LARGE);
    scene.begin(&before);
    scene.go_on(&before, "a write over the old endpoint", |scene| scene.told.ended == 1);
    assert!(dropped.iter().all(Target::is_retained));
    let offer = scene.target.domain.connector().offer_again(scene.to_writer).unwrap().unwrap();
    scene.writer.domain.connector().renew(scene.to_target, &offer).unwrap();
    scene.target.domain.connector().renewed(scene.to_writer, &offer).unwrap();
    let after = Target::of(&scene.target, LARGE);
    scene.begin(&after);
    scene.go_on(&after, "a write over the new endpoint", |scene| scene.told.ended == 2);
    assert_eq!((before.byte(LARGE - 1), after.byte(LARGE - 1)), (7, 7));
    scene.go_on(&after, "the memory is let go", |_| !dropped.iter().any(Target::is_retained));
}

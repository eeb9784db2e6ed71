//! What a card may have written out of a reader's sight is flushed before its arrival is told.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use multirail_spi::{Access, Batch, Completions, Event, Fence, HostBuffer, Memory, Result, WorkRequest};
use side::{LIMIT, Side};

/// The host's memory, as if its bytes had to be flushed.
struct Fenced {
    buffer: HostBuffer,
    flushes: Arc<Flushes>,
}

#[derive(Default)]
struct Flushes(AtomicU32);

impl Fence for Flushes {
    fn flush(&self) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

// SAFETY: the buffer's own promises.
unsafe impl Memory for Fenced {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn fence(&self) -> Result<Option<Arc<dyn Fence>>> {
        Ok(Some(Arc::clone(&self.flushes) as _))
    }
}

/// Polls a side; whether the imm was among what that told.
fn has_arrived(side: &mut Side, imm: u32) -> bool {
    let mut completions = Completions::with_room(16);
    side.endpoint.poll(&mut completions);
    let is_it = |event: &Event| matches!(event, Event::Imm { imm: its, .. } if *its == imm);
    completions.as_slice().iter().any(is_it)
}

#[test]
fn flushed_before_they_are_told() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.meet(&there);
    let far = there.import_for(&here, peer);
    let write = |here: &mut Side, there: &mut Side, imm| {
        let request = WorkRequest { imm: Some(imm), len: 4096, ..here.request(peer, &*far, 0) };
        let batch: Batch = [request].into_iter().collect();
        let begun = Instant::now();
        // SAFETY: memory and import outlive the endpoint.
        while unsafe { here.endpoint.post(&batch) }.accepted == 0 {
            assert!(begun.elapsed() < LIMIT, "no room");
            let _ = has_arrived(here, imm) || has_arrived(there, imm);
        }
        while !has_arrived(there, imm) {
            assert!(begun.elapsed() < LIMIT, "no imm");
            let _ = has_arrived(here, imm);
        }
    };
    let flushes = Arc::new(Flushes::default());
    let count = || flushes.0.load(Ordering::Relaxed);
    write(&mut here, &mut there, 1);
    let fenced = Fenced { buffer: HostBuffer::new(4096).unwrap(), flushes: Arc::clone(&flushes) };
    // SAFETY: nobody holds references into the buffer.
    let _region = unsafe { there.domain.register(Arc::new(fenced), Access::all()) }.unwrap();
    assert_eq!(count(), 0, "no arrival since it is there");
    write(&mut here, &mut there, 2);
    assert!(count() > 0);
}

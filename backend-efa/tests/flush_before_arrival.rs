//! Before the endpoint reports an arrival, it flushes the bytes that the device may have written invisibly to readers.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use multirail_spi::{Access, Batch, Completions, Event, Flush, HostBuffer, Memory, Result, WorkRequest};
use side::{LIMIT, Side};

/// Host memory that claims to need a flush.
struct FlushedMemory {
    buffer: HostBuffer,
    flushes: Arc<FlushCount>,
}

/// Counts the flushes.
#[derive(Default)]
struct FlushCount(AtomicU32);

impl Flush for FlushCount {
    fn flush(&self) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

// SAFETY: the buffer keeps this contract.
unsafe impl Memory for FlushedMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn needed_flush(&self) -> Result<Option<Arc<dyn Flush>>> {
        Ok(Some(Arc::clone(&self.flushes) as _))
    }
}

/// Polls a side. Returns whether the poll reported the imm.
fn has_arrived(side: &mut Side, imm: u32) -> bool {
    let mut completions = Completions::with_room(16);
    side.endpoint.poll(&mut completions);
    let is_it = |event: &Event| matches!(event, Event::Imm { imm: arrived, .. } if *arrived == imm);
    completions.as_slice().iter().any(is_it)
}

#[test]
fn bytes_are_flushed_before_their_imm_is_reported() {
    let (Some(mut here), Some(mut there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.connect(&there);
    let import = there.import_for(&here, peer);
    let write = |here: &mut Side, there: &mut Side, imm| {
        let request = WorkRequest { imm: Some(imm), len: 4096, ..here.request(peer, &*import, 0) };
        let batch: Batch = [request].into_iter().collect();
        let start = Instant::now();
        // SAFETY: memory and import outlive the endpoint.
        while unsafe { here.endpoint.post(&batch) }.accepted == 0 {
            assert!(start.elapsed() < LIMIT, "no room");
            let _ = has_arrived(here, imm) || has_arrived(there, imm);
        }
        while !has_arrived(there, imm) {
            assert!(start.elapsed() < LIMIT, "no imm");
            let _ = has_arrived(here, imm);
        }
    };
    let flushes = Arc::new(FlushCount::default());
    let count = || flushes.0.load(Ordering::Relaxed);
    write(&mut here, &mut there, 1);
    let memory = FlushedMemory { buffer: HostBuffer::new(4096).unwrap(), flushes: Arc::clone(&flushes) };
    // SAFETY: nobody holds references into the buffer.
    let _region = unsafe { there.domain.register(Arc::new(memory), Access::all()) }.unwrap();
    assert_eq!(count(), 0, "nothing has arrived since the registration");
    write(&mut here, &mut there, 2);
    assert!(count() > 0);
}

//! Plain copies, page-locked memory, and comparing bytes on a GPU. Without a GPU each test is skipped, with a message.

mod gpus;

use std::process::ExitCode;
use std::sync::Arc;

use multirail_cuda::{CudaMemory, Device, PinnedBuffer, PlainCopy, PlainCopyEnd};
use multirail_spi::{ErrorKind, Memory};

const LEN: usize = 3 << 20;

fn devices() -> Vec<Device> {
    Device::all().unwrap()
}

/// Bytes that differ by position and by `salt`.
fn bytes(salt: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at / 251 + at + salt) as u8).collect()
}

fn fill(buffer: &PinnedBuffer, bytes: &[u8]) {
    assert_eq!(buffer.len(), bytes.len());
    // SAFETY: both have the same length, and nobody else has the buffer.
    unsafe { buffer.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn bytes_of(buffer: &PinnedBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    // SAFETY: as above.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(buffer.as_ptr(), bytes.len()) };
    bytes
}

fn from_the_host_over_every_gpu_and_back() {
    let devices = devices();
    for (near, far) in devices.iter().flat_map(|near| devices.iter().map(move |far| (near, far))) {
        let (source, back) = (PinnedBuffer::new(near, LEN).unwrap(), PinnedBuffer::new(far, LEN).unwrap());
        let salt = (near.ordinal() * 7 + far.ordinal()) as usize;
        fill(&source, &bytes(salt));
        let (source, back) = (Arc::new(source), Arc::new(back));
        let gpu = |device| Arc::new(CudaMemory::new(device, LEN).unwrap());
        let (first, second) = (gpu(near), gpu(far));
        for (from, to) in [
            (PlainCopyEnd::from(source), PlainCopyEnd::from(first.clone())),
            (first.into(), second.clone().into()),
            (second.into(), back.clone().into()),
        ] {
            PlainCopy::new(from, to).unwrap().run().unwrap();
        }
        assert_eq!(bytes_of(&back), bytes(salt), "by GPUs {} and {}", near.ordinal(), far.ordinal());
    }
}

fn page_locked_memory_can_be_shared_and_locked_again() {
    for device in devices().iter().take(1) {
        for _ in 0..3 {
            let buffer = PinnedBuffer::new(device, 5001).unwrap();
            assert_eq!((buffer.len(), buffer.device().ordinal()), (5001, device.ordinal()));
            assert!(buffer.shared_file().is_some());
        }
        let refused = PinnedBuffer::new(device, 0).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
    }
}

fn different_lengths_and_overlaps_are_refused() {
    for device in devices().iter().take(1) {
        let gpu = |len| Arc::new(CudaMemory::new(device, len).unwrap());
        let refused = PlainCopy::new(gpu(100), gpu(101)).err().unwrap();
        assert!(refused.context().contains("one length"), "{refused}");
        let both = gpu(100);
        let refused = PlainCopy::new(both.clone(), both).err().unwrap();
        assert!(refused.context().contains("overlap"), "{refused}");
    }
}

fn only_whole_pages_are_compared() {
    let device = Device::open(0).unwrap();
    let memory = CudaMemory::new(&device, 100).unwrap();
    for (size, pages) in [(0, 1), (100, 0), (100, 2), (33, 3), (u64::MAX, 2)] {
        let refused = memory.first_mismatch(size, &vec![0; pages]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
    }
    // The first output of SplitMix64 for 1234567, as its authors published it. Zeros follow.
    memory.copy_in(0, &6_457_827_717_110_365_317_u64.to_le_bytes()).unwrap();
    assert_eq!(memory.first_mismatch(100, &[1_234_567]).unwrap(), Some(8));
}

fn main() -> ExitCode {
    conformance::run_or_skip(
        gpus::missing(),
        conformance::tests![
            from_the_host_over_every_gpu_and_back,
            page_locked_memory_can_be_shared_and_locked_again,
            different_lengths_and_overlaps_are_refused,
            only_whole_pages_are_compared
        ],
    )
}

//! A GPU compares bytes. Without a GPU the test is skipped, with a message.

mod gpus;

use std::process::ExitCode;

use multirail_cuda::{CudaMemory, Device};
use multirail_spi::ErrorKind;

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
    conformance::run_or_skip(gpus::missing(), conformance::tests![only_whole_pages_are_compared])
}

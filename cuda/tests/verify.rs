//! What a GPU has, compared by it; elsewhere that there is no GPU is said.

use cuda::{CudaMemory, Device};
use transport_core::ErrorKind;

#[test]
fn only_whole_pages_are_compared() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(why) => {
            assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
            return println!("skipped: {why}");
        }
    };
    let memory = CudaMemory::new(&device, 100).unwrap();
    for (size, pages) in [(0, 1), (100, 0), (100, 2), (33, 3), (u64::MAX, 2)] {
        let refused = memory.first_wrong(size, &vec![0; pages]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
    }
    // The first output of SplitMix64 for 1234567, as published with it, and zeros after it.
    memory.copy_in(0, &6_457_827_717_110_365_317_u64.to_le_bytes()).unwrap();
    assert_eq!(memory.first_wrong(100, &[1_234_567]).unwrap(), Some(8));
}

//! A stage in shared memory that a peer writes as it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| backend_loopback::fuzz::stage(bytes));

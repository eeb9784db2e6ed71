//! A staging buffer in shared memory, into which a peer writes any value.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| backend_loopback::fuzz::staging_buffer(bytes));

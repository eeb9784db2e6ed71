//! A message ring in shared memory, into which a peer writes any value.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| backend_loopback::fuzz::message_ring(bytes));

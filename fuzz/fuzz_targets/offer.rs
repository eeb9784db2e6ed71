//! A loopback peer's offer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| backend_loopback::fuzz::offer(bytes));

//! The first control frame, from a stranger.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| transport_core::fuzz::hello(bytes));

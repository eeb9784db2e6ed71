//! Every later control frame.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| transport_core::fuzz::frame(bytes));

//! The framing of a byte stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| transport_core::fuzz::stream(bytes));

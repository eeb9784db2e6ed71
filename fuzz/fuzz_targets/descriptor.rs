//! A region's descriptor.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| transport_core::fuzz::descriptor(bytes));

//! Packets of the socket that hands memory out.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| backend_loopback::fuzz::packet(bytes));

//! A recording of the flight recorder, read, printed and converted.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| multirail_cli::fuzz::trace(bytes));

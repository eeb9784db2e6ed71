//! What send and serve say to each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| multirail_cli::fuzz::files(bytes));

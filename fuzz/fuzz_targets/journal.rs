//! The journal of a partial file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| multirail_cli::fuzz::journal(bytes));

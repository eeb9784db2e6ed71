//! What the two sides of a bench say to each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| multirail_cli::fuzz::bench(bytes));

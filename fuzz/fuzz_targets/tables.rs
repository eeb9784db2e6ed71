//! Tables of a tree that send offers, and the paths in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| multirail_cli::fuzz::tables(bytes));

//! The parsers of bytes that are not trusted, for the fuzzer alone (`cfg(fuzzing)`).

use super::bench::protocol as bench;
use super::files::{FileName, ToSender, ToServer};
use super::wire::decode;

/// What `send` and `serve` say to each other.
pub fn files(bytes: &[u8]) {
    if let Ok(ToSender::Welcome { layout, .. }) = decode::<ToSender>(bytes)
        && layout.is_sound()
    {
        for sequence in [0, 1, u64::MAX] {
            assert!(layout.offset(sequence) as u64 + u64::from(layout.window) <= layout.total());
        }
    }
    if let Ok(ToServer::Begin { name, .. }) = decode::<ToServer>(bytes)
        && let Ok(name) = FileName::new(&name)
    {
        assert!(!name.as_bytes().contains(&b'/') && name.as_bytes() != b"..");
        let _ = name.to_string();
    }
}

/// What the two sides of a bench say to each other.
pub fn bench(bytes: &[u8]) {
    let _ = decode::<bench::ToServer>(bytes);
    let _ = decode::<bench::ToClient>(bytes);
}

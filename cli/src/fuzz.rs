//! The parsers of untrusted bytes, for the fuzzer (`cfg(fuzzing)`).

use std::fs::File;
use std::io::Write;

use crate::files::{
    ReceiverMessage, SenderMessage, TreePath, WindowLayout, check_link, decode_entries, decode_items,
};
use multirail::Recording;

use crate::bench::protocol as bench;
use crate::serve::journal::Journal;
use crate::trace::{chrome, timeline};
use crate::wire::decode;

/// Parses messages of `send` and `serve`.
pub fn files(bytes: &[u8]) {
    let _ = SenderMessage::decode(bytes);
    if let Ok(ReceiverMessage::Welcome { layout, .. }) = ReceiverMessage::decode(bytes) {
        check_layout(&layout);
    }
}

/// Parses tables of entries and items, which a peer writes into a window.
pub fn tables(bytes: &[u8]) {
    for entry in decode_entries(bytes).unwrap_or_default() {
        check_path(entry.path.as_bytes());
        assert!(entry.data() <= entry.size());
    }
    let _ = decode_items(bytes);
    if let Ok(path) = TreePath::new(bytes) {
        check_path(path.as_bytes());
        assert_eq!(path.names().collect::<Vec<_>>().join(&b'/'), path.as_bytes());
        // An accepted target goes up by fewer directories than its link is deep.
        if let Ok(link) = TreePath::new(b"a/b") {
            let _ = check_link(&link, bytes);
        }
    }
}

/// Parses the journal of a partial file, which an earlier server or another program wrote.
pub fn journal(bytes: &[u8]) {
    let file = rustix::fs::memfd_create("journal", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let mut file = File::from(file);
    file.write_all(bytes).expect("a memfd takes bytes");
    let Some(path) = Journal::path(&file) else { return };
    check_path(path.as_bytes());
    let journal = Journal::open(file, &path).expect("a memfd can be read");
    let journal = journal.expect("it has the path it says");
    for index in 0..journal.count() {
        let _ = journal.piece(index).expect("what is counted is there");
    }
    journal.bytes(|piece| piece.len.into()).expect("what is counted is there");
    journal.end().expect("what is counted is there");
}

/// Parses, prints and converts a recording.
pub fn trace(bytes: &[u8]) {
    if let Ok(recording) = Recording::from_bytes(bytes) {
        let _ = timeline(&recording);
        let text = chrome::trace(&recording).to_string();
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON");
    }
}

/// Parses messages of the two sides of a bench.
pub fn bench(bytes: &[u8]) {
    if let Ok(bench::ClientMessage::Prepare(load)) = decode::<bench::ClientMessage>(bytes) {
        let _ = load.check();
    }
    let _ = decode::<bench::ServerMessage>(bytes);
}

fn check_layout(layout: &WindowLayout) {
    if layout.is_valid() {
        for sequence in [0, 1, u64::MAX] {
            assert!((layout.slot(sequence) as u64) < layout.total());
            assert!((layout.table_at(sequence) as u64) < layout.total());
        }
    }
}

fn check_path(path: &[u8]) {
    let names: Vec<_> = path.split(|byte| *byte == b'/').collect();
    assert!(!names.iter().any(|name| matches!(*name, b"" | b"." | b"..") || name.contains(&0)));
}

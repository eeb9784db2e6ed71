//! A hand-written sender that breaks the protocol. `multirail serve` refuses it and goes on.
#![cfg(target_os = "linux")]

mod process;
mod tree;
mod wire;

use std::io::Write;

use multirail_cli::files::{
    EntryKind, FilePiece, OfferedEntry, PieceHash, ReceiverMessage, SenderMessage, TableItem, TreePath,
};
use process::{LIMIT, RunningCommand, run};
use rustix::process::Signal;
use tempfile::TempDir;
use wire::{Hostile, MTIME, file, is_untouched, on_disk, raw, server, text};

#[test]
fn unexpected_messages_and_items() {
    let (root, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (into, server, address) = server(&root);
    // Malformed bytes, a message with extra bytes, and an unknown message.
    let mut tail = postcard::to_stdvec(&SenderMessage::Bye).unwrap();
    tail.push(0);
    for bytes in [&[0xff; 40][..], &tail, &[77]] {
        let hostile = Hostile::connect(&address);
        assert!(hostile.say_bytes(bytes));
        hostile.ends_refused("protocol");
        server.await_error("protocol");
    }
    // Windows that are not free, and tables that are too long or malformed.
    for message in [
        SenderMessage::Offer { sequence: 1, table: 1 },
        SenderMessage::Offer { sequence: 0, table: u32::MAX },
        SenderMessage::Filled { sequence: 0, table: 1, data: 1 },
        SenderMessage::Commit { next: 0, entries: 0 },
        SenderMessage::Hello { total: 0, resume: true },
        SenderMessage::Abandon("over\x1b[2J".repeat(900)),
    ] {
        let hostile = Hostile::ready(&address);
        hostile.say(&message);
        hostile.ends_refused("");
        server.await_error("multirail: ");
    }
    let piece = |offset, len| TableItem::Piece(FilePiece { offset, len, hash: [0; 32] });
    let begin = TableItem::Begin { index: 0, keep: 0 };
    let whole = TableItem::Whole { index: 0, hash: blake3::hash(b"x").into() };
    for items in [
        &[piece(0, 1)][..],
        &[TableItem::End],
        &[TableItem::Make { index: 0 }],
        &[TableItem::Same { index: 0 }],
        &[TableItem::Whole { index: 9, hash: [0; 32] }],
        &[TableItem::Whole { index: 0, hash: [7; 32] }],
        &[begin.clone(), begin.clone()],
        &[TableItem::Begin { index: 0, keep: 1 }],
        &[begin.clone(), piece(0, 0)],
        &[begin.clone(), piece(1, 1)],
        &[begin.clone(), piece(u64::MAX, 1)],
        &[begin.clone(), piece(0, 1)],
        // The first of these files is complete and is kept.
        &[whole.clone(), whole.clone()],
    ] {
        let hostile = Hostile::ready(&address);
        hostile.offer(&raw(b"file", file(1)));
        assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
        hostile.fill(items, b"x");
        hostile.ends_refused("file was not stored");
        server.await_error("file was not stored");
    }
    // More bytes than a window has.
    let hostile = Hostile::ready(&address);
    hostile.offer(&raw(b"other", file(2)));
    assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
    hostile.fill(&[TableItem::Whole { index: 0, hash: [0; 32] }], b"x");
    hostile.ends_refused("other was not stored");
    server.await_error("more bytes");
    // More or fewer entries than are complete, and an open file after them.
    let (one, begun) = ([whole], [TableItem::Begin { index: 1, keep: 0 }]);
    for (items, entries) in [(&one, 0), (&one, 3), (&begun, 0), (&begun, 2)] {
        let hostile = Hostile::ready(&address);
        hostile.offer(&[raw(b"more", file(1)), raw(b"less", file(1))].concat());
        assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
        hostile.fill(items, b"x");
        hostile.say(&SenderMessage::Commit { next: 2, entries });
        hostile.ends_refused("unexpected item");
        server.await_error("unexpected item");
        let _ = std::fs::remove_file(into.join("more"));
    }
    // A message that is too long for the server's receives.
    let hostile = Hostile::connect(&address);
    hostile.say_bytes(&[0; 20 << 10]);
    drop(hostile);

    is_untouched(&root);
    let good = from.path().join("good");
    std::fs::write(&good, "content").unwrap();
    let (done, _, said) = run(&["send", text(&good), "--to", &address]);
    assert!(done, "{said}");
    let names = std::fs::read_dir(&into).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.filter(|name| name != ".multirail").collect();
    names.sort();
    assert_eq!(names, ["file", "good"]);
}

#[test]
fn bytes_that_were_not_stored_use_no_quota() {
    let (into, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--max-bytes", "10MiB"]);
    let piece = |offset, len| TableItem::Piece(FilePiece { offset, len, hash: [0; 32] });
    let begin = TableItem::Begin { index: 0, keep: 0 };
    for items in [
        &[begin.clone(), piece(1, 9 << 20)][..],
        &[piece(0, 9 << 20)],
        &[begin.clone(), piece(0, 1)],
        &[TableItem::Whole { index: 0, hash: [7; 32] }],
    ] {
        for _ in 0..2 {
            let hostile = Hostile::ready(&address);
            hostile.offer(&raw(b"file", file(9 << 20)));
            assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
            hostile.fill(items, b"x");
            hostile.ends_refused("file was not stored");
            server.await_error("file was not stored");
        }
    }
    let good = from.path().join("good");
    std::fs::write(&good, vec![1; 9 << 20]).unwrap();
    let (done, _, said) = run(&["send", text(&good), "--to", &address]);
    assert!(done, "{said}");
}

/// Sends `items` under one name after the other until the server's quota is used up. Returns the disk use of its
/// directory then, while the server runs and after it has ended.
fn fill_the_disk(limit: u64, longest: bool, items: &[TableItem], bytes: &[u8]) -> [u64; 2] {
    let into = TempDir::new().unwrap();
    let most = format!("{}KiB", limit >> 10);
    let serve = ["serve", "--into", text(into.path()), "--max-bytes", &most];
    let (mut server, address) = RunningCommand::server(&serve);
    let data: u64 =
        items.iter().map(|item| if let TableItem::Piece(piece) = item { piece.len.into() } else { 0 }).sum();
    for n in 0.. {
        // The server can never store as many names as the limit has blocks.
        assert!(n < limit / 4096, "the server never refuses");
        let name = if longest { vec![format!("{n:0203}"); 20].join("/") } else { n.to_string() };
        let hostile = Hostile::ready(&address);
        hostile.offer(&raw(name.as_bytes(), EntryKind::File { size: 1 << 40, data }));
        match hostile.answer() {
            ReceiverMessage::Actions { .. } => {}
            ReceiverMessage::Refused(reason) => {
                assert!(reason.contains("--max-bytes"), "{reason}");
                break;
            }
            other => panic!("{other:?}"),
        }
        hostile.fill(items, bytes);
        hostile.ends_refused("was not stored");
        server.await_error("was not stored");
        assert!(on_disk(into.path()) <= limit, "{n}: {} bytes on disk", on_disk(into.path()));
    }
    let with = on_disk(into.path());
    // A server that is killed while it writes has counted fewer bytes than it wrote. The next server removes the rest.
    server.signal(Signal::KILL);
    server.ends_within_any(LIMIT);
    for (partial, _) in tree::partials(into.path()).iter().take(2) {
        let file = std::fs::OpenOptions::new().append(true).open(partial).unwrap();
        (&file).write_all(&[1; 1 << 20]).unwrap();
    }
    let (_server, _) = RunningCommand::server(&serve);
    [with, on_disk(into.path())]
}

#[test]
fn the_quota_bounds_what_is_on_disk() {
    let good = |offset, bytes: &[u8]| {
        TableItem::Piece(FilePiece { offset, len: bytes.len() as u32, hash: PieceHash::of(offset, bytes) })
    };
    let begin = TableItem::Begin { index: 0, keep: 0 };
    let limit = 5 << 18;
    // A piece that is kept, and a large invalid piece.
    let large = TableItem::Piece(FilePiece { offset: 1, len: (1 << 20) - 1, hash: [7; 32] });
    let torn = [begin.clone(), good(0, b"x"), large];
    let bytes = vec![b'x'; 1 << 20];
    // Pieces of two bytes in two blocks each. The last item ends the session.
    let two = |n: u64| good(n * 8192 + 4095, b"xx");
    let straddling: Vec<_> = [begin.clone()].into_iter().chain((0..200).map(two)).chain([begin]).collect();
    for (longest, items, bytes) in
        [(false, &torn[..], &bytes[..]), (true, &torn, &bytes), (false, &straddling, &bytes[..400])]
    {
        for taken in fill_the_disk(limit, longest, items, bytes) {
            assert!(taken <= limit, "{taken} bytes on disk, {limit} allowed");
            assert!(taken > limit / 8, "and it is used: {taken}");
        }
    }
}

#[test]
fn a_name_clash_does_not_affect_other_files() {
    let root = TempDir::new().unwrap();
    let (into, server, address) = server(&root);
    let hostile = Hostile::ready(&address);
    hostile.offer(&[raw(b"a", file(1)), raw(b"b", file(1))].concat());
    assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
    std::fs::write(into.join("a"), "taken").unwrap();
    let whole = |index| TableItem::Whole { index, hash: blake3::hash(b"x").into() };
    hostile.fill(&[whole(0), whole(1)], b"xx");
    hostile.ends_refused("a was not stored");
    server.await_error("a was not stored");
    assert_eq!(std::fs::read(into.join("a")).unwrap(), b"taken");
    assert_eq!(std::fs::read(into.join("b")).unwrap(), b"x");
}

#[test]
fn a_file_of_a_dead_sender_is_no_clash_when_it_is_sent_again() {
    for rule in ["refuse", "rename", "skip"] {
        let into = TempDir::new().unwrap();
        let (server, address) =
            RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", rule]);
        let table = [
            raw(b"tree", EntryKind::Directory),
            raw(b"tree/large", EntryKind::File { size: 2 << 20, data: 1 }),
            raw(b"tree/link", EntryKind::Link { target: b"small".to_vec() }),
            raw(b"tree/small", file(1)),
        ]
        .concat();
        let make = |index| TableItem::Make { index };
        let piece = TableItem::Piece(FilePiece { offset: 0, len: 1, hash: PieceHash::of(0, b"x") });
        let small = |byte: &[u8]| TableItem::Whole { index: 3, hash: blake3::hash(byte).into() };
        let items =
            [make(0), TableItem::Begin { index: 1, keep: 0 }, piece, TableItem::End, make(2), small(b"x")];
        // The server decides about both before either has stored bytes. The first is about to die.
        let (dead, again) = (Hostile::ready(&address), Hostile::resuming(&address));
        for sender in [&dead, &again] {
            sender.offer(&table);
            assert!(matches!(sender.answer(), ReceiverMessage::Actions { .. }));
        }
        dead.fill(&items, b"xx");
        dead.say(&SenderMessage::Commit { next: 2, entries: 4 });
        assert_eq!(dead.answer(), ReceiverMessage::Stored);
        again.fill(&items, b"xx");
        again.say(&SenderMessage::Commit { next: 2, entries: 4 });
        assert_eq!(again.answer(), ReceiverMessage::Stored, "{rule}");
        let names: Vec<_> =
            tree::facts(into.path()).into_keys().map(|name| String::from_utf8(name).unwrap()).collect();
        assert_eq!(names, ["tree", "tree/large", "tree/link", "tree/small"], "{rule}");
        assert!(tree::partials(into.path()).is_empty());

        // Other content still clashes.
        let other = Hostile::resuming(&address);
        std::fs::remove_file(into.path().join("tree/small")).unwrap();
        other.offer(&raw(b"tree/small", file(1)));
        assert!(matches!(other.answer(), ReceiverMessage::Actions { .. }));
        std::fs::write(into.path().join("tree/small"), "y").unwrap();
        other.fill(&[TableItem::Whole { index: 0, hash: blake3::hash(b"x").into() }], b"x");
        other.say(&SenderMessage::Commit { next: 2, entries: 1 });
        match rule {
            "refuse" => {
                other.ends_refused("exists");
                server.await_error("exists");
            }
            _ => assert_eq!(other.answer(), ReceiverMessage::Stored),
        }
        assert_eq!(into.path().join("tree/small.1").exists(), rule == "rename");
        assert_eq!(std::fs::read(into.path().join("tree/small")).unwrap(), b"y");
    }
}

#[test]
fn a_correct_hand_written_sender() {
    let root = TempDir::new().unwrap();
    let (into, _server, address) = server(&root);
    let hostile = Hostile::ready(&address);
    let path = TreePath::new(b"name").unwrap();
    let mut table = Vec::new();
    OfferedEntry { path, kind: file(4), mode: 0o640, mtime: MTIME }.encode(&mut table).unwrap();
    hostile.offer(&table);
    assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
    hostile.fill(&[TableItem::Whole { index: 0, hash: blake3::hash(b"good").into() }], b"good");
    hostile.say(&SenderMessage::Commit { next: 2, entries: 1 });
    assert_eq!(hostile.answer(), ReceiverMessage::Stored);
    assert_eq!(std::fs::read(into.join("name")).unwrap(), b"good");
}

#[test]
fn another_protocol_is_refused() {
    let into = TempDir::new().unwrap();
    let (_server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let (done, _, said) = run(&["bench", "client", &address]);
    assert!(!done);
    assert_eq!(said.lines().count(), 1, "{said}");
}

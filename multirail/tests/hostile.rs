//! A sender by hand that breaks the rules of `multirail serve`: refused, and the server
//! goes on.
#![cfg(target_os = "linux")]

mod process;
mod wire;

use multirail::files::{Entry, Item, Piece, ToSender, ToServer, TreePath};
use process::{Running, run};
use tempfile::TempDir;
use wire::{Hostile, MTIME, file, is_untouched, raw, server, text};

#[test]
fn messages_and_items_out_of_turn() {
    let (root, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (into, server, address) = server(&root);
    // Nonsense, a message with a tail, an unknown word.
    let mut tail = postcard::to_stdvec(&ToServer::Bye).unwrap();
    tail.push(0);
    for bytes in [&[0xff; 40][..], &tail, &[77]] {
        let hostile = Hostile::connect(&address);
        assert!(hostile.say_bytes(bytes));
        hostile.ends_refused("protocol");
        server.await_error("protocol");
    }
    // Windows that are not free, and tables that are too long or broken.
    for message in [
        ToServer::Offer { sequence: 1, table: 1 },
        ToServer::Offer { sequence: 0, table: u32::MAX },
        ToServer::Filled { sequence: 0, table: 1, data: 1 },
        ToServer::Commit { next: 0 },
        ToServer::Hello { total: 0, resume: true },
        ToServer::Abandon("over\x1b[2J".repeat(900)),
    ] {
        let hostile = Hostile::ready(&address);
        hostile.say(&message);
        hostile.ends_refused("");
        server.await_error("multirail: ");
    }
    let piece = |offset, len| Item::Piece(Piece { offset, len, hash: [0; 32] });
    let begin = Item::Begin { index: 0, keep: 0 };
    let whole = Item::Whole { index: 0, hash: blake3::hash(b"x").into() };
    for items in [
        &[piece(0, 1)][..],
        &[Item::End],
        &[Item::Make { index: 0 }],
        &[Item::Same { index: 0 }],
        &[Item::Whole { index: 9, hash: [0; 32] }],
        &[Item::Whole { index: 0, hash: [7; 32] }],
        &[begin.clone(), begin.clone()],
        &[Item::Begin { index: 0, keep: 1 }],
        &[begin.clone(), piece(0, 0)],
        &[begin.clone(), piece(1, 1)],
        &[begin.clone(), piece(u64::MAX, 1)],
        &[begin.clone(), piece(0, 1)],
        // The first of these is whole, and kept.
        &[whole.clone(), whole],
    ] {
        let hostile = Hostile::ready(&address);
        hostile.offer(&raw(b"file", file(1)));
        assert!(matches!(hostile.answer(), ToSender::Verdicts { .. }));
        hostile.fill(items, b"x");
        hostile.ends_refused("file was not stored");
        server.await_error("file was not stored");
    }
    // More bytes than the window has.
    let hostile = Hostile::ready(&address);
    hostile.offer(&raw(b"other", file(2)));
    assert!(matches!(hostile.answer(), ToSender::Verdicts { .. }));
    hostile.fill(&[Item::Whole { index: 0, hash: [0; 32] }], b"x");
    hostile.ends_refused("other was not stored");
    server.await_error("more bytes");
    // A message too long for the server's receives.
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
fn what_was_not_stored_takes_nothing_of_the_quota() {
    let (into, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) = Running::server(&["serve", "--into", text(into.path()), "--max-bytes", "10MiB"]);
    let piece = |offset, len| Item::Piece(Piece { offset, len, hash: [0; 32] });
    let begin = Item::Begin { index: 0, keep: 0 };
    for items in [
        &[begin.clone(), piece(1, 9 << 20)][..],
        &[piece(0, 9 << 20)],
        &[begin.clone(), piece(0, 1)],
        &[Item::Whole { index: 0, hash: [7; 32] }],
    ] {
        for _ in 0..2 {
            let hostile = Hostile::ready(&address);
            hostile.offer(&raw(b"file", file(9 << 20)));
            assert!(matches!(hostile.answer(), ToSender::Verdicts { .. }));
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

#[test]
fn a_name_taken_meanwhile_keeps_no_other_file_from_its_own() {
    let root = TempDir::new().unwrap();
    let (into, server, address) = server(&root);
    let hostile = Hostile::ready(&address);
    hostile.offer(&[raw(b"a", file(1)), raw(b"b", file(1))].concat());
    assert!(matches!(hostile.answer(), ToSender::Verdicts { .. }));
    std::fs::write(into.join("a"), "taken").unwrap();
    let whole = |index| Item::Whole { index, hash: blake3::hash(b"x").into() };
    hostile.fill(&[whole(0), whole(1)], b"xx");
    hostile.ends_refused("a was not stored");
    server.await_error("a was not stored");
    assert_eq!(std::fs::read(into.join("a")).unwrap(), b"taken");
    assert_eq!(std::fs::read(into.join("b")).unwrap(), b"x");
}

#[test]
fn a_decent_sender_by_hand() {
    let root = TempDir::new().unwrap();
    let (into, _server, address) = server(&root);
    let hostile = Hostile::ready(&address);
    let path = TreePath::new(b"name").unwrap();
    let mut table = Vec::new();
    Entry { path, kind: file(4), mode: 0o640, mtime: MTIME }.encode(&mut table).unwrap();
    hostile.offer(&table);
    assert!(matches!(hostile.answer(), ToSender::Verdicts { .. }));
    hostile.fill(&[Item::Whole { index: 0, hash: blake3::hash(b"good").into() }], b"good");
    hostile.say(&ToServer::Commit { next: 2 });
    assert_eq!(hostile.answer(), ToSender::Stored);
    assert_eq!(std::fs::read(into.join("name")).unwrap(), b"good");
}

#[test]
fn a_stranger_is_told_so() {
    let into = TempDir::new().unwrap();
    let (_server, address) = Running::server(&["serve", "--into", text(into.path())]);
    let (done, _, said) = run(&["bench", "client", &address]);
    assert!(!done);
    assert_eq!(said.lines().count(), 1, "{said}");
}

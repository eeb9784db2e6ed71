//! A hand-written sender that tries to leave the directory of `multirail serve`, with all kinds of bad paths and
//! through existing symbolic links.
#![cfg(target_os = "linux")]

mod process;
mod wire;

use multirail_cli::files::{EntryKind, ReceiverMessage, TableItem};
use tempfile::TempDir;
use wire::{Hostile, file, is_untouched, raw, server};

#[test]
fn paths_out_of_the_directory() {
    let root = TempDir::new().unwrap();
    let (_, server, address) = server(&root);
    let (long, deep) = (vec![b'n'; 256], vec!["d"; 129].join("/").into_bytes());
    let longest = vec!["n".repeat(200); 21].join("/").into_bytes();
    for path in [
        &b""[..],
        b".",
        b"..",
        b"../secret",
        b"a/../../secret",
        b"/etc/passwd",
        b"a//b",
        b"a/",
        b"a/./b",
        b"a\0b",
        &long,
        &deep,
        &longest,
        b".multirail/temp-0000000000000009",
    ] {
        for kind in
            [file(1), EntryKind::Directory, EntryKind::Leave, EntryKind::Link { target: b"x".to_vec() }]
        {
            let hostile = Hostile::ready(&address);
            hostile.offer(&raw(path, kind));
            hostile.ends_refused("name");
            server.await_error("name");
        }
    }
    for target in [&b"/etc/passwd"[..], b"..", b"../..", b"../../secret", b"x/../../..", b"", b"a\0"] {
        let hostile = Hostile::ready(&address);
        hostile.offer(&raw(b"a/link", EntryKind::Link { target: target.to_vec() }));
        hostile.ends_refused("symbolic link");
        server.await_error("symbolic link");
    }
    is_untouched(&root);
}

#[test]
fn symbolic_links_in_the_directory_are_not_followed() {
    let root = TempDir::new().unwrap();
    let (into, server, address) = server(&root);
    std::os::unix::fs::symlink("..", into.join("up")).unwrap();
    std::os::unix::fs::symlink(root.path(), into.join("away")).unwrap();
    std::os::unix::fs::symlink(root.path().join("secret"), into.join("file")).unwrap();
    for (path, kind) in [
        (&b"up/evil"[..], file(1)),
        (b"away/secret", file(1)),
        (b"up/new", EntryKind::Directory),
        (b"away/into/x", EntryKind::Leave),
        (b"up", EntryKind::Leave),
        (b"up", EntryKind::Directory),
        (b"away/l", EntryKind::Link { target: b"x".to_vec() }),
    ] {
        let hostile = Hostile::ready(&address);
        hostile.offer(&raw(path, kind));
        hostile.ends_refused("was not stored");
        server.await_error("was not stored");
    }
    // A link that appears after the server has decided about the entry.
    let hostile = Hostile::ready(&address);
    hostile.offer(&raw(b"later/evil", file(1)));
    assert!(matches!(hostile.answer(), ReceiverMessage::Actions { .. }));
    std::os::unix::fs::symlink("..", into.join("later")).unwrap();
    hostile.fill(&[TableItem::Whole { index: 0, hash: blake3::hash(b"x").into() }], b"x");
    hostile.ends_refused("symbolic link");
    server.await_error("symbolic link");
    is_untouched(&root);
    let _link_itself = Hostile::ready(&address);
    _link_itself.offer(&raw(b"file", file(1)));
    _link_itself.ends_refused("exists");
}

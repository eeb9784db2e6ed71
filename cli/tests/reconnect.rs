//! `multirail send --resume --reconnect`: a restarted server is found again without the user.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::path::Path;

use process::{LIMIT, RunningCommand, run};
use rustix::process::Signal;
use tempfile::TempDir;

/// What the sender says when it waits, and when it goes on.
const WAITS: &str = "the connection to the server is lost";
const GOES_ON: &str = "the server is back";

/// The most outstanding bytes: the windows of one sender.
const WINDOW: u64 = 8 << 20;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A server at `address`, which listens when it is returned, and its address. Its first address is no other program's,
/// so that the next server can have it.
fn serve(into: &TempDir, address: &str, options: &[&str]) -> (RunningCommand, String) {
    let arguments =
        [&["serve", "--into", text(into.path()), "--listen", address, "--json"], options].concat();
    let server = RunningCommand::start(&arguments);
    let address = server.json()["listening"].as_str().expect("an address").to_owned();
    (server, address)
}

/// Starts to send, and waits until `bytes` are outstanding or sent.
fn begin(path: &Path, address: &str, reconnect: &str, bytes: u64) -> RunningCommand {
    let arguments = ["send", text(path), "--to", address, "--json", "--progress", "--resume", reconnect];
    let sender = RunningCommand::start_paced(&arguments);
    wait_for_bytes(&sender, bytes);
    sender
}

fn wait_for_bytes(sender: &RunningCommand, bytes: u64) {
    while sender.json()["progress_bytes"].as_u64().expect("progress") < bytes {}
}

/// The server of a directory is found again at its new address.
#[test]
#[cfg(feature = "directories")]
fn a_server_that_moved_is_found_again() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = tree::build(from.path(), 200, 48 << 20);
    let fleet = TempDir::new().unwrap();
    let url = format!("file://{}/fleet", text(fleet.path()));
    let named = ["--directory", &url, "--name", "store"];
    let (server, address) = serve(&into, &limit::own_address(), &named);
    let arguments =
        ["send", text(&tree), "--to", "store", "--directory", &url, "--json", "--progress", "--resume"];
    let joined = || run(&["peers", "--directory", &url, "--json"]).1.contains("store").then_some(());
    process::eventually(LIMIT, "the server joins", joined);
    let mut sender = RunningCommand::start_paced(&[&arguments[..], &["--reconnect=10min"]].concat());
    wait_for_bytes(&sender, 8 << 20);
    end(server, Signal::KILL);
    sender.await_error(WAITS);
    // The new server cannot get the same port.
    let _held = std::net::TcpListener::bind(&address).unwrap();
    let (_restarted, again) = serve(&into, "127.0.0.1:0", &named);
    assert_ne!(again, address);
    sender.await_error(GOES_ON);
    sender.succeeds();
    tree::assert_identical(from.path(), into.path());
}

fn end(mut server: RunningCommand, signal: Signal) {
    server.signal(signal);
    server.ends_within_any(LIMIT);
}

/// The rows of an ended sender: the last one of its progress, and the one of the path.
fn last_rows(sender: &RunningCommand) -> (serde_json::Value, serde_json::Value) {
    let (mut progress, mut sent) = (None, None);
    while let Some(row) = sender.rest() {
        let of = if row["sent"].is_string() { &mut sent } else { &mut progress };
        *of = Some(row);
    }
    (progress.expect("a row of progress"), sent.expect("a row of the path"))
}

#[test]
fn a_killed_server_is_found_again() {
    // The interruption: among many small files, and in the middle of the large one.
    for (files, data, middle) in [(3000, 8 << 20, 3 << 20), (200, 48 << 20, 24 << 20)] {
        let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let tree = tree::build(from.path(), files, data);
        let (server, address) = serve(&into, &limit::own_address(), &[]);
        let mut sender = begin(&tree, &address, "--reconnect=10min", middle);
        end(server, Signal::KILL);
        sender.await_error(WAITS);
        let (_restarted, again) = serve(&into, &address, &[]);
        assert_eq!(again, address);
        sender.await_error(GOES_ON);
        sender.succeeds();
        tree::assert_identical(from.path(), into.path());
        assert!(tree::partials(into.path()).is_empty(), "no partial file is left");
        let (progress, sent) = last_rows(&sender);
        let bytes = progress["progress_bytes"].as_u64().unwrap();
        assert!(bytes <= progress["total_bytes"].as_u64().unwrap(), "{progress}");
        // The client sends no byte again that the server has stored, only those that were under way.
        let total = sent["bytes"].as_u64().unwrap();
        assert!(bytes <= total + total / 100 + WINDOW, "{bytes} bytes were sent of {total}");
        assert_eq!(sent["resent_bytes"], 0, "{sent}");
    }
}

/// The server is gone and back before the sender may have noticed.
#[test]
fn at_once_and_again() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = from.path().join("large");
    tree::random(&path, 96 << 20);
    let (mut server, address) = serve(&into, &limit::own_address(), &[]);
    let mut sender = begin(&path, &address, "--reconnect", 16 << 20);
    for (signal, middle) in [(Signal::KILL, 40), (Signal::TERM, 64), (Signal::KILL, 90)] {
        end(server, signal);
        server = serve(&into, &address, &[]).0;
        sender.await_error(GOES_ON);
        if middle < 90 {
            wait_for_bytes(&sender, middle << 20);
        }
    }
    sender.succeeds();
    assert!(std::fs::read(into.path().join("large")).unwrap() == std::fs::read(&path).unwrap());
    let hash = blake3::hash(&std::fs::read(&path).unwrap()).to_string();
    assert_eq!(last_rows(&sender).1["blake3"], hash);
    assert_eq!(server.json()["blake3"], hash);
}

#[test]
fn a_server_that_never_comes_back() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = from.path().join("large");
    tree::random(&path, 64 << 20);
    let (server, address) = serve(&into, &limit::own_address(), &[]);
    let mut sender = begin(&path, &address, "--reconnect=400ms", 16 << 20);
    end(server, Signal::KILL);
    let (status, said) = sender.end_within(LIMIT);
    assert_eq!(status.code(), Some(1), "{said:?}");
    let [waits, gives_up] = &said[..] else { panic!("two sentences: {said:?}") };
    assert!(waits.contains(WAITS) && waits.contains("0.4 s"), "{waits}");
    assert!(gives_up.contains("was not back within 0.4 s"), "{gives_up}");
    assert!(gives_up.contains("restart the server, then send again with --resume"), "{gives_up}");
    // The usual way still works.
    let (_server, address) = serve(&into, &limit::own_address(), &[]);
    let (done, _, said) = run(&["send", text(&path), "--to", &address, "--resume"]);
    assert!(done, "{said}");
    assert!(std::fs::read(into.path().join("large")).unwrap() == std::fs::read(&path).unwrap());
}

/// A refusal is no loss of the connection.
#[test]
fn a_server_that_refuses_is_not_asked_again() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = from.path().join("large");
    tree::random(&path, 64 << 20);
    let (server, address) = serve(&into, &limit::own_address(), &[]);
    let mut sender = begin(&path, &address, "--reconnect=10min", 16 << 20);
    end(server, Signal::KILL);
    sender.await_error(WAITS);
    let (_restarted, _) = serve(&into, &address, &["--max-bytes", "1MiB"]);
    sender.await_error(GOES_ON);
    assert!(sender.fails_within(LIMIT).contains("the server refused"));
}

#[test]
fn the_option_needs_resume_and_a_server_at_first() {
    let from = TempDir::new().unwrap();
    let path = from.path().join("file");
    std::fs::write(&path, "content").unwrap();
    let (done, _, said) = run(&["send", text(&path), "--to", "127.0.0.1:9", "--reconnect"]);
    assert!(!done && said.contains("--resume"), "{said}");
    let (done, _, said) = run(&["send", text(&path), "--to", "127.0.0.1:9", "--resume", "--reconnect=soon"]);
    assert!(!done && said.contains("unknown time unit"), "{said}");
    // `send` does not wait for an address that it has never reached, and nobody listens at this one.
    let (done, _, said) = run(&["send", text(&path), "--to", "127.0.0.1:9", "--resume", "--reconnect=10min"]);
    assert!(!done && said.contains("refused"), "{said}");
}

//! `multirail send --resume`: stored bytes are not sent again.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use process::{LIMIT, RunningCommand, eventually, run};
use rustix::process::Signal;
use tempfile::TempDir;

/// The most outstanding bytes: the windows of one sender.
const WINDOW: u64 = 8 << 20;

/// The number of small files in a tree, and the points of interruption: among them, and in the large file.
const MIDDLES: [(usize, u64); 2] = [(10_000, 10 << 20), (1000, 30 << 20)];

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

fn server(into: &TempDir) -> (RunningCommand, String) {
    RunningCommand::server(&["serve", "--into", text(into.path())])
}

/// Starts to send, and waits until `bytes` are outstanding or sent.
fn begin(path: &Path, address: &str, bytes: u64) -> RunningCommand {
    let sender = RunningCommand::start_paced(&["send", text(path), "--to", address, "--json", "--progress"]);
    while sender.json()["progress_bytes"].as_u64().expect("progress") < bytes {}
    sender
}

/// The most bytes that an ended sender can have sent: it prints them before it sends them.
fn most_sent(sender: &RunningCommand, least: u64) -> u64 {
    let mut most = least;
    while let Some(row) = sender.rest() {
        most = row["progress_bytes"].as_u64().unwrap_or(most);
    }
    most
}

/// Sends again with --resume. Returns the bytes sent.
fn resume(path: &Path, address: &str) -> u64 {
    let (done, rows, said) = run(&["send", text(path), "--to", address, "--json", "--resume"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).expect("one row");
    assert_eq!(row["resent_bytes"], 0, "what was stored is used: {row}");
    row["sent_bytes"].as_u64().expect("bytes")
}

fn data(path: &Path) -> u64 {
    let files = walkdir::WalkDir::new(path).into_iter().map(|entry| entry.unwrap());
    let files = files.filter(|entry| entry.file_type().is_file());
    files.map(|entry| entry.metadata().unwrap().len().min(tree::allocated(entry.path()))).sum()
}

#[test]
fn after_the_sender_is_killed() {
    for (files, middle) in MIDDLES {
        let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let tree = tree::build(from.path(), files, 64 << 20);
        let (server, address) = server(&into);
        let mut sender = begin(&tree, &address, middle);
        sender.signal(Signal::KILL);
        sender.ends_within_any(LIMIT);
        server.await_error("was not stored");
        let sent = most_sent(&sender, middle) + resume(&tree, &address);
        tree::assert_identical(from.path(), into.path());
        let total = data(&tree);
        assert!(sent <= total + total / 100 + WINDOW, "{sent} bytes were sent of {total}");
        assert!(tree::partials(into.path()).is_empty(), "no partial file is left");
    }
}

#[test]
fn at_once_after_the_sender_is_killed() {
    for round in 0..3 {
        let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let tree = tree::build(from.path(), 300, 24 << 20);
        let (_server, address) = server(&into);
        let middle = (1 + 3 * round) << 20;
        let mut sender = begin(&tree, &address, middle);
        sender.signal(Signal::KILL);
        sender.ends_within_any(LIMIT);
        // The test does not wait for the server, which may still store bytes of the dead sender.
        let sent = most_sent(&sender, middle) + resume(&tree, &address);
        tree::assert_identical(from.path(), into.path());
        let total = data(&tree);
        assert!(sent <= total + total / 100 + WINDOW, "{round}: {sent} bytes were sent of {total}");
        eventually(LIMIT, "no partial file is left", || tree::partials(into.path()).is_empty().then_some(()));
    }
}

#[test]
fn after_the_server_is_killed() {
    for (files, middle) in MIDDLES {
        let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let tree = tree::build(from.path(), files, 64 << 20);
        let (killed, address) = server(&into);
        let mut sender = begin(&tree, &address, middle);
        killed.signal(Signal::KILL);
        assert!(sender.fails_within(LIMIT).contains("--resume"));
        let (restarted, address) = server(&into);
        let temporary = |path: &fs::DirEntry| path.file_name().to_string_lossy().starts_with("temp-");
        let left = fs::read_dir(into.path().join(".multirail")).unwrap().map(Result::unwrap);
        assert_eq!(left.filter(temporary).count(), 0, "a new server cleans up");
        let sent = most_sent(&sender, middle) + resume(&tree, &address);
        tree::assert_identical(from.path(), into.path());
        let total = data(&tree);
        assert!(sent <= total + total / 100 + WINDOW, "{sent} bytes were sent of {total}");
        drop(restarted);
    }
}

/// A large file that is partly stored, and its server.
fn interrupted(from: &TempDir, into: &TempDir) -> (std::path::PathBuf, RunningCommand, String) {
    let path = from.path().join("large");
    tree::random(&path, 64 << 20);
    let (server, address) = server(into);
    let mut sender = begin(&path, &address, 40 << 20);
    sender.signal(Signal::KILL);
    sender.ends_within_any(LIMIT);
    server.await_error("large was not stored");
    assert_eq!(tree::partials(into.path()).len(), 1);
    (path, server, address)
}

#[test]
fn a_changed_source_continues_at_the_change() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (path, server, address) = interrupted(&from, &into);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"changed", 20 << 20).unwrap();
    let (done, rows, said) = run(&["send", text(&path), "--to", &address, "--json", "--resume"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).unwrap();
    assert_eq!(row["sent_bytes"], 44 << 20, "from the chunk that changed");
    assert!(row["resent_bytes"].as_u64() >= Some(10 << 20), "{row}");
    let hash = blake3::hash(&fs::read(&path).unwrap()).to_string();
    assert_eq!(row["blake3"], hash);
    assert_eq!(server.json()["blake3"], hash);
    assert!(fs::read(into.path().join("large")).unwrap() == fs::read(&path).unwrap());

    // The server's file has the same content, so no byte is sent.
    let before = fs::metadata(into.path().join("large")).unwrap().modified().unwrap();
    fs::File::open(into.path().join("large")).and_then(|f| f.set_modified(std::time::UNIX_EPOCH)).unwrap();
    assert_eq!(resume(&path, &address), 0);
    assert_eq!(fs::metadata(into.path().join("large")).unwrap().modified().unwrap(), before);
    // With other content it clashes.
    file.write_all_at(b"changed again", 30 << 20).unwrap();
    let (done, _, said) = run(&["send", text(&path), "--to", &address, "--resume"]);
    assert!(!done && said.contains("exists"), "{said}");
}

#[test]
fn a_file_that_replaces_one_of_its_size_is_continued() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = from.path().join("large");
    tree::random(&path, 64 << 20);
    fs::File::create(into.path().join("large")).and_then(|old| old.set_len(64 << 20)).unwrap();
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", "overwrite"]);
    let mut sender = begin(&path, &address, 40 << 20);
    sender.signal(Signal::KILL);
    sender.ends_within_any(LIMIT);
    server.await_error("large was not stored");
    let sent = most_sent(&sender, 40 << 20) + resume(&path, &address);
    assert!(sent <= (64 << 20) + WINDOW, "{sent}");
    assert!(fs::read(into.path().join("large")).unwrap() == fs::read(&path).unwrap());
    assert!(tree::partials(into.path()).is_empty());
}

#[test]
fn a_damaged_partial_is_noticed() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (path, _server, address) = interrupted(&from, &into);
    let partial = &tree::partials(into.path())[0].0;
    let file = fs::OpenOptions::new().write(true).open(partial).unwrap();
    file.write_all_at(b"damage", 5 << 20).unwrap();
    let (done, rows, said) = run(&["send", text(&path), "--to", &address, "--json", "--resume"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).unwrap();
    assert_eq!(row["sent_bytes"], 59 << 20);
    assert!(fs::read(into.path().join("large")).unwrap() == fs::read(&path).unwrap());
}

#[test]
fn without_resume_the_file_is_sent_from_the_start() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (path, server, address) = interrupted(&from, &into);
    let (done, rows, said) = run(&["send", text(&path), "--to", &address, "--json"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).unwrap();
    assert_eq!(row["sent_bytes"], 64 << 20);
    assert!(tree::partials(into.path()).is_empty());
    drop(server);
}

#[test]
fn an_interrupted_server_keeps_partial_files_with_a_journal() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = from.path().join("large");
    tree::random(&path, 64 << 20);
    let (mut stopped, address) = server(&into);
    let mut sender = begin(&path, &address, 40 << 20);
    stopped.signal(Signal::INT);
    stopped.ends_within(LIMIT);
    sender.ends_within(LIMIT);
    assert_eq!(tree::partials(into.path()).len(), 1);
    assert_eq!(fs::read_dir(into.path().join(".multirail")).unwrap().count(), 2, "and nothing else");
    let (_server, address) = server(&into);
    let sent = most_sent(&sender, 40 << 20) + resume(&path, &address);
    assert!(sent <= (64 << 20) + WINDOW, "{sent}");
    eventually(LIMIT, "nothing is left", || tree::partials(into.path()).is_empty().then_some(()));
}

#[test]
fn one_server_per_directory_and_unknown_files_stay() {
    let into = TempDir::new().unwrap();
    let staging = into.path().join(".multirail");
    fs::create_dir(&staging).unwrap();
    let strange = ["temp-1", "temp-00000000000000000", "part-x-1", "mine", "temp-000000000000000g"];
    strange.iter().for_each(|name| fs::write(staging.join(name), "x").unwrap());
    let part = format!("part-{:032x}-0", 5);
    for ours in ["temp-0000000000000001", &part, &format!("{part}.journal")] {
        fs::write(staging.join(ours), "x").unwrap();
    }
    let (mut first, _) = server(&into);
    let mut second =
        RunningCommand::start(&["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0"]);
    assert!(second.fails_within(LIMIT).contains("another multirail serve"));
    let mut names: Vec<_> =
        fs::read_dir(&staging).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let mut expected = strange.map(str::to_owned).to_vec();
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    strange.iter().for_each(|name| fs::remove_file(staging.join(name)).unwrap());
    first.signal(Signal::INT);
    first.succeeds_silently();
    assert!(!staging.exists(), "an empty one is removed");
}

//! `multirail serve` and `multirail send`.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use process::{LIMIT, RunningCommand, eventually, multirail, run};
use rustix::process::Signal;
use tempfile::TempDir;

const PAGE: usize = 64 << 10;

fn random_file(directory: &Path, name: &str, bytes: usize) -> PathBuf {
    let mut content = vec![0; bytes];
    fastrand::Rng::with_seed(bytes as u64).fill(&mut content);
    let path = directory.join(name);
    fs::write(&path, content).expect("write a file");
    path
}

/// A file that is too long to be sent before the test acts. It is a hole, so it needs no disk space.
fn endless_file(directory: &Path) -> PathBuf {
    let path = directory.join("endless");
    // Another sender may read the file, so it must not become shorter.
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    file.and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    path
}

/// Sends the endless file, with the hole as zeros.
fn send_endless(from: &TempDir, address: &str) -> RunningCommand {
    RunningCommand::start(&["send", text(&endless_file(from.path())), "--to", address, "--no-sparse"])
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

fn server(into: &TempDir, more: &[&str]) -> (RunningCommand, String) {
    RunningCommand::server(&[&["serve", "--into", text(into.path())], more].concat())
}

/// The final names in a server's directory.
fn names(directory: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(directory.path()).expect("list");
    let names = entries.map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8"));
    names.filter(|name| name != ".multirail").collect()
}

#[test]
fn files_arrive_identical() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (_server, address) = server(&into, &[]);
    let sizes = [0, 1, PAGE - 1, PAGE, PAGE + 1, (8 << 20) + 5, (40 << 20) - 3];
    let files: Vec<_> =
        sizes.iter().map(|&size| random_file(from.path(), &format!("of {size} ✓"), size)).collect();
    let paths: Vec<_> = files.iter().map(|path| text(path)).collect();
    let (done, rows, said) = run(&[&["send", "--json", "--to", &address], &paths[..]].concat());
    assert!(done, "{said}");
    assert_eq!(rows.lines().count(), sizes.len());
    for file in &files {
        let arrived = into.path().join(file.file_name().unwrap());
        assert!(fs::read(file).unwrap() == fs::read(arrived).unwrap(), "{file:?}");
    }
    assert_eq!(names(&into).len(), sizes.len(), "nothing else is left");
}

#[test]
fn several_senders_at_once() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (_server, address) = server(&into, &[]);
    let files: Vec<_> = (0..4).map(|n| random_file(from.path(), &format!("{n}"), (9 << 20) + n)).collect();
    let senders: Vec<_> =
        files.iter().map(|file| RunningCommand::start(&["send", text(file), "--to", &address])).collect();
    for mut sender in senders {
        sender.succeeds();
    }
    for file in &files {
        assert!(fs::read(file).unwrap() == fs::read(into.path().join(file.file_name().unwrap())).unwrap());
    }
}

#[test]
fn too_many_senders_are_refused() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) = server(&into, &[]);
    let start = || send_endless(&from, &address);
    let busy: Vec<_> = (0..6).map(|_| start()).collect();
    // Six senders send the same name at once. Each has its own partial file.
    eventually(LIMIT, "six files arrive", || (tree::partials(into.path()).len() == 6).then_some(()));
    let sentence = start().fails_within(LIMIT);
    assert!(sentence.contains("try again later"), "{sentence}");
    server.await_error("try again later");
    drop(busy);
    assert!(names(&into).is_empty());
}

#[test]
fn killed_sender_leaves_no_final_file() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) = server(&into, &[]);
    let sender = send_endless(&from, &address);
    growing(&into);
    sender.signal(Signal::KILL);
    server.await_error("endless was not stored");
    assert!(names(&into).is_empty(), "no final name");

    // The server still works.
    let file = random_file(from.path(), "next", 1000);
    let (done, _, said) = run(&["send", text(&file), "--to", &address]);
    assert!(done, "{said}");
    assert_eq!(names(&into), ["next"]);
}

#[test]
fn killed_sender_ends_a_server_of_one() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut server, address) = server(&into, &["--once"]);
    let sender = send_endless(&from, &address);
    growing(&into);
    sender.signal(Signal::KILL);
    let sentence = server.fails_within(LIMIT);
    assert!(sentence.contains("endless was not stored"), "{sentence}");
    assert!(!sentence.contains("no heartbeat"), "the closed connection tells it: {sentence}");
    assert!(names(&into).is_empty());
}

#[test]
fn killed_server_ends_the_sender() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) = server(&into, &[]);
    let mut sender = send_endless(&from, &address);
    growing(&into);
    server.signal(Signal::KILL);
    let sentence = sender.fails_within(LIMIT);
    assert!(sentence.contains("endless was not sent"), "{sentence}");
    assert!(!sentence.contains("no heartbeat"), "the closed connection tells it: {sentence}");
    assert!(names(&into).is_empty(), "no final name");
}

#[test]
fn interrupted_server_leaves_no_final_file() {
    for arguments in [&[][..], &["--once"]] {
        let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let (mut server, address) = server(&into, arguments);
        let mut sender = send_endless(&from, &address);
        growing(&into);
        server.signal(Signal::INT);
        server.ends_within(LIMIT);
        assert!(names(&into).is_empty(), "{:?}", names(&into));
        let sentence = sender.fails_within(LIMIT);
        assert!(sentence.contains("endless was not sent"), "{sentence}");
    }
}

#[test]
fn stopped_sender_leaves_no_final_file() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut server, address) = server(&into, &["--once"]);
    let sender = send_endless(&from, &address);
    growing(&into);
    sender.signal(Signal::STOP);
    server.fails_within(LIMIT);
    assert!(names(&into).is_empty());
}

#[test]
fn existing_names_are_kept_unless_told_otherwise() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = random_file(from.path(), "name", 5000);
    fs::write(into.path().join("name"), "old").unwrap();
    let (mut refusing, address) = server(&into, &["--once"]);
    let (done, _, said) = run(&["send", text(&file), "--to", &address]);
    assert!(!done);
    assert!(said.contains("exists") && said.lines().count() == 1, "{said}");
    let sentence = refusing.fails_within(LIMIT);
    assert!(sentence.contains("exists"), "{sentence}");
    assert_eq!(fs::read(into.path().join("name")).unwrap(), b"old");

    let (mut replacing, address) = server(&into, &["--once", "--overwrite"]);
    let (done, _, said) = run(&["send", text(&file), "--to", &address]);
    assert!(done, "{said}");
    replacing.succeeds();
    assert!(fs::read(into.path().join("name")).unwrap() == fs::read(&file).unwrap());
    assert_eq!(names(&into), ["name"]);
}

/// A server for one sender, whose disk is soon full.
fn limited_server(into: &TempDir) -> (RunningCommand, String) {
    // A file size limit replaces a full disk, because writes fail in the same way. The limit is higher than the
    // registered memory, which counts as a file too.
    let mut command = std::process::Command::new("sh");
    let serve =
        multirail(&["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0", "--json", "--once"]);
    command
        .args(["-c", "ulimit -f 131072; trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(serve.get_program())
        .args(serve.get_args());
    let server = RunningCommand::spawn(command);
    let address = server.json()["listening"].as_str().expect("an address").to_owned();
    (server, address)
}

#[test]
fn both_sides_report_a_full_disk() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut server, address) = limited_server(&into);
    let mut sender = send_endless(&from, &address);
    let sentence = sender.fails_within(LIMIT);
    assert!(sentence.contains("refused") && sentence.contains("write the file"), "{sentence}");
    let sentence = server.fails_within(LIMIT);
    assert!(sentence.contains("write the file"), "{sentence}");
    assert!(names(&into).is_empty());
}

#[test]
fn a_full_disk_in_the_middle_of_a_directory() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    random_file(&tree, "a", 1000);
    fs::File::create(tree.join("b")).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    random_file(&tree, "c", 1000);
    let (mut server, address) = limited_server(&into);
    let mut sender = RunningCommand::start(&["send", text(&tree), "--to", &address, "--no-sparse"]);
    for sentence in [sender.fails_within(LIMIT), server.fails_within(LIMIT)] {
        assert!(sentence.contains("tree/b") && sentence.contains("write the file"), "{sentence}");
    }
    assert!(fs::read(tree.join("a")).unwrap() == fs::read(into.path().join("tree/a")).unwrap());
    assert!(!into.path().join("tree/b").exists() && !into.path().join("tree/c").exists());
}

/// Starts to send an endless file and then `more`. On return the sender reads the endless file.
fn send_behind_endless(from: &TempDir, into: &TempDir, address: &str, more: &[&Path]) -> RunningCommand {
    let endless = endless_file(from.path());
    let paths: Vec<_> = [&*endless].iter().chain(more).map(|path| text(path)).collect();
    let sender = RunningCommand::start(&[&["send", "--to", address, "--no-sparse"], &paths[..]].concat());
    growing(into);
    sender
}

/// Writes in place to a file.
fn write_at(path: &Path, offset: u64, bytes: &[u8]) {
    let file = fs::OpenOptions::new().write(true).open(path).expect("open");
    file.write_all_at(bytes, offset).expect("write");
}

#[test]
fn a_file_that_changes_is_sent_in_its_new_state() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) = server(&into, &[]);
    let (same, other) = (random_file(from.path(), "same", 5000), random_file(from.path(), "other", PAGE));
    tree::set_mode_and_time(&other, 0o640, 1);
    let mut sender = send_behind_endless(&from, &into, &address, &[&same, &other]);
    // The sender has read its start already. The size does not change.
    let endless = from.path().join("endless");
    write_at(&endless, 0, b"changed");
    sender.await_error("endless changed while it was sent, and is sent again");
    // A listed file that was not read yet changes too, and so do its mode and time.
    write_at(&other, 100, b"changed");
    tree::set_mode_and_time(&other, 0o600, 2);
    // The endless file ends after two changes.
    fs::OpenOptions::new()
        .write(true)
        .open(&endless)
        .and_then(|file| file.set_len(3 << 20))
        .expect("truncate");
    sender.await_error("endless changed while it was sent, and is sent again");
    sender.await_error("other changed while it was sent, and is sent again");
    sender.succeeds();
    tree::assert_identical(from.path(), into.path());
    eventually(LIMIT, "no partial file is left", || tree::partials(into.path()).is_empty().then_some(()));
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn a_file_that_never_stays_the_same_is_not_stored() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut server, address) = server(&into, &["--once"]);
    let mut sender = send_behind_endless(&from, &into, &address, &[]);
    let endless = from.path().join("endless");
    std::thread::scope(|scope| {
        // The flag is dropped at the end, and by a panic.
        let (_writing, ended) = mpsc::channel::<()>();
        let pause = Duration::from_millis(5);
        scope.spawn(move || {
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                write_at(&endless, 0, b"changed");
            }
        });
        for _ in 1..4 {
            sender.await_error("endless changed while it was sent, and is sent again");
        }
        let sentence = sender.fails_within(LIMIT);
        assert!(sentence.contains("endless changed each of the 4 times it was sent"), "{sentence}");
    });
    let sentence = server.fails_within(LIMIT);
    assert!(sentence.contains("gave up") && sentence.contains("each of the 4 times"), "{sentence}");
    assert!(names(&into).is_empty());
}

/// Waits until a partial file has a journal with some pieces, and no final name.
fn growing(into: &TempDir) {
    eventually(LIMIT, "a partial file grows", || {
        assert!(names(into).is_empty(), "{:?}", names(into));
        tree::partials(into.path()).iter().any(|(_, journal)| *journal > 4 * 44).then_some(())
    });
}

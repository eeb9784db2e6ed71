//! The rules of `multirail serve`: its quota, and existing names.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use process::{LIMIT, RunningCommand, run};
use rustix::process::Signal;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A directory `tree` with `a`, `b` and `sub/c`.
fn small(from: &TempDir) -> PathBuf {
    let tree = from.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    for name in ["a", "b", "sub/c"] {
        fs::write(tree.join(name), format!("new {name}")).unwrap();
    }
    tree
}

/// Sends `small` to a server with `rule` where `tree/b` exists. Returns whether that succeeded, the output, and the
/// content of `tree/b`.
fn clash(rule: &[&str], into: &TempDir) -> (bool, String, String) {
    let from = TempDir::new().unwrap();
    let tree = small(&from);
    fs::create_dir(into.path().join("tree")).unwrap();
    fs::write(into.path().join("tree/b"), "old").unwrap();
    let (_server, address) =
        RunningCommand::server(&[&["serve", "--into", text(into.path())], rule].concat());
    let (done, rows, said) = run(&["send", text(&tree), "--to", &address]);
    (done, rows + &said, fs::read_to_string(into.path().join("tree/b")).unwrap())
}

#[test]
fn refuse() {
    for rule in [&[][..], &["--on-clash", "refuse"]] {
        let into = TempDir::new().unwrap();
        let (done, said, b) = clash(rule, &into);
        assert!(!done && said.contains("tree/b was not stored") && said.contains("exists"), "{said}");
        assert_eq!(b, "old");
        assert!(!into.path().join("tree/a").exists(), "refused before bytes move");
    }
}

#[test]
fn overwrite() {
    for rule in [&["--overwrite"][..], &["--on-clash", "overwrite"]] {
        let into = TempDir::new().unwrap();
        let (done, said, b) = clash(rule, &into);
        assert!(done, "{said}");
        assert_eq!(b, "new b");
        assert_eq!(tree::facts(into.path()).len(), 5);
    }
}

#[test]
fn rename() {
    let into = TempDir::new().unwrap();
    fs::create_dir(into.path().join("other")).unwrap();
    let (done, said, b) = clash(&["--on-clash", "rename"], &into);
    assert!(done, "{said}");
    assert_eq!(b, "old");
    assert_eq!(fs::read_to_string(into.path().join("tree/b.1")).unwrap(), "new b");
    assert_eq!(fs::read_to_string(into.path().join("tree/sub/c")).unwrap(), "new sub/c");
}

#[test]
fn skip() {
    let into = TempDir::new().unwrap();
    let (done, said, b) = clash(&["--on-clash", "skip"], &into);
    assert!(done && said.contains("; 1 file was skipped: its name is taken"), "{said}");
    assert_eq!(b, "old");
    assert_eq!(fs::read_to_string(into.path().join("tree/sub/c")).unwrap(), "new sub/c");
}

/// Mode and time of a directory.
fn looks(path: &Path) -> (u32, i64) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.mode() & 0o7777, metadata.mtime())
}

#[test]
fn a_directory_that_is_there_stays_as_it_is_unless_it_is_overwritten() {
    let from = TempDir::new().unwrap();
    let tree = small(&from);
    tree::set_mode_and_time(&tree.join("sub"), 0o700, 1);
    tree::set_mode_and_time(&tree, 0o711, 2);
    for rule in ["refuse", "overwrite", "rename", "skip"] {
        for resume in [&[][..], &["--resume"]] {
            let into = TempDir::new().unwrap();
            fs::create_dir_all(into.path().join("tree/sub")).unwrap();
            let theirs = [into.path().join("tree/sub"), into.path().join("tree")];
            let (_server, address) =
                RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", rule]);
            let send = || run(&[&["send", text(&tree), "--to", &address], resume].concat());
            for (n, directory) in theirs.iter().enumerate() {
                tree::set_mode_and_time(directory, 0o750, 77 + n as u64);
            }
            let (done, _, said) = send();
            assert!(done, "{said}");
            let files: Vec<_> = ["a", "b", "sub/c"].map(|name| into.path().join("tree").join(name)).into();
            assert!(files.iter().all(|file| file.exists()), "the sent files are in it");
            let ours = [looks(&tree.join("sub")), looks(&tree)];
            for (theirs, ours) in theirs.iter().zip(ours) {
                match rule {
                    "overwrite" => assert_eq!(looks(theirs), ours),
                    _ => assert!(looks(theirs).0 == 0o750 && looks(theirs).1 != ours.1, "{rule} {resume:?}"),
                }
            }
            // If no file is added, the directory's time stays too.
            fs::remove_dir_all(into.path().join("tree")).unwrap();
            fs::create_dir(into.path().join("tree")).unwrap();
            let empty = TempDir::new().unwrap();
            fs::create_dir(empty.path().join("tree")).unwrap();
            tree::set_mode_and_time(&empty.path().join("tree"), 0o700, 5);
            tree::set_mode_and_time(&theirs[1], 0o750, 77);
            let before = looks(&theirs[1]);
            let (done, _, said) =
                run(&[&["send", text(&empty.path().join("tree")), "--to", &address], resume].concat());
            assert!(done, "{said}");
            let after = looks(&theirs[1]);
            assert_eq!(after == before, rule != "overwrite", "{rule}: {after:?}");
        }
    }
}

#[test]
fn a_directory_of_an_interrupted_sender_is_finished_by_the_next() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    tree::random(&tree.join("sub/large"), 64 << 20);
    tree::set_mode_and_time(&tree.join("sub"), 0o750, 1);
    tree::set_mode_and_time(&tree, 0o711, 2);
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", "skip"]);
    let mut sender = RunningCommand::start(&["send", text(&tree), "--to", &address, "--json", "--progress"]);
    while sender.json()["progress_bytes"].as_u64().expect("progress") < 10 << 20 {}
    sender.signal(Signal::KILL);
    sender.ends_within_any(LIMIT);
    server.await_error("was not stored");
    assert_eq!(looks(&into.path().join("tree/sub")).0, 0o1700, "unfinished");
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(done, "{said}");
    tree::assert_identical(from.path(), into.path());
}

#[test]
fn skip_keeps_a_file_that_has_the_name_of_a_directory() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    fs::create_dir(into.path().join("tree")).unwrap();
    fs::write(into.path().join("tree/sub"), "file").unwrap();
    let (_server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", "skip"]);
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(done, "{said}");
    assert_eq!(fs::read(into.path().join("tree/sub")).unwrap(), b"file");
    assert_eq!(tree::facts(into.path()).len(), 4, "a and b came");
}

#[test]
fn files_and_directories_never_replace_each_other() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    fs::create_dir_all(into.path().join("tree/a")).unwrap();
    let (_server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", "overwrite"]);
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(!done && said.contains("a directory of that name exists"), "{said}");
    fs::remove_dir_all(into.path().join("tree")).unwrap();
    fs::write(into.path().join("tree"), "file").unwrap();
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(!done && said.contains("a file has the name of this directory"), "{said}");
}

#[test]
fn a_server_that_nobody_reads_from_goes_on() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = from.path().join("file");
    fs::write(&file, "content").unwrap();
    let serve = ["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0", "--json"];
    let mut server = process::multirail(&serve).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let listening: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = listening["listening"].as_str().unwrap();
    let sent =
        [&[][..], &["--resume"]].map(|more| run(&[&["send", text(&file), "--to", address], more].concat()));
    server.kill().and_then(|()| server.wait()).unwrap();
    sent.iter().for_each(|(done, _, said)| assert!(done, "{said}"));
    assert_eq!(fs::read(into.path().join("file")).unwrap(), b"content");
}

#[test]
fn quota() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = |name: &str, mib: usize| {
        tree::random(&from.path().join(name), mib << 20);
        from.path().join(name)
    };
    let (five, large, six, four) = (file("five", 5), file("large", 40), file("six", 6), file("four", 4));
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--max-bytes", "10MiB"]);
    let send = |paths: &[&Path]| {
        let paths: Vec<_> = paths.iter().map(|path| text(path)).collect();
        run(&[&["send", "--to", &address, "--json", "--progress"], &paths[..]].concat())
    };
    let refused = |paths: &[&Path]| {
        let (done, rows, said) = send(paths);
        assert!(!done && said.contains("--max-bytes") && said.lines().count() == 1, "{said}");
        assert_eq!(rows, "", "no byte moves");
        server.await_error("--max-bytes");
    };
    refused(&[&large]);
    refused(&[&five, &six]);
    assert!(send(&[&five]).0);
    refused(&[&six]);
    let (done, _, said) = run(&["send", text(&six), "--to", &address, "--resume"]);
    assert!(!done && said.contains("--max-bytes"), "resuming too: {said}");
    server.await_error("--max-bytes");
    assert!(send(&[&four]).0, "what was refused does not count");
    assert_eq!(tree::facts(into.path()).len(), 2);
}

#[test]
fn empty_files_count() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    (0..300).for_each(|n| fs::write(tree.join(n.to_string()), "").unwrap());
    let (_server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--max-bytes", "1MiB"]);
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(!done && said.contains("--max-bytes"), "{said}");
    (250..300).for_each(|n| fs::remove_file(tree.join(n.to_string())).unwrap());
    let (done, _, said) = run(&["send", text(&tree), "--to", &address]);
    assert!(done, "{said}");
}

#[test]
fn partial_files_count() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (large, other) = (from.path().join("large"), from.path().join("other"));
    tree::random(&large, 64 << 20);
    tree::random(&other, 50 << 20);
    let (_server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--max-bytes", "70MiB"]);
    let mut sender = RunningCommand::start(&["send", text(&large), "--to", &address, "--json", "--progress"]);
    while sender.json()["progress_bytes"].as_u64().expect("progress") < 40 << 20 {}
    sender.signal(Signal::KILL);
    sender.ends_within_any(LIMIT);
    _server.await_error("large was not stored");
    let (done, _, said) = run(&["send", text(&other), "--to", &address]);
    assert!(!done && said.contains("--max-bytes"), "{said}");
    let (done, _, said) = run(&["send", text(&large), "--to", &address, "--resume"]);
    assert!(done, "{said}");
    assert_eq!(fs::metadata(into.path().join("large")).unwrap().len(), 64 << 20);
}

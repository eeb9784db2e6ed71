//! Directories sent by `multirail send` arrive unchanged.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::fs;
use std::path::Path;

use process::{LIMIT, RunningCommand, run};
use serde_json::json;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// The peak memory of a process, in bytes.
fn peak_memory(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn a_tree_of_10_000_files_arrives_identical() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = tree::build(from.path(), 10_000, 64 << 20);
    let (server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let (done, rows, said) = run(&["send", text(&tree), "--to", &address, "--json"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).expect("one row");
    // Besides the 10,000, the sparse file and the file with the odd name.
    assert_eq!(
        (&row["files"], &row["directories"], &row["links"]),
        (&json!(10_000 + 2), &json!(113), &json!(3))
    );
    process::assert_agree(&row, &server.json());
    tree::assert_identical(from.path(), into.path());
    assert!(peak_memory(server.id()) < 300 << 20, "{}", peak_memory(server.id()));

    let (large, arrived) = (tree.join("large"), into.path().join("tree/large"));
    match tree::allocated(&large) < fs::metadata(&large).unwrap().len() / 2 {
        true => {
            assert!(row["sent_bytes"].as_u64() < Some(128 << 20), "no hole is sent: {row}");
            assert!(tree::allocated(&arrived) <= tree::allocated(&large) + (1 << 20), "holes stay holes");
        }
        false => println!("skipped: holes: the file system of {} has none", from.path().display()),
    }

    // With holes as zeros the content is the same, and uses its whole length on disk.
    fs::remove_file(&arrived).unwrap();
    let (done, rows, said) = run(&["send", text(&large), "--to", &address, "--json", "--no-sparse"]);
    assert!(done, "{said}");
    let row: serde_json::Value = serde_json::from_str(&rows).expect("one row");
    assert_eq!(row["sent_bytes"], fs::metadata(&large).unwrap().len());
    let hash = blake3::hash(&fs::read(&large).unwrap()).to_string();
    assert_eq!(row["blake3"], hash);
    assert_eq!(server.json()["blake3"], hash);
}

#[test]
fn both_sides_use_little_memory() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    // A hole needs no disk space.
    let path = from.path().join("endless");
    fs::File::create(&path).and_then(|file| file.set_len(1 << 40)).unwrap();
    let (server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let sender = RunningCommand::start(&[
        "send",
        text(&path),
        "--to",
        &address,
        "--progress",
        "--json",
        "--no-sparse",
    ]);
    while sender.json()["progress_bytes"].as_u64().expect("progress") < 400 << 20 {}
    for process in [&sender, &server] {
        assert!(peak_memory(process.id()) < 300 << 20, "{}", peak_memory(process.id()));
    }
}

#[test]
fn files_that_cannot_be_sent_are_named() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("good"), "content").unwrap();
    let (_server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let fails = |what: &str, words: &[&str]| {
        let (done, _, said) = run(&["send", text(&from.path().join(what)), "--to", &address]);
        assert!(!done && said.lines().count() == 1, "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "{word}: {said}"));
    };
    fails("missing", &["missing does not exist", "relative paths start in"]);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        tree.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    fails("tree", &["tree/pipe", "a pipe", "--skip-special"]);
    fs::remove_file(tree.join("pipe")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
    fails("tree", &["tree/socket", "a socket", "--skip-special"]);
    fs::remove_file(tree.join("socket")).unwrap();
    for target in ["/etc/passwd", "../outside", "x/../../outside"] {
        let link = tree.join("link");
        std::os::unix::fs::symlink(target, &link).unwrap();
        fails("tree", &["link", "--skip-special"]);
        fs::remove_file(link).unwrap();
    }
    assert_eq!(tree::facts(into.path()).len(), 0, "nothing is sent before everything is listed");

    std::os::unix::fs::symlink("/etc/passwd", tree.join("away")).unwrap();
    let (done, _, said) = run(&["send", text(&tree), "--to", &address, "--skip-special"]);
    assert!(done && said.contains("skipped") && said.contains("away"), "{said}");
    let names: Vec<_> = tree::facts(into.path()).into_keys().collect();
    assert_eq!(names, [&b"tree"[..], b"tree/good"]);
}

#[test]
fn special_bits_are_not_restored() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = from.path().join("tool");
    fs::write(&file, "x").unwrap();
    tree::set_mode_and_time(&file, 0o6755, 1);
    let (_server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let (done, _, said) = run(&["send", text(&file), "--to", &address]);
    assert!(done && said.contains("setuid"), "{said}");
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(into.path().join("tool")).unwrap());
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn two_paths_of_one_name_are_refused() {
    let from = TempDir::new().unwrap();
    for directory in ["a", "b"] {
        fs::create_dir(from.path().join(directory)).unwrap();
        fs::write(from.path().join(directory).join("name"), directory).unwrap();
    }
    let mut sender = RunningCommand::start(&[
        "send",
        text(&from.path().join("a/name")),
        text(&from.path().join("b/name")),
        "--to",
        "127.0.0.1:9",
    ]);
    assert!(sender.fails_within(LIMIT).contains("two of the paths"));
}

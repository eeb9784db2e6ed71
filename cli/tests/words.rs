//! The output of `multirail serve` and `multirail send`: the command to run, counts, and the end.
#![cfg(target_os = "linux")]

mod process;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use process::{LIMIT, RunningCommand, assert_agree, eventually, multirail};
use rustix::process::Signal;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A server without --json, and its first line.
fn server(into: &TempDir, more: &[&str]) -> (RunningCommand, String) {
    let serve = ["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0"];
    let server = RunningCommand::start(&[&serve, more].concat());
    let line = server.line();
    (server, line)
}

/// A directory `tree` of two files, two directories with itself, and a link.
fn small(from: &TempDir) -> PathBuf {
    let tree = from.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("a"), "a").unwrap();
    fs::write(tree.join("sub/b"), "bb").unwrap();
    std::os::unix::fs::symlink("a", tree.join("link")).unwrap();
    tree
}

#[test]
fn the_line_that_serve_prints_sends() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (file, token) = (from.path().join("file"), from.path().join("a token's file"));
    fs::write(&file, "content").unwrap();
    fs::write(&token, "3a7bd3e2360a3d29eea436fcfb7e44c735d117c4\n").unwrap();
    let (_server, line) = server(&into, &["--backend", "loopback", "--token-file", text(&token)]);
    let (listening, command) = line.split_once("; run: ").expect("a line to run");
    let address = listening.strip_prefix("listening on ").expect("an address");
    let token = text(&token).replace('\'', r"'\''");
    let expected = format!("multirail send PATH --to {address} --backend loopback --token-file '{token}'");
    assert_eq!(command, expected);
    // A shell can run it unchanged, except for the path.
    let program = multirail(&[]).get_program().to_owned();
    let mut shell = std::process::Command::new("sh");
    shell
        .arg("-c")
        .arg(command.replace("multirail", "\"$0\"").replace("PATH", "\"$1\""))
        .arg(program)
        .arg(&file);
    shell.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_TOKEN_FILE");
    RunningCommand::spawn(shell).succeeds();
    assert_eq!(fs::read(into.path().join("file")).unwrap(), b"content");

    // Values of variables are printed too, because the variables may be missing on the sender's host.
    let into = TempDir::new().unwrap();
    let mut serve = multirail(&["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0", "--json"]);
    serve.env("MULTIRAIL_BACKEND", "loopback").env("MULTIRAIL_EFA_PROVIDER", "tcp");
    let row = RunningCommand::spawn(serve).json();
    let (address, send) = (row["listening"].as_str().unwrap(), row["send"].as_str().unwrap());
    assert_eq!(send, format!("multirail send PATH --to {address} --backend loopback --provider tcp"));
}

#[test]
fn both_sides_count_the_same() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--on-clash", "skip"]);
    let send = |more: &[&str]| {
        let mut sender =
            RunningCommand::start(&[&["send", text(&tree), "--to", &address, "--json"], more].concat());
        let row = sender.json();
        sender.succeeds();
        let stored = server.json();
        assert_agree(&row, &stored);
        row
    };
    let new = send(&[]);
    assert_eq!((&new["files"], &new["directories"], &new["links"]), (&2.into(), &2.into(), &1.into()));
    assert_eq!((&new["same_files"], &new["skipped_files"]), (&0.into(), &0.into()));
    let again = send(&["--resume"]);
    assert_eq!((&again["same_files"], &again["same_links"]), (&2.into(), &1.into()));
    fs::write(tree.join("a"), "A").unwrap();
    let clash = send(&["--resume"]);
    assert_eq!((&clash["same_files"], &clash["skipped_files"]), (&1.into(), &1.into()));
    let skipped = send(&[]);
    assert_eq!((&skipped["skipped_files"], &skipped["skipped_links"]), (&2.into(), &1.into()));
    fs::remove_dir_all(into.path().join("tree/sub")).unwrap();
    fs::write(into.path().join("tree/sub"), "a file").unwrap();
    let barred = send(&[]);
    assert_eq!((&barred["skipped_files"], &barred["skipped_directories"]), (&2.into(), &1.into()));
    // In several groups.
    for n in 0..5000 {
        fs::write(tree.join(format!("{n}")), "x").unwrap();
    }
    assert_eq!(send(&[])["files"], 5002);
}

#[test]
fn counts_are_printed() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    let (server, line) = server(&into, &["--overwrite"]);
    let address = line["listening on ".len()..].split(';').next().unwrap().to_owned();
    let send = |more: &[&str]| {
        let mut sender = RunningCommand::start(&[&["send", text(&tree), "--to", &address], more].concat());
        let line = sender.line();
        sender.succeeds();
        [line, server.line()]
    };
    let [sent, stored] = send(&[]);
    assert!(sent.starts_with("sent tree: 2 files, 2 directories, 1 link, 3 B in "), "{sent}");
    assert!(stored.starts_with("stored tree: 2 files, 2 directories, 1 link, 3 B in "), "{stored}");
    for line in send(&["--resume"]) {
        assert!(line.contains("tree: 2 files, 2 directories, 1 link, 0 B in "), "{line}");
        assert!(line.ends_with("; 2 files, 1 link were there already"), "{line}");
    }
}

#[test]
fn a_stopped_server_reports_unfinished_files() {
    for (signal, once) in [(Signal::INT, &[][..]), (Signal::TERM, &[]), (Signal::INT, &["--once"])] {
        let into = TempDir::new().unwrap();
        let (mut idle, _) = server(&into, once);
        idle.signal(signal);
        idle.succeeds_silently();
    }

    // All sent files are complete.
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let tree = small(&from);
    let (mut done, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    RunningCommand::start(&["send", text(&tree), "--to", &address]).succeeds();
    done.signal(Signal::INT);
    done.succeeds_silently();

    // A sender is interrupted in the middle of a file.
    let large = from.path().join("large");
    fs::File::create(&large).and_then(|file| file.set_len(1 << 40)).unwrap();
    let send = |address: &str| {
        let sender = RunningCommand::start(&["send", text(&large), "--to", address, "--no-sparse"]);
        let grows = || tree::partials(into.path()).iter().any(|(_, journal)| *journal > 4 * 44).then_some(());
        eventually(LIMIT, "a partial file grows", grows);
        sender
    };
    let (mut cut, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let mut sender = send(&address);
    cut.signal(Signal::INT);
    cut.await_error(
        "interrupted: one sender had not finished; one unfinished file is in .multirail for `send --resume`",
    );
    cut.ends_within(LIMIT);
    sender.fails_within(LIMIT);

    // The unfinished file is still there, and no sender is interrupted.
    let (mut idle, _) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    idle.signal(Signal::INT);
    let sentence = idle.fails_within(LIMIT);
    assert_eq!(sentence, "multirail: interrupted; one unfinished file is in .multirail for `send --resume`");
}

//! What `multirail serve` and `multirail send` print.
#![cfg(target_os = "linux")]

mod process;

use std::fs;
use std::path::Path;

use process::{Running, multirail};
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A server that prints for people, and its first line.
fn server(into: &TempDir, more: &[&str]) -> (Running, String) {
    let serve = ["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0"];
    let server = Running::start(&[&serve, more].concat());
    let line = server.line();
    (server, line)
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
    // A shell runs it as it stands, but for the path.
    let program = multirail(&[]).get_program().to_owned();
    let mut shell = std::process::Command::new("sh");
    shell
        .arg("-c")
        .arg(command.replace("multirail", "\"$0\"").replace("PATH", "\"$1\""))
        .arg(program)
        .arg(&file);
    shell.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_TOKEN_FILE");
    Running::spawn(shell).succeeds();
    assert_eq!(fs::read(into.path().join("file")).unwrap(), b"content");

    // What came by variables is said too: they may be missing where the sender runs.
    let into = TempDir::new().unwrap();
    let mut serve = multirail(&["serve", "--into", text(into.path()), "--listen", "127.0.0.1:0", "--json"]);
    serve.env("MULTIRAIL_BACKEND", "loopback").env("MULTIRAIL_EFA_PROVIDER", "tcp");
    let row = Running::spawn(serve).json();
    let (address, send) = (row["listening"].as_str().unwrap(), row["send"].as_str().unwrap());
    assert_eq!(send, format!("multirail send PATH --to {address} --backend loopback --provider tcp"));
}

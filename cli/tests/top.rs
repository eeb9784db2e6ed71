//! `multirail top`: one frame of a running process, and a live view until the process ends.
#![cfg(target_os = "linux")]

mod process;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use process::{LIMIT, RunningCommand, eventually, in_terminal, run};

/// A bench that runs until it is killed, and its socket.
fn bench(folder: &tempfile::TempDir) -> (RunningCommand, String) {
    let path = folder.path().join("admin").into_os_string().into_string().expect("UTF-8");
    let load = [
        "bench",
        "--backend",
        "loopback",
        "--in-process",
        "--duration",
        "10min",
        "--no-verify",
        "--no-limit",
    ];
    let bench = RunningCommand::start(&[&load[..], &["--admin", &path]].concat());
    // The file is there before anybody listens.
    eventually(LIMIT, "the socket", || UnixStream::connect(&path).ok());
    (bench, path)
}

/// The line that a process answers.
fn ask_for_a_dump(path: &str) -> String {
    let mut process = UnixStream::connect(path).expect("the socket");
    process.write_all(b"{\"request\":\"dump\"}\n").expect("a request");
    let mut answer = String::new();
    BufReader::new(process).read_line(&mut answer).expect("an answer");
    answer
}

/// A socket that gives these answers to one client, and then is gone, as that of a process that has ended.
fn answers(folder: &tempfile::TempDir, answers: Vec<String>) -> String {
    let path = folder.path().join("answers");
    let listener = UnixListener::bind(&path).expect("a socket");
    let shown = path.to_str().expect("UTF-8").to_owned();
    std::thread::spawn(move || {
        let (client, _) = listener.accept().expect("a client");
        let mut requests = BufReader::new(client.try_clone().expect("a second handle"));
        let last = answers.len() - 1;
        for (number, answer) in answers.iter().enumerate() {
            requests.read_line(&mut String::new()).expect("a request");
            if number == last {
                std::fs::remove_file(&path).expect("the socket's file");
            }
            (&client).write_all(answer.as_bytes()).expect("an answer");
        }
    });
    shown
}

#[test]
fn one_frame_has_the_rates_and_fits_80_columns() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let frame = eventually(LIMIT, "bytes per second", || {
        let (done, frame, said) = run(&["top", "--once", "--interval", "200ms", "--admin", &path]);
        assert!(done && said.is_empty(), "{said}");
        (!frame.contains("\n0.00 GB/s")).then_some(frame)
    });
    assert!(frame.lines().all(|line| line.chars().count() <= 80), "{frame}");
    for wanted in ["multirail top: process ", "Rails: ", "lo0", "in service", "Peers: 1", "Operations: "] {
        assert!(frame.contains(wanted), "{wanted} in:\n{frame}");
    }
}

#[test]
fn the_live_view_says_that_the_process_has_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let dump = ask_for_a_dump(&path);
    let path = answers(&folder, vec![dump.clone(), dump]);
    let Some(shown) = in_terminal(80, &["top", "--interval", "100ms", "--admin", &path]) else { return };
    assert!(shown.contains("Operations: "), "{shown}");
    let last = shown.rsplit("\u{1b}[?1049l").next().expect("what follows the view");
    assert!(last.contains("process ") && last.contains(" has ended: "), "{last:?}");
}

/// The process that is watched may be another user's.
#[test]
fn an_answer_does_not_control_the_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let hostile = "{\"response\":\"\\u001b]0;taken\\u0007\"}\n".to_owned();
    let path = answers(&folder, vec![ask_for_a_dump(&path), hostile]);
    let Some(shown) = in_terminal(80, &["top", "--interval", "100ms", "--admin", &path]) else { return };
    assert!(shown.contains("taken") && !shown.contains("\u{1b}]0;"), "{shown:?}");
}

#[test]
fn what_cannot_be_watched_is_an_error() {
    let (done, _, said) = run(&["top", "--admin", "/no/such/socket"]);
    assert!(!done && said.contains("give the path that the process got by --admin"), "{said}");
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let (done, _, said) = run(&["top", "--admin", &path]);
    assert!(!done && said.contains("--once"), "{said}");
    let (done, _, said) = run(&["top", "--interval", "1ms", "--admin", &path]);
    assert!(!done && said.contains("between 100ms and 30s"), "{said}");
}

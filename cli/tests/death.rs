//! One side of a bench dies or stops. The other side ends soon, with one sentence.
#![cfg(target_os = "linux")]

mod process;

use process::{LIMIT, RunningCommand, eventually};
use rustix::process::{Pid, Signal, kill_process};

/// A text in the sentence of a command whose peer was silent. A killed peer is recognised by its closed connection,
/// long before its silence counts.
const SILENCE: &str = "no heartbeat for 5.0 s";

fn pair(op: &str) -> (RunningCommand, RunningCommand) {
    let (server, address) = RunningCommand::server(&["bench", "server"]);
    let client = RunningCommand::start(&[
        "bench",
        "client",
        &address,
        "--duration",
        "10min",
        "--op",
        op,
        "--pages",
        "64",
        "-v",
    ]);
    client.await_error("measuring");
    (server, client)
}

fn one_sentence(client: &mut RunningCommand) -> String {
    let (status, said) = client.end_within(LIMIT);
    assert!(status.code().is_some_and(|code| code != 0), "{status}");
    let sentences: Vec<_> = said.iter().filter(|line| line.starts_with("multirail: ")).collect();
    assert_eq!(sentences.len(), 1, "{said:?}");
    sentences[0].clone()
}

#[track_caller]
fn by_an_event(sentence: &str) {
    assert!(!sentence.contains("no heartbeat"), "{sentence}");
}

#[track_caller]
fn by_silence(sentence: &str) {
    assert!(sentence.contains(SILENCE), "{sentence}");
}

#[test]
fn killed_server() {
    for op in ["write", "write-pages", "send"] {
        let (server, mut client) = pair(op);
        server.signal(Signal::KILL);
        by_an_event(&one_sentence(&mut client));
    }
}

#[test]
fn killed_client() {
    for op in ["write", "read", "write-imm"] {
        let (mut server, client) = pair(op);
        client.signal(Signal::KILL);
        by_an_event(&server.fails_within(LIMIT));
    }
}

#[test]
fn stopped_server() {
    let (server, mut client) = pair("write-pages");
    server.signal(Signal::STOP);
    by_silence(&one_sentence(&mut client));
}

#[test]
fn stopped_client() {
    let (mut server, mut client) = pair("write");
    client.signal(Signal::STOP);
    by_silence(&server.fails_within(LIMIT));
    client.signal(Signal::CONT);
    one_sentence(&mut client);
}

fn with_its_own_server() -> (RunningCommand, Pid) {
    let bench = RunningCommand::start(&["bench", "--duration", "10min", "--pages", "64", "-v"]);
    bench.await_error("measuring");
    let children = format!("/proc/{0}/task/{0}/children", bench.id());
    let server =
        std::fs::read_to_string(children).expect("children of the bench").trim().parse().expect("one child");
    (bench, Pid::from_raw(server).expect("not 0"))
}

#[test]
fn killed_child() {
    let (mut bench, server) = with_its_own_server();
    kill_process(server, Signal::KILL).expect("kill");
    by_an_event(&one_sentence(&mut bench));
}

#[test]
fn stopped_child_is_not_left_behind() {
    let (mut bench, server) = with_its_own_server();
    kill_process(server, Signal::STOP).expect("stop");
    by_silence(&one_sentence(&mut bench));
    eventually(LIMIT, "the child is gone", || is_gone(server).then_some(()));
}

#[test]
fn killed_parent_takes_its_child_along() {
    let (bench, server) = with_its_own_server();
    bench.signal(Signal::KILL);
    eventually(LIMIT, "the child is gone", || is_gone(server).then_some(()));
}

/// Returns true if the process is gone, or is dead and was not reaped yet.
fn is_gone(process: Pid) -> bool {
    match std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    }
}

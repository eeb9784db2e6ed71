//! Dumps of a running command, on SIGUSR1 and on a stall, and their trace.
#![cfg(target_os = "linux")]

mod process;

use std::collections::BTreeMap;

use process::{LIMIT, RunningCommand, eventually, run};
use rustix::process::Signal;
use tempfile::TempDir;

fn path(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().expect("UTF-8").to_owned()
}

/// Reads the recording as a timeline and as Chrome JSON. Returns the timeline.
fn traced(directory: &TempDir, recording: &str) -> String {
    let (done, timeline, said) = run(&["trace", recording]);
    assert!(done, "{said}");
    let json = path(directory, "trace.json");
    let (done, _, said) = run(&["trace", recording, "--chrome", &json]);
    assert!(done, "{said}");
    let text = std::fs::read_to_string(&json).expect("the trace");
    let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut open = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events") {
        let depth: &mut i32 = open.entry(event["id"].as_str().unwrap_or("").to_owned()).or_default();
        *depth += match event["ph"].as_str() {
            Some("b") => 1,
            Some("e") => -1,
            _ => 0,
        };
        assert!((0..=1).contains(depth), "{event}");
    }
    assert!(open.len() > 1 && open.values().all(|depth| *depth == 0), "{open:?}");
    assert!(text.contains("rail 0 (lo0)"), "{text}");
    timeline
}

#[test]
fn a_stall_names_the_operations_that_wait_for_a_stopped_peer() {
    for op in ["write-imm", "send"] {
        let directory = TempDir::new().expect("a directory");
        let recording = path(&directory, "recording");
        let (server, address) = RunningCommand::server(&["bench", "server"]);
        let load = [
            "--duration",
            "10min",
            "--op",
            op,
            "--size",
            "4KiB",
            "--pages",
            "64",
            "--no-verify",
            "--dump",
            &recording,
        ];
        let mut client = RunningCommand::start(&[&["bench", "client", &address, "-v"], &load[..]].concat());
        client.await_error("measuring");
        server.signal(Signal::STOP);

        let told = client.await_error("stalled: ");
        let name = if op == "send" { "send" } else { "write" };
        assert!(told.contains(&format!(" {name} of 4096 bytes")), "the operation: {told}");
        assert!(told.contains("rail 0 (lo0): 1 unposted, 0 outstanding"), "the rail: {told}");
        assert!(told.contains(" s old, no progress for "), "its age: {told}");
        let waits = if op == "send" {
            "; waits for a receive of the peer"
        } else {
            "; waits for room in the peer's queue"
        };
        assert!(told.contains(waits), "what it waits for: {told}");
        assert!(told.contains(&format!(", {address}, incarnation ")), "the peer: {told}");

        let cut_short = client.await_error("cut short: ");
        assert!(cut_short.contains("ends with: peer died"), "{cut_short}");
        let (status, said) = client.end_within(LIMIT);
        assert!(status.code().is_some_and(|code| code != 0), "{status}");
        let sentences: Vec<_> = said.iter().filter(|line| line.starts_with("multirail: ")).collect();
        assert!(sentences.len() == 1 && sentences[0].contains("peer died"), "{said:?}");

        let timeline = traced(&directory, &recording);
        for text in ["back-pressure", "stalled", "ended: peer died", "dump taken"] {
            assert!(timeline.contains(text), "{text} in {timeline}");
        }
    }
}

#[test]
fn a_signal_prints_a_dump_and_the_bench_goes_on() {
    let directory = TempDir::new().expect("a directory");
    let recording = path(&directory, "recording");
    let bench = |duration| {
        let load = ["--duration", duration, "--pages", "32", "--json", "-v", "--dump", &recording];
        let bench = RunningCommand::start(&[&["bench"], &load[..]].concat());
        bench.await_error("measuring");
        bench.signal(Signal::USR1);
        bench.await_error("dump of ");
        bench
    };
    let endless = bench("10min");
    endless.await_error("transport loopback");
    endless.await_error("rail 0 (lo0): ");
    let peer = endless.await_error("last heard ");
    assert!(peer.contains("127.0.0.1:"), "{peer}");
    assert!(endless.await_error("records of transport loopback").contains("last "));
    // Repeats until the dump has an operation.
    let begun = "started: write_pages of 2097152 bytes";
    eventually(LIMIT, "an operation is recorded", || {
        endless.signal(Signal::USR1);
        endless.await_error("records of transport loopback");
        run(&["trace", &recording]).1.contains(begun).then_some(())
    });
    let timeline = traced(&directory, &recording);
    assert!(timeline.contains(begun), "{timeline}");
    drop(endless);

    let mut bench = bench("2s");
    let row: serde_json::Value = serde_json::from_str(&bench.line()).expect("a row");
    assert_eq!(row["verified"], true, "{row}");
    bench.succeeds();
}

#[test]
fn servers_and_senders_dump_and_go_on() {
    let into = TempDir::new().expect("a directory");
    let (server, address) =
        RunningCommand::server(&["serve", "--into", into.path().to_str().expect("UTF-8")]);
    server.signal(Signal::USR1);
    server.await_error("dump of ");
    let from = TempDir::new().expect("a directory");
    let file = path(&from, "content");
    std::fs::write(&file, vec![7; 1 << 20]).expect("write");
    let (done, _, said) = run(&["send", &file, "--to", &address, "--dump", &path(&from, "recording")]);
    assert!(done, "{said}");
    assert_eq!(std::fs::read(into.path().join("content")).expect("stored").len(), 1 << 20);
    // No operation stalled, so the recording has only its header.
    let (done, timeline, said) = run(&["trace", &path(&from, "recording")]);
    assert!(done && timeline.is_empty(), "{timeline}{said}");
}

#[test]
fn malformed_recordings_are_refused_in_one_sentence() {
    let directory = TempDir::new().expect("a directory");
    let file = path(&directory, "file");
    for (content, why) in [
        (&b"PK\x03\x04"[..], "no recording"),
        (b"mr-dump\x09", "version"),
        (b"mr-dump\x01\x09", "ends in the middle"),
    ] {
        std::fs::write(&file, content).expect("write");
        let (done, _, said) = run(&["trace", &file]);
        assert!(!done && said.lines().count() == 1 && said.contains(why), "{said}");
    }
    let (done, _, said) = run(&["trace", &path(&directory, "none")]);
    assert!(!done && said.lines().count() == 1, "{said}");
    let (done, _, said) = run(&["bench", "--in-process", "--dump", "/no/such/directory/file"]);
    assert!(!done && said.contains("cannot write dumps"), "{said}");
}

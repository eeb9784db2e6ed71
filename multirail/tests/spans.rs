//! The spans and events of an operation in a `tracing` subscriber.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::{Access, ErrorKind, FabricBuilder, SendOptions, TransportConfig};
use tracing_subscriber::filter::LevelFilter;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("log").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The log lines of a run with one operation that succeeds and one that fails, and their ids.
fn logged(level: LevelFilter) -> (Vec<String>, [String; 2]) {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let ids = tracing::subscriber::with_default(subscriber, || {
        let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
        let fabric = FabricBuilder::new().transport(loopback).caller_driven().open().expect("open");
        let (peer, _) = fabric.connect_local(&fabric).expect("connect");
        let source = fabric.alloc(4 << 20, Access::LOCAL).expect("memory");
        let target = fabric.alloc(4 << 20, Access::REMOTE_WRITE).expect("memory");
        let remote = peer.import(&target.descriptor()).expect("import");
        let mine = tracing::info_span!("request", of = "mine");
        let mut write = mine.in_scope(|| peer.write(&source, 0..4 << 20, &remote, 0)).expect("submit");
        let done = write.id().expect("posted").to_string();
        write.wait(limit::HANG).expect("write");
        // No receive is posted, so a send waits once the message ring is full.
        let options = SendOptions::new().deadline(Duration::from_millis(1));
        let mut stuck = loop {
            let send = peer.send_with(&source, 0..64, &options).expect("submit");
            if send.id().is_some() {
                break send;
            }
        };
        let failed = stuck.id().expect("posted").to_string();
        let error = stuck.wait(limit::HANG).expect_err("nobody receives");
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        peer.disconnect();
        while fabric.step().events > 0 {}
        [done, failed]
    });
    let text = String::from_utf8(log.0.lock().expect("log").clone()).expect("UTF-8");
    (text.lines().map(str::to_owned).collect(), ids)
}

#[test]
fn an_operation_is_a_span_with_its_id_inside_the_callers() {
    let (lines, [done, failed]) = logged(LevelFilter::TRACE);
    let find = |words: &[&str]| {
        let found = lines.iter().find(|line| words.iter().all(|word| line.contains(word)));
        found.unwrap_or_else(|| panic!("{words:?} in {lines:#?}"))
    };
    let (done, failed) = (format!("op={done}"), format!("op={failed}"));
    let caller = "request{of=\"mine\"}:operation{";
    find(&[
        "TRACE",
        "submitted",
        caller,
        &done,
        "operation=\"write\"",
        "bytes=4194304",
        "transport=\"loopback\"",
    ]);
    find(&["TRACE", "done", caller, &done]);
    find(&["DEBUG", "ended", &failed, "deadline exceeded", "operation=\"send\""]);
    find(&["DEBUG", "peer admitted"]);
    find(&["DEBUG", "peer is gone"]);
}

#[test]
fn without_a_subscriber_level_there_are_no_lines() {
    let (lines, _) = logged(LevelFilter::INFO);
    assert!(!lines.iter().any(|line| line.contains("operation{")), "{lines:#?}");
}

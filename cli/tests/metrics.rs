//! `--metrics ADDRESS`: counters over HTTP. `ci/metrics` has a real Prometheus scrape them.
#![cfg(all(target_os = "linux", feature = "metrics"))]

mod process;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use process::{LIMIT, RunningCommand, run};
use tempfile::TempDir;

/// The address that a command says it serves metrics at.
fn metrics_address(command: &RunningCommand) -> String {
    let said = command.await_error("serving metrics");
    said.rsplit("address=").next().expect("an address").trim().to_owned()
}

fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").expect("send");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("a page");
    page
}

#[test]
fn serve_and_both_sides_of_bench_have_metrics() {
    let into = TempDir::new().expect("a directory");
    let into = into.path().to_str().expect("UTF-8");
    let metrics = ["--metrics", "127.0.0.1:0", "-v"];
    let (files, _) = RunningCommand::server(&[&["serve", "--into", into], &metrics[..]].concat());
    assert!(scrape(&metrics_address(&files)).contains("\nmultirail_peers 0\n"));

    let (server, address) = RunningCommand::server(&[&["bench", "server"], &metrics[..]].concat());
    let load = ["bench", "client", &address, "--size", "4KiB", "--pages", "16", "--duration", "10min"];
    let client = RunningCommand::start(&[&load[..], &metrics[..]].concat());
    // What a command says is read in its order: first where the metrics are.
    let sides = [&client, &server].map(metrics_address);
    client.await_error("measuring");
    for address in sides {
        let page = scrape(&address);
        assert!(page.contains("\nmultirail_peers 1\n"), "{page}");
    }
}

#[test]
fn an_address_that_cannot_be_listened_on_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("its address").to_string();
    for (address, why) in [(taken.as_str(), "cannot listen on"), ("nonsense", "give a host and a port")] {
        let (done, _, said) = run(&["bench", "--duration", "100ms", "--metrics", address]);
        assert!(!done && said.contains(why), "{address}: {said}");
    }
}

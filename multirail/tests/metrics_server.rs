//! Metrics over HTTP, with `--features prometheus`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use multirail::metrics::MetricsServer;
use multirail::{Access, BackendChoice, ErrorKind, Fabric, Pages};

fn open() -> Fabric {
    multirail::builder(&BackendChoice::Named("loopback".into())).expect("loopback").open().expect("open")
}

fn start(fabric: &Fabric) -> MetricsServer {
    MetricsServer::start(fabric, "127.0.0.1:0").expect("a server")
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(limit::HANG)).expect("a limit");
    stream
}

/// What the server answers to these bytes.
fn answer(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(request).expect("send");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

fn scrape(address: SocketAddr) -> String {
    answer(address, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
}

#[test]
fn a_scrape_has_the_counters_of_now() {
    let (here, there) = (open(), open());
    let server = start(&here);
    let (peer, _origin) = here.connect_local(&there).expect("connect");
    let source = here.alloc(8 << 20, Access::LOCAL).expect("memory");
    let target = there.alloc(8 << 20, Access::REMOTE_WRITE).expect("memory");
    let remote = peer.import(&target.descriptor()).expect("import");
    for len in [64, 8 << 20] {
        peer.write(&source, 0..len, &remote, 0).expect("submit").wait(limit::HANG).expect("a write");
        let page = scrape(server.local_addr());
        let (head, body) = page.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        for rail in here.counters() {
            for (name, value) in
                [("bytes", rail.bytes), ("direct_bytes", rail.direct_bytes), ("posts", rail.posts)]
            {
                let (number, device) = (rail.rail, &rail.device);
                let labels =
                    format!(r#"transport="loopback",backend="loopback",rail="{number}",device="{device}""#);
                let line = format!("multirail_rail_{name}_total{{{labels}}} {value}\n");
                assert!(body.contains(&line), "{line}: {body}");
            }
        }
        assert!(body.contains("\nmultirail_peers 1\n"), "{body}");
    }
}

/// `promtool check metrics` asks for a help text.
#[test]
fn every_metric_has_help_and_a_type() {
    let fabric = open();
    let page = scrape(start(&fabric).local_addr());
    let samples = page.lines().filter_map(|line| line.strip_prefix("multirail_"));
    let names: std::collections::BTreeSet<_> =
        samples.filter_map(|line| line.split(['{', ' ']).next()).collect();
    assert_eq!(names.len(), 18 + 3 + 7, "{page}");
    let parts = ["_bucket", "_sum", "_count"];
    for name in names {
        let name = parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        for comment in [format!("# HELP multirail_{name} "), format!("# TYPE multirail_{name} ")] {
            assert!(page.contains(&comment), "{comment}: {page}");
        }
    }
}

/// Peers have metrics only if asked, those with the most bytes; what a rail is, and what registrations took.
#[test]
fn gauges_registrations_and_peers() {
    let (here, there, beside) = (open(), open(), open());
    let (peer, _) = here.connect_local(&there).expect("connect");
    let (idle, _) = here.connect_local(&beside).expect("connect");
    let source = here.alloc(8 << 20, Access::LOCAL).expect("memory");
    let target = there.alloc(8 << 20, Access::REMOTE_WRITE).expect("memory");
    let remote = peer.import(&target.descriptor()).expect("import");
    peer.write(&source, 0..8 << 20, &remote, 0).expect("submit").wait(limit::HANG).expect("written");
    assert!(!scrape(start(&here).local_addr()).contains("multirail_peer_"));
    let page = |most| {
        let server = MetricsServer::start_with_peers(&here, "127.0.0.1:0", most).expect("a server");
        scrape(server.local_addr())
    };
    let one = page(1);
    let line = |name: &str, number: u64, value: u64| {
        let [counters] =
            &here.peer_counters().into_iter().filter(|of| of.peer == number).collect::<Vec<_>>()[..]
        else {
            panic!("no counters of peer {number}")
        };
        let host = &counters.host;
        format!("multirail_peer_{name}_total{{peer=\"{number}\",host=\"{host}\",address=\"\"}} {value}\n")
    };
    let (busy, quiet) = (peer.id().number(), idle.id().number());
    assert!(
        one.contains(&line("bytes", busy, 8 << 20)) && !one.contains(&format!("peer=\"{quiet}\"")),
        "{one}"
    );
    assert!(one.contains(&line("errors", busy, 0)), "{one}");
    let both = page(9);
    assert!(
        both.contains(&line("bytes", busy, 8 << 20)) && both.contains(&line("operations", quiet, 0)),
        "{both}"
    );
    for expected in [
        "multirail_registrations_total 1\n",
        "multirail_registered_bytes_total 8388608\n",
        "multirail_staged_bytes_total{transport=\"loopback\"} 0\n",
    ] {
        assert!(both.contains(expected), "{expected}: {both}");
    }
    let seconds = here.registration_counters().time.as_secs_f64();
    assert!(
        seconds > 0.0 && both.contains(&format!("multirail_registration_seconds_total {seconds}\n")),
        "{both}"
    );
    let labels =
        |rail| format!("{{transport=\"loopback\",backend=\"loopback\",rail=\"{rail}\",device=\"lo{rail}\"}}");
    for rail in 0..2 {
        assert!(both.contains(&format!("multirail_rail_in_service{} 1\n", labels(rail))), "{both}");
        assert!(both.contains(&format!("multirail_rail_outstanding{} 0\n", labels(rail))), "{both}");
    }
    pollster::block_on(here.drain_device("lo1").expect("a device")).expect("drained");
    let page = page(0);
    assert!(page.contains(&format!("multirail_rail_in_service{} 0\n", labels(1))), "{page}");
}

/// The buckets of a histogram add up, the last one has all operations, and the sum is their time.
#[test]
fn latencies_are_histograms_by_size() {
    let (here, there) = (open(), open());
    let (peer, _origin) = here.connect_local(&there).expect("connect");
    let source = here.alloc(1 << 20, Access::LOCAL).expect("memory");
    let target = there.alloc(1 << 20, Access::REMOTE_WRITE).expect("memory");
    let remote = peer.import(&target.descriptor()).expect("import");
    let pages = Pages::new((0..256).rev().collect::<Vec<u32>>());
    for _ in 0..3 {
        let mut op = peer.write_pages(&source, &pages, &remote, &pages, 4096).expect("submit");
        op.wait(limit::HANG).expect("written");
    }
    let page = scrape(start(&here).local_addr());
    let prefix = "multirail_operation_latency_seconds";
    let value = |what: &str, more: &str| -> f64 {
        let sample = format!("{prefix}_{what}{{transport=\"loopback\",size=\"1MiB\"{more}}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&sample));
        line.unwrap_or_else(|| panic!("{sample}: {page}")).parse().expect("a number")
    };
    let count = value("count", "");
    let counters = here.operation_counters();
    let size = counters[0].sizes.iter().find(|size| size.name() == "1MiB").expect("the class");
    assert!(count >= 3.0 && count == size.count() as f64, "{page}");
    assert_eq!(value("bucket", ",le=\"+Inf\""), count);
    assert_eq!(value("sum", ""), size.time.as_secs_f64());
    let buckets: Vec<f64> = page
        .lines()
        .filter(|line| line.starts_with(&format!("{prefix}_bucket")) && line.contains("\"1MiB\""))
        .map(|line| line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a count"))
        .collect();
    assert!(buckets.len() == 25 && buckets.is_sorted(), "{page}");
    assert_eq!(page.matches("size=\"1MiB\"").count(), 25 + 3);
}

#[test]
fn other_requests_get_an_answer_that_says_why() {
    let fabric = open();
    let server = start(&fabric);
    let ask = |request: &[u8]| answer(server.local_addr(), request);
    let head = ask(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(ask(b"GET /metrics?a=b HTTP/1.0\r\n\r\n").contains("multirail_peers"));
    assert!(ask(b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(ask(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").starts_with("HTTP/1.1 400 "));
    let long = [b"GET /metrics HTTP/1.1\r\nA: ".as_slice(), &[b'a'; 8 << 10]].concat();
    assert!(ask(&long[..8 << 10]).starts_with("HTTP/1.1 400 "));
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
    assert!(ask(many.as_bytes()).starts_with("HTTP/1.1 400 "));
}

#[test]
fn a_client_that_says_nothing_or_leaves_does_not_stop_the_server() {
    let fabric = open();
    let server = start(&fabric);
    let silent = connect(server.local_addr());
    drop(connect(server.local_addr()));
    let mut cut = connect(server.local_addr());
    cut.write_all(b"GET /met").expect("send");
    drop(cut);
    assert!(scrape(server.local_addr()).contains("multirail_peers 0"));
    drop(silent);
}

#[test]
fn a_server_ends_when_it_is_dropped_and_outlives_its_fabric() {
    let fabric = open();
    let server = start(&fabric);
    let address = server.local_addr();
    let taken = MetricsServer::start(&fabric, address).err().expect("a refusal");
    assert_eq!(taken.kind(), ErrorKind::Busy, "{taken}");
    let nonsense = MetricsServer::start(&fabric, "nonsense").err().expect("a refusal");
    assert_eq!(nonsense.kind(), ErrorKind::InvalidRequest, "{nonsense}");
    drop(fabric);
    assert!(scrape(address).starts_with("HTTP/1.1 503 "));
    drop(server);
    assert!(TcpStream::connect(address).is_err(), "somebody listens at {address}");
}

/// One that listens on all addresses is reached over the loopback address when it ends.
#[test]
fn servers_on_all_addresses_end() {
    let fabric = open();
    for all in ["0.0.0.0:0", "[::]:0"] {
        let Ok(server) = MetricsServer::start(&fabric, all) else {
            eprintln!("skipped: {all}: this machine has no such addresses");
            continue;
        };
        drop(server);
    }
}

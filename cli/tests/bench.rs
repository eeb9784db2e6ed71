//! `multirail bench`: its output, and the verification of every byte.
#![cfg(target_os = "linux")]

mod process;

use std::path::Path;

use process::{LIMIT, RunningCommand, eventually, multirail, run};
use rustix::process::Signal;
use serde_json::Value;

const KEYS: &str = "backend path op src dst size pages regions contiguous inflight gbytes_per_s gbps ops_per_s p50_us p99_us p999_us \
                    max_us post_us wrs merged verified limit_gbytes_per_s limit_p50_us percent_of_limit rails imbalance_percent";

fn row(arguments: &[&str]) -> serde_json::Value {
    let (done, rows, said) = run(&[&["bench", "--json", "--duration", "50ms"], arguments].concat());
    assert!(done, "{said}");
    assert_eq!(rows.lines().count(), 1, "{rows}");
    serde_json::from_str(&rows).expect("JSON")
}

fn plausible(row: &serde_json::Value) {
    let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    assert!(
        number("gbytes_per_s") > 0.0 && number("limit_gbytes_per_s") > 0.0 && number("ops_per_s") > 0.0,
        "{row}"
    );
    // All are rounded to four decimals.
    assert!((number("gbps") - 8.0 * number("gbytes_per_s")).abs() < 1e-3, "{row}");
    let percent = number("gbytes_per_s") / number("limit_gbytes_per_s") * 100.0;
    let rounding = 1e-4 * (percent + 100.0) / number("limit_gbytes_per_s") + 1e-4;
    assert!((percent - number("percent_of_limit")).abs() < rounding, "{row}");
    assert!(number("p50_us") <= number("p99_us") && number("p99_us") <= number("p999_us"), "{row}");
    assert!(number("p999_us") <= number("max_us") && number("max_us") > 0.0, "{row}");
    assert!(number("post_us") >= 0.0 && number("post_us") <= number("max_us"), "{row}");
}

#[test]
fn two_processes_with_all_keys() {
    let (done, rows, said) = run(&["bench", "--json", "--duration", "50ms", "--pages", "64"]);
    assert!(done, "{said}");
    let mut at = 0;
    for key in KEYS.split_whitespace() {
        let found =
            rows[at..].find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("{key}, in order, in {rows}"));
        at += found;
    }
    let row: serde_json::Value = serde_json::from_str(&rows).expect("JSON");
    assert_eq!(row.as_object().expect("an object").len(), KEYS.split_whitespace().count());
    assert_eq!((&row["backend"], &row["op"]), (&"loopback".into(), &"write-pages".into()));
    assert_eq!((&row["size"], &row["pages"], &row["verified"]), (&65536.into(), &64.into(), &true.into()));
    let rails = row["rails"].as_array().expect("a list");
    let bytes = rails.iter().filter_map(|rail| rail["bytes"].as_u64()).sum::<u64>();
    assert!(bytes >= 64 * 65536 && rails.iter().all(|rail| rail["device"].is_string()), "{row}");
    plausible(&row);
}

#[test]
fn every_operation_in_both_arrangements() {
    for op in ["write", "write-pages", "write-list", "write-imm", "read", "read-pages", "read-list", "send"] {
        for arrangement in [&["--in-process"][..], &[]] {
            for inflight in ["1", "8"] {
                let load = ["--op", op, "--size", "4097", "--pages", "33", "--inflight", inflight];
                let row = row(&[&load, arrangement].concat());
                assert_eq!(row["op"], op);
                assert_eq!(row["verified"], true, "{row}");
                plausible(&row);
            }
        }
    }
}

/// Each page takes a work request, or shares one with the page before it.
fn counts_every_page(row: &Value) {
    let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    assert_eq!(number("wrs") + number("merged"), number("pages"), "{row}");
}

#[test]
fn neighbours_in_lists_share_work_requests() {
    for op in ["write-list", "read-list"] {
        for (share, wrs) in [("0", 640), ("0.5", 640 - 40 * 7), ("1", 80)] {
            let load = ["--op", op, "--size", "4KiB", "--pages", "640", "--contiguous", share];
            let row = row(&load);
            assert_eq!((&row["regions"], &row["verified"]), (&80.into(), &true.into()), "{row}");
            assert_eq!(row["contiguous"].as_f64(), share.parse().ok(), "{row}");
            assert_eq!(row["wrs"].as_f64(), Some(f64::from(wrs)), "{row}");
            counts_every_page(&row);
        }
    }
    for op in ["write-pages", "read-pages"] {
        let row = row(&["--op", op, "--size", "4KiB", "--pages", "100", "--contiguous", "0.3"]);
        assert_eq!((&row["regions"], &row["contiguous"]), (&1.into(), &0.24.into()), "{row}");
        counts_every_page(&row);
    }
}

#[test]
fn lists_and_scattered_reads_over_libfabric() {
    let tcp = ["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1"];
    let (installed, _, said) = run(&[&["info"], &tcp[..]].concat());
    if !installed {
        println!("skipped: {said}");
        return;
    }
    for op in ["read-pages", "write-list", "read-list"] {
        let row = row(&[&["--op", op, "--size", "4097", "--pages", "100"], &tcp[..]].concat());
        assert_eq!((&row["backend"], &row["op"]), (&"efa".into(), &op.into()));
        assert_eq!(row["verified"], true, "{row}");
        plausible(&row);
        counts_every_page(&row);
    }
}

/// Bench goes on without the rail, and every byte is right.
fn survives_a_lost_rail(device: &str, arguments: &[&str]) {
    let fail = format!("{device}@0.1");
    let load = ["--duration", "400ms", "--inflight", "4", "--fail-rail", &fail];
    let (done, rows, said) = run(&[&["bench", "--json"], &load[..], arguments].concat());
    assert!(done, "{said}");
    let row: Value = serde_json::from_str(&rows).expect("JSON");
    assert_eq!((&row["verified"], &row["failed_rail"]), (&true.into(), &device.into()), "{row}");
    let replayed = row["replayed"].as_u64().expect("a number");
    assert!(replayed > 0, "{row}");
    assert_eq!(row["replayed_bytes"].as_u64(), Some(replayed << 16), "{row}");
    let carried = |name: &str| {
        let rails = row["rails"].as_array().expect("rails");
        rails.iter().find(|rail| rail["device"] == name).and_then(|rail| rail["bytes"].as_u64())
    };
    assert!(carried(device) > Some(0), "{row}");
}

#[test]
fn a_lost_rail_ends_no_bench() {
    for op in ["write-pages", "read-pages", "write-imm", "write-list"] {
        survives_a_lost_rail("lo2", &["--op", op, "--backend", "loopback"]);
        survives_a_lost_rail("lo3", &["--op", op, "--backend", "loopback", "--in-process"]);
    }
    let (server, address) = RunningCommand::server(&["bench", "server", "--backend", "loopback"]);
    let client = [
        "bench",
        "client",
        &address,
        "--backend",
        "loopback",
        "--duration",
        "300ms",
        "--fail-rail",
        "lo1@0.1",
    ];
    let (done, table, said) = run(&client);
    assert!(done && table.contains("lo1 was lost after 0.1 s") && table.contains("yes"), "{said}{table}");
    drop(server);
}

#[test]
fn a_lost_rail_ends_no_bench_over_libfabric() {
    let tcp = ["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1", "--domains", "4"];
    let (installed, _, said) = run(&[&["info"], &tcp[..]].concat());
    if !installed {
        println!("skipped: {said}");
        return;
    }
    survives_a_lost_rail("lo.2", &tcp);
}

#[test]
fn a_rail_that_cannot_fail_is_refused() {
    let tcp = ["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1"];
    let has_tcp = run(&[&["info"], &tcp[..]].concat()).0;
    for (fail, also, words) in [
        ("lo0@0.1", &["--backend", "loopback"][..], "carries the messages of the bench"),
        ("lo4@0.1", &["--backend", "loopback"], "there are lo0, lo1, lo2, lo3"),
        ("lo1@3", &["--backend", "loopback"], "the measurement takes 2 s"),
        ("lo1", &["--backend", "loopback"], "like lo1@0.5"),
        ("lo@0.1", &tcp, "alone in its rail group"),
    ] {
        if also == tcp && !has_tcp {
            println!("skipped: libfabric's tcp is not here");
            continue;
        }
        let output =
            multirail(&[&["bench", "--fail-rail", fail], also].concat()).output().expect("start multirail");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words), "{fail}: {said}");
    }
    // Messages use one rail alone.
    let send = ["bench", "--backend", "loopback", "--duration=200ms", "--op=send", "--fail-rail=lo1@0.1"];
    let (done, _, said) = run(&send);
    assert!(!done && said.contains("no request was outstanding there"), "{said}");
}

#[test]
fn a_path_that_is_not_allowed_is_refused_at_once() {
    let row = row(&["--pages", "16", "--path", "memory-copy,rdma"]);
    assert_eq!(row["path"], "mapped memory", "{row}");
    for (paths, code, words) in [
        (
            "rdma",
            1,
            "bytes would go by memory-copy over transport loopback, and the path policy allows rdma alone",
        ),
        ("nvlink", 2, "there is no path \"nvlink\"; the paths are rdma, gpu-copy"),
    ] {
        let arguments = ["bench", "--json", "--backend", "loopback", "--pages", "16", "--path", paths];
        let output = multirail(&arguments).output().expect("start");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{paths}: {said}");
        assert!(said.contains(words) && output.stdout.is_empty(), "{paths}: {said}");
    }
}

#[test]
fn loads_that_do_not_fit_their_operation_are_refused() {
    for (load, words) in [
        (&["--op", "write", "--regions", "2"][..], "write uses one region on each side; remove --regions"),
        (&["--op", "read-pages", "--regions", "2"], "read-pages uses one region"),
        (
            &["--op", "read", "--contiguous", "0.5"],
            "read moves one page, which is no run; remove --contiguous",
        ),
        (&["--op", "read-list", "--contiguous", "1.5"], "write a share between 0 and 1"),
        (&["--op", "read-list", "--contiguous", "0.5", "--pages", "8"], "less than a run of 8 pages"),
        (&["--op", "write-list", "--pages", "16", "--regions", "17"], "use at most 16 --regions"),
        (&["--op", "write-list", "--regions", "0"], "must be between 1 and 4096"),
    ] {
        let output = multirail(&[&["bench", "--json"], load].concat()).output().expect("start");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{load:?}: {said}");
        assert!(said.contains(words) && output.stdout.is_empty(), "{load:?}: {said}");
    }
}

#[test]
fn odd_sizes_and_hints() {
    for load in [
        &["--size", "1", "--pages", "1"][..],
        &["--size", "3MiB", "--pages", "2"],
        &["--cold", "--pages", "8"],
    ] {
        assert_eq!(row(load)["verified"], true);
    }
    assert_eq!(row(&["--no-verify", "--pages", "4"])["verified"], false);
    let row = row(&["--no-limit", "--pages", "4"]);
    for key in ["limit_gbytes_per_s", "limit_p50_us", "percent_of_limit"] {
        assert!(row[key].is_null(), "{row}");
    }
    assert!(row["gbytes_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
}

#[test]
fn kinds_of_memory() {
    for arrangement in [&["--in-process"][..], &[]] {
        for op in ["write-pages", "read", "read-list"] {
            let places = ["--src", "host-pageable", "--dst", "host-pageable", "--op", op];
            let row = row(&[&places[..], &["--size", "100001", "--pages", "17"], arrangement].concat());
            assert_eq!((&row["src"], &row["dst"]), (&"host-pageable".into(), &"host-pageable".into()));
            assert_eq!(row["verified"], true, "{row}");
        }
    }
    let (done, _, said) = run(&["bench", "--dst", "gpu"]);
    assert!(!done && said.contains("use host, host-pageable, host-pinned or gpu:N"), "{said}");
    let (done, _, said) = run(&["bench", "--dst", "gpu:0", "--op", "send"]);
    assert!(!done && said.contains("remove --dst"), "{said}");
    let (done, _, said) = run(&["bench", "--gpu-blocks", "0"]);
    assert!(!done && said.contains("--gpu-blocks"), "{said}");
}

/// With GPUs every pair of memories is measured. Without a GPU the error names what is missing.
#[test]
fn memory_of_gpus() {
    let missing = multirail::cuda::Device::all().err();
    if let Some(why) = &missing {
        println!("skipped: {why}");
    }
    let pairs = [("gpu:0", "host"), ("host", "gpu:0"), ("host-pinned", "gpu:0"), ("gpu:0", "gpu:0")];
    let loads =
        [("write-pages", "4096"), ("read", "100001"), ("write-list", "4096"), ("read-list", "100001")];
    for ((src, dst), (op, size)) in pairs.into_iter().flat_map(|pair| loads.map(|load| (pair, load))) {
        for arrangement in [&["--in-process"][..], &[]] {
            let load = ["--src", src, "--dst", dst, "--op", op, "--size", size, "--pages", "64"];
            if let Some(why) = &missing {
                let (done, _, said) = run(&[&["bench"], &load[..], arrangement].concat());
                assert!(!done && said.contains(why.context()), "{said}");
                continue;
            }
            let row = row(&[&load, arrangement].concat());
            assert_eq!(
                (&row["src"], &row["dst"], &row["verified"]),
                (&src.into(), &dst.into(), &true.into())
            );
            plausible(&row);
        }
    }
}

#[test]
fn a_sweep_has_a_row_per_size() {
    let (done, rows, said) = run(&["bench", "--json", "--duration", "10ms", "--sweep", "--pages", "4"]);
    assert!(done, "{said}");
    let sizes: Vec<u64> = rows
        .lines()
        .map(|row| {
            serde_json::from_str::<serde_json::Value>(row).expect("JSON")["size"].as_u64().expect("a size")
        })
        .collect();
    assert_eq!((sizes[0], sizes[sizes.len() - 1]), (8, 4 << 20));
    assert!(sizes.is_sorted());
}

#[test]
fn a_table_without_json() {
    let (done, table, said) = run(&["bench", "--duration", "50ms", "--pages", "16"]);
    assert!(done, "{said}");
    for word in [
        "write-pages over loopback",
        "GB/s",
        "Gbps",
        "p99.9 µs",
        "post µs",
        "WRs/op",
        "% of memcpy",
        "64 KiB",
        "yes",
    ] {
        assert!(table.contains(word), "{word} in {table}");
    }
}

/// Ends a client during its second size with `end`. Returns its output, its errors and its exit code.
fn cut_short(end: impl FnOnce(&mut RunningCommand, &RunningCommand)) -> (String, Vec<String>, Option<i32>) {
    let (mut server, address) = RunningCommand::server(&["bench", "server", "--backend", "loopback"]);
    let sweep = ["--backend", "loopback", "--sweep", "--duration", "300ms", "--pages", "4"];
    let mut client = RunningCommand::start(&[&["bench", "client", &address], &sweep[..]].concat());
    for size in [8, 64] {
        assert_eq!(server.json()["size"], size);
    }
    end(&mut server, &client);
    let (status, said) = client.end_within(LIMIT);
    let mut table = String::new();
    while let Some(line) = client.next_line() {
        table += &(line + "\n");
    }
    (table, said, status.code())
}

#[test]
fn after_a_signal_the_measured_rows_are_printed() {
    for (signal, name, code) in [(Signal::TERM, "SIGTERM", 143), (Signal::INT, "SIGINT", 130)] {
        let (table, said, ended) = cut_short(|_, client| client.signal(signal));
        assert!(table.lines().any(|line| line.trim_start().starts_with("8 B")), "{table}{said:?}");
        assert_eq!(said.len(), 1, "{said:?}");
        // More than the first one, if this process was held up before it sent the signal.
        let measured = said[0].strip_prefix(&format!("multirail: interrupted by {name}: "));
        let measured =
            measured.and_then(|said| said.split_once(" of 11 sizes measured")).map(|(count, _)| count);
        let measured: usize =
            measured.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{said:?}"));
        let whole = table.lines().filter(|line| line.contains("yes")).count();
        assert!(measured >= 1 && whole == measured, "{table}{said:?}");
        assert_eq!(ended, Some(code));
    }
}

#[test]
fn after_the_servers_death_the_measured_rows_are_printed() {
    let (table, said, ended) = cut_short(|server, _| server.signal(Signal::KILL));
    assert!(table.lines().any(|line| line.trim_start().starts_with("8 B")), "{table}{said:?}");
    assert!(said.last().is_some_and(|last| last.starts_with("multirail: ")), "{said:?}");
    assert_eq!(ended, Some(1));
}

#[test]
fn a_signal_leaves_no_server_behind() {
    let bench = RunningCommand::start(&["bench", "--backend", "loopback", "--duration", "60s", "-v"]);
    bench.await_error("measuring");
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", bench.id()));
    let Ok(server) = children().map(|children| children.trim().to_owned()) else {
        println!("skipped: this kernel does not tell the children of a process");
        return;
    };
    assert!(!server.is_empty());
    bench.signal(Signal::TERM);
    let mut bench = bench;
    let (status, _) = bench.end_within(LIMIT);
    assert_eq!(status.code(), Some(143));
    eventually(LIMIT, "the server ends", || (!Path::new(&format!("/proc/{server}")).exists()).then_some(()));
}

#[test]
fn two_terminals() {
    let (mut server, address) = RunningCommand::server(&["bench", "server"]);
    let (done, rows, said) =
        run(&["bench", "client", &address, "--json", "--duration", "50ms", "--pages", "16"]);
    assert!(done, "{said}");
    assert!(rows.contains("\"verified\":true"), "{rows}");
    assert_eq!(server.json()["ready"], "write-pages");
    server.succeeds();
}

fn ladder(options: &[&str]) -> Vec<Value> {
    let (done, rows, said) = run(&[&["bench", "ladder", "--json", "--duration", "20ms"], options].concat());
    assert!(done, "{said}");
    rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect()
}

#[test]
fn eight_rungs_carry_pages() {
    for options in [&["--null"][..], &["--devices", "2", "--groups", "2"]] {
        let rows = ladder(options);
        assert_eq!(rows.len(), 8);
        for (height, row) in rows.iter().enumerate() {
            assert_eq!(row["rung"], height + 1);
            assert!(row["work_requests"].as_u64().is_some_and(|requests| requests >= 1024), "{row}");
        }
    }
}

#[test]
fn batching_and_lazy_posting_save_instructions() {
    if std::process::Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: valgrind is not installed");
        return;
    }
    let rows = ladder(&["--null", "--devices", "8", "--groups", "1", "--instructions"]);
    let counts: Vec<_> =
        rows.iter().map(|row| row["instructions_per_wr"].as_f64().expect("a count")).collect();
    assert!(counts[6] < counts[5] / 2.0, "batching: {counts:?}");
    assert!(counts[7] < counts[6] * 0.8, "lazy posting: {counts:?}");
}

#[test]
fn invalid_options_are_refused() {
    for (options, words) in [
        (&["--null", "--devices", "0"][..], "--devices must be between"),
        (&["--null", "--devices", "2", "--groups", "3"], "--groups between"),
        (&["--null", "--size", "2MiB"], "--size must be between"),
        (&["--backend", "nonesuch"], "unknown backend"),
    ] {
        let (done, _, said) = run(&[&["bench", "ladder"], options].concat());
        assert!(!done && said.contains(words), "{options:?}: {said}");
    }
}

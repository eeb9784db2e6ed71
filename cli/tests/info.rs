//! `multirail info`, the choice of a backend, and general behaviour of the command.
#![cfg(unix)]

mod process;

use std::net::{TcpListener, TcpStream};

use process::{RunningCommand, multirail, run};
use serde_json::Value;

/// A missing libfabric.
const NO_LIBFABRIC: &str = "/nowhere/libfabric.so.1";
/// A missing libibverbs.
const NO_LIBIBVERBS: &str = "/nowhere/libibverbs.so.1";

#[test]
fn info_lists_three_backends_and_gpu_memory() {
    let mut info = multirail(&["info", "--json"]);
    info.env("MULTIRAIL_LIBFABRIC", NO_LIBFABRIC).env("MULTIRAIL_LIBIBVERBS", NO_LIBIBVERBS);
    let output = info.output().expect("start");
    assert!(output.status.success());
    let rows: Vec<serde_json::Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|row| serde_json::from_str(row).expect("JSON"))
        .collect();
    let names: Vec<_> = rows.iter().map(|row| row["backend"].as_str().expect("name")).collect();
    assert_eq!(names, ["loopback", "efa", "verbs", "GPU memory"]);
    assert!(rows[3]["available"] == true || rows[3]["reason"].is_string(), "{}", rows[3]);
    assert_eq!(rows[0]["available"], true);
    assert_eq!(rows[0]["devices"][0]["name"], "lo0");
    assert!(rows[0]["send_depth"].as_u64() > Some(0));
    assert!(rows[0]["groups"].as_array().is_some_and(|groups| !groups.is_empty()), "{}", rows[0]);
    for (row, why) in rows[1..3].iter().zip([NO_LIBFABRIC, NO_LIBIBVERBS]) {
        assert_eq!(row["available"], false);
        assert!(row["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{row}");
        assert!(row["remedy"].is_string());
    }
    for (row, package) in rows[1..3].iter().zip(["libfabric1", "libibverbs1"]) {
        assert!(row["remedy"].as_str().is_some_and(|remedy| remedy.contains(package)), "{row}");
    }
}

#[test]
fn info_prints_a_table() {
    let (done, table, _) = run(&["info"]);
    assert!(done);
    for word in ["loopback", "efa", "verbs", "available", "fix"] {
        assert!(table.contains(word), "{word} in {table}");
    }
}

/// The loop of cold copies is a setting on x86_64 alone, but each system checks its value.
#[test]
fn info_names_the_loop_of_cold_copies() {
    let info = |given: &str| {
        let mut info = multirail(&["info", "--backend", "loopback"]);
        let output = info.env("MULTIRAIL_STREAM_LOOP", given).output().expect("start");
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), said.concat().split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let (done, said) = info("4x100");
    assert!(!done && said.contains("MULTIRAIL_STREAM_LOOP is \"4x100\""), "{said}");
    for (given, shown) in [("2x512", "2 streams in bursts of 512 B"), ("", "streams in bursts of")] {
        let (done, said) = info(given);
        assert!(done && (said.contains(shown) || cfg!(not(target_arch = "x86_64"))), "{said}");
    }
}

#[test]
fn there_is_no_fallback_backend() {
    for (name, says) in [("tcp", "unknown backend"), ("verbs", NO_LIBIBVERBS), ("", "empty")] {
        for arguments in [&["--backend", name, "bench", "--in-process"][..], &["bench", "--in-process"][..]] {
            let mut command = multirail(arguments);
            command.env("MULTIRAIL_LIBIBVERBS", NO_LIBIBVERBS);
            if arguments.len() == 2 {
                if name.is_empty() {
                    continue; // an empty variable is an unset one
                }
                command.env("MULTIRAIL_BACKEND", name);
            }
            let output = command.output().expect("start");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{name}");
            assert!(said.contains(says), "{said}");
            if !name.is_empty() {
                assert_eq!(said.lines().count(), 1, "{said}");
                assert!(said.contains("loopback, efa, verbs"), "{said}");
            }
            assert!(output.stdout.is_empty());
        }
    }
}

/// A requested backend that is unavailable is an error, which names it.
#[test]
fn an_unavailable_backend_is_an_error() {
    for (arguments, code, says) in [
        (&["info", "--token-file", "/nope"][..], 1, "/nope"),
        (&["info", "--backend", "efa"], 1, NO_LIBFABRIC),
        (&["info", "--backend", "carrier"], 1, "unknown backend"),
        (&["info", "--provider", "tcp"], 1, NO_LIBFABRIC),
        (&["info", "--backend", "loopback", "--provider", "tcp"], 1, "options of the backend efa"),
        (&["explain", "--token-file", "/nope"], 1, "/nope"),
        (&["explain", "--backend", "efa"], 1, NO_LIBFABRIC),
        (&["doctor", "--token-file", "/nope"], 2, "/nope"),
        (&["bench", "--provider", "tcp"], 1, NO_LIBFABRIC),
        (&["bench", "ladder", "--null", "--backend", "efa"], 1, "--null"),
        (&["bench", "ladder", "--token-file", "/nope"], 2, "--token-file or --tls-... has no effect"),
        (&["topo", "--token-file", "/nope"], 2, "--token-file or --tls-... has no effect"),
        (&["topo", "--dump", "file"], 2, "--dump has no effect"),
        (&["simulate", "--node", "::1"], 2, "--domains or --node has no effect"),
        (&["simulate", "--provider", "tcp"], 1, "does not know what the provider tcp costs"),
        (&["trace", "--provider", "tcp", "file"], 2, "--provider has no effect"),
        (&["simulate", "--token-file", "/nope"], 2, "--token-file or --tls-... has no effect"),
        (&["trace", "--json", "file"], 2, "--json has no effect"),
    ] {
        let mut command = multirail(arguments);
        command.env("MULTIRAIL_LIBFABRIC", NO_LIBFABRIC).env("MULTIRAIL_LIBIBVERBS", NO_LIBIBVERBS);
        let output = command.output().expect("start");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.starts_with("multirail: ") && said.contains(says), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

/// The same for `doctor`, whose report still has all other findings.
#[test]
fn doctor_reports_a_missing_provider() {
    let mut command = multirail(&["doctor", "--json", "--provider", "tcp"]);
    let output = command.env("MULTIRAIL_LIBFABRIC", NO_LIBFABRIC).output().expect("start");
    let rows = String::from_utf8_lossy(&output.stdout).into_owned();
    let problem = rows.lines().find(|row| row.contains("\"backends\"") && row.contains("\"problem\""));
    assert!(problem.is_some_and(|row| row.contains(NO_LIBFABRIC)), "{rows}");
    assert_eq!(output.status.code(), Some(2));
}

/// Without a common transport, the error lists what each side offers, and options that would work.
#[test]
fn no_common_transport_lists_offers_and_options() {
    let (installed, _, said) = run(&["info", "--backend", "efa", "--provider", "tcp"]);
    if !installed {
        println!("skipped: {said}");
        return;
    }
    let (_server, address) = RunningCommand::server(&[
        "bench",
        "server",
        "--backend",
        "efa",
        "--provider",
        "tcp",
        "--node",
        "127.0.0.1",
    ]);
    let (done, _, said) = run(&["bench", "client", &address, "--backend", "loopback"]);
    assert!(!done && said.contains("this side offers loopback; the peer offers efa"), "{said}");
    assert!(said.contains("start both with --backend efa --provider tcp"), "{said}");
    // With these options they connect.
    let meet = ["--backend", "efa", "--provider", "tcp", "--node", "127.0.0.1"];
    let (mut server, address) = RunningCommand::server(&[&["bench", "server"], &meet[..]].concat());
    let (done, _, said) =
        run(&[&["bench", "client", &address, "--duration", "20ms", "--pages", "4"], &meet[..]].concat());
    assert!(done, "{said}");
    server.succeeds();
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut command = multirail(&["info"]);
    let (reader, writer) = std::io::pipe().expect("pipe");
    drop(reader);
    let output = command.stdout(writer).output().expect("start");
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn invalid_arguments_are_refused_before_anything_runs() {
    for arguments in [
        &["bench", "--size", "64KB"][..],
        &["bench", "--size", "0"],
        &["bench", "--pages", "0"],
        &["bench", "--size", "1GiB", "--pages", "1000000"],
        &["bench", "--inflight", "1000000"],
        &["bench", "--duration", "0s"],
        &["send", "--to", "127.0.0.1:1", "/"],
        &["send", "--to", "127.0.0.1:1", "no such file"],
        &["serve", "--into", "no such directory"],
    ] {
        let (done, _, said) = run(arguments);
        assert!(!done, "{arguments:?}");
        assert!(!said.contains("panicked"), "{said}");
        assert!(!said.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_missing_server_is_one_sentence() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    // The connection holds its own port, so that no other program can listen on it.
    let connection = TcpStream::connect(listener.local_addr().expect("its address")).expect("connect");
    let closed = connection.local_addr().expect("its address").to_string();
    let (done, _, said) = run(&["bench", "client", &closed]);
    assert!(!done);
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// The output of `info` for loopback with two devices, or its error.
fn loopback(variables: &[(&str, &str)]) -> Result<Value, String> {
    let mut info = multirail(&["info", "--backend", "loopback", "--json"]);
    info.env("MULTIRAIL_LOOPBACK_THREADS", "2").envs(variables.iter().copied());
    let output = info.output().expect("start");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row: Value = serde_json::from_str(text.lines().next().ok_or(said)?).expect("JSON");
    match row["available"] == true {
        true => Ok(row),
        false => Err(row["reason"].to_string()),
    }
}

#[test]
fn listed_devices_are_driven_together() {
    let apart = loopback(&[]).unwrap();
    assert_eq!(apart["groups"].as_array().map(Vec::len), Some(2));
    let together = loopback(&[("MULTIRAIL_RAIL_GROUPS", "lo1,lo0")]).unwrap();
    assert_eq!(together["groups"].as_array().map(Vec::len), Some(1));
    let core = topology::Cpus::of_this_thread().unwrap().0.first().copied().unwrap();
    let list = format!("lo1@{core}");
    let first = loopback(&[("MULTIRAIL_RAIL_GROUPS", &list)]).unwrap();
    let group = &first["groups"][0];
    assert_eq!((&group["devices"][0], &group["core"]), (&Value::from("lo1"), &Value::from(core)));
    assert_eq!(first["groups"][1]["devices"][0], "lo0");
}

#[test]
fn invalid_variables_are_named() {
    for (variable, value, says) in [
        ("MULTIRAIL_RAIL_GROUPS", "lo0,,lo1", "a name is missing"),
        ("MULTIRAIL_RAIL_GROUPS", "lo7", "\\\"lo7\\\""),
        ("MULTIRAIL_RAIL_GROUPS", "lo0@99999", "CPU 99999"),
        ("MULTIRAIL_GPUS", "gpu0", "gpu0"),
        ("MULTIRAIL_TOPOLOGY", "file:/nowhere/machine.toml", "/nowhere/machine.toml"),
    ] {
        let refused = loopback(&[(variable, value)]).unwrap_err();
        assert!(refused.contains(says), "{variable}={value}: {refused}");
    }
}

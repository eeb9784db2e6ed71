//! `multirail doctor`: one finding per line, the worst level in the exit code, and the findings of a restricted
//! environment.
#![cfg(target_os = "linux")]

mod process;

use std::collections::BTreeSet;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use process::multirail;
use serde_json::Value;

/// A command that uses the system's libraries.
fn doctor(arguments: &[&str]) -> Command {
    let mut command = multirail(&[&["doctor", "--json"], arguments].concat());
    command.env_remove("MULTIRAIL_LIBFABRIC").env_remove("MULTIRAIL_LIBIBVERBS");
    command
}

/// The findings of a run. Checks that the exit code is that of the worst level.
fn findings(output: &Output) -> Vec<Value> {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.is_empty(), "{said}");
    let rows: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|row| serde_json::from_str(row).expect("JSON"))
        .collect();
    let worst = rows.iter().map(|row| match row["level"].as_str().expect("a level") {
        "ok" | "skipped" => 0,
        "warning" => 1,
        "problem" => 2,
        other => panic!("no level: {other}"),
    });
    assert_eq!(output.status.code(), worst.max(), "{rows:?}");
    rows
}

fn run(command: &mut Command) -> Vec<Value> {
    findings(&command.output().expect("start"))
}

fn find<'a>(rows: &'a [Value], check: &str) -> &'a Value {
    rows.iter().find(|row| row["check"] == check).unwrap_or_else(|| panic!("no {check} in {rows:?}"))
}

#[test]
fn every_finding_has_a_text_and_every_warning_a_fix() {
    let rows = run(&mut doctor(&[]));
    let checks: BTreeSet<_> = rows.iter().map(|row| row["check"].as_str().expect("a name")).collect();
    for check in ["kernel", "cores", "memlock", "open files", "rdma devices", "uverbs", "acs", "libraries"] {
        assert!(checks.contains(check), "{check} in {checks:?}");
    }
    for row in &rows {
        assert!(row["what"].as_str().is_some_and(|what| !what.is_empty()), "{row}");
        if ["warning", "problem"].contains(&row["level"].as_str().expect("a level")) {
            assert!(row["cost"].is_string() && row["remedy"].is_string(), "{row}");
        }
    }
}

#[test]
fn the_table_has_the_same_exit_code_and_a_summary() {
    let json = doctor(&[]).output().expect("start");
    let table = multirail(&["doctor"]).output().expect("start");
    assert_eq!(table.status.code(), json.status.code());
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(text.contains("fix") && text.contains("problems: "), "{text}");
}

#[test]
fn help_lists_the_exit_codes() {
    let output = multirail(&["doctor", "--help"]).output().expect("start");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("Exit code: 0") && text.contains("--peer"), "{text}");
}

#[test]
fn little_locked_memory_and_one_core_are_found() {
    let Some(prlimit) = tool("prlimit") else { return };
    let Some(taskset) = tool("taskset") else { return };
    let inner = doctor(&[]);
    let mut command = Command::new(prlimit);
    command.arg("--memlock=65536:65536");
    // A privileged process has no limit, so it drops the privilege.
    if rustix::process::geteuid().is_root() {
        let Some(setpriv) = tool("setpriv") else { return };
        command.arg(setpriv).args(["--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]);
    }
    command.arg(taskset).args(["-c", &first_core()]).arg(inner.get_program()).args(inner.get_args());
    command.env_remove("MULTIRAIL_BACKEND").env_remove("MULTIRAIL_LIBFABRIC");
    let rows = run(command.env_remove("MULTIRAIL_LIBIBVERBS"));
    let memlock = find(&rows, "memlock");
    let has_cards = find(&rows, "rdma devices")["level"] == "ok";
    assert_eq!(memlock["level"], if has_cards { "problem" } else { "warning" }, "{memlock}");
    assert!(memlock["what"].as_str().is_some_and(|what| what.contains("soft 64 KiB")), "{memlock}");
    let cores = find(&rows, "cores");
    assert_eq!(cores["level"], "warning", "{cores}");
    assert!(cores["what"].as_str().is_some_and(|what| what.starts_with("1 allowed")), "{cores}");
}

#[test]
fn missing_libraries_are_named() {
    let mut command = doctor(&["--backend", "verbs"]);
    command.env("MULTIRAIL_LIBFABRIC", "/nowhere/libfabric.so.1");
    let rows = run(command.env("MULTIRAIL_LIBIBVERBS", "/nowhere/libibverbs.so.1"));
    let missing = rows.iter().filter(|row| row["check"] == "libraries");
    let expected = [("/nowhere/libfabric.so.1", "skipped"), ("/nowhere/libibverbs.so.1", "problem")];
    for (row, (name, level)) in missing.zip(expected) {
        assert_eq!(row["level"], level, "{row}");
        assert!(row["what"].as_str().is_some_and(|what| what.contains(name)), "{row}");
    }
    let asked = find(&rows, "backends");
    assert_eq!(asked["level"], "problem", "{asked}");
}

#[test]
fn a_second_libibverbs_is_a_problem() {
    let fabric = run(&mut doctor(&[]));
    let system = fabric.iter().filter(|row| row["check"] == "libraries" && row["level"] == "ok");
    let files: Vec<_> = system.filter_map(|row| row["what"].as_str()?.rsplit(", ").next()).collect();
    let [fabric, verbs] = files[..] else {
        eprintln!("skipped: libfabric and libibverbs are not both installed: {files:?}");
        return;
    };
    let directory = tempfile::tempdir().expect("a directory");
    let copy = directory.path().join("libibverbs.so.1");
    std::fs::copy(verbs, &copy).expect("copy it");
    let mut command = doctor(&[]);
    let rows = run(command.env("MULTIRAIL_LIBIBVERBS", &copy));
    let twice = rows.iter().find(|row| row["what"].as_str().is_some_and(|what| what.contains("2 times")));
    let Some(twice) = twice else {
        eprintln!("skipped: {fabric} does not bring libibverbs along: {rows:?}");
        return;
    };
    assert_eq!(twice["level"], "problem");
    assert!(twice["what"].as_str().is_some_and(|what| what.contains(&*copy.to_string_lossy())), "{twice}");
}

#[test]
fn a_peer_is_reached_or_not() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listener.local_addr().expect("its address").to_string();
    let rows = run(&mut doctor(&["--peer", &peer]));
    assert_eq!(find(&rows, "peer")["level"], "ok", "{rows:?}");
    // The connection holds its own port, so that no other program can listen on it.
    let connection = TcpStream::connect(&peer).expect("connect");
    let closed = connection.local_addr().expect("its address").to_string();
    let rows = run(&mut doctor(&["--peer", &closed]));
    let refused = find(&rows, "peer");
    assert_eq!(refused["level"], "problem");
    assert!(refused["what"].as_str().is_some_and(|what| what.contains("no program listens")), "{refused}");
    let rows = run(&mut doctor(&["--peer", "no port"]));
    assert_eq!(find(&rows, "peer")["level"], "problem");
}

#[test]
fn an_unknown_backend_is_a_problem() {
    let rows = run(&mut doctor(&["--backend", "carrier"]));
    let unknown = find(&rows, "backends");
    assert_eq!(unknown["level"], "problem");
    assert!(unknown["what"].as_str().is_some_and(|what| what.contains("loopback, efa, verbs")), "{unknown}");
}

#[test]
fn a_closed_pipe_keeps_the_exit_code() {
    let whole = doctor(&[]).output().expect("start");
    let (reader, writer) = std::io::pipe().expect("pipe");
    drop(reader);
    let output = doctor(&[]).stdout(writer).output().expect("start");
    assert_eq!(output.status.code(), whole.status.code());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The path of a program of util-linux. Prints that the test is skipped if the program is missing.
fn tool(name: &str) -> Option<PathBuf> {
    let places = ["/usr/bin", "/bin", "/usr/sbin"].map(|directory| Path::new(directory).join(name));
    let found = places.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: there is no {name} (util-linux)");
    }
    found
}

/// A core that this process may use.
fn first_core() -> String {
    let allowed = rustix::thread::sched_getaffinity(None).expect("the cores allowed");
    let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| allowed.is_set(*core));
    core.expect("one core").to_string()
}

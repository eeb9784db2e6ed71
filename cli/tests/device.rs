//! `multirail device`: a running process's devices are taken out of service and back.
#![cfg(target_os = "linux")]

mod process;

use std::path::Path;

use process::{LIMIT, RunningCommand, eventually, multirail, run};
use serde_json::Value;

/// Runs `multirail device` on the socket at `path`.
fn device(path: &Path, words: &[&str]) -> (bool, String, String) {
    let path = path.to_str().expect("UTF-8");
    run(&[&["device"], words, &["--admin", path]].concat())
}

/// The rails of the process behind the socket; `None` while it has no socket.
fn rails(path: &Path) -> Option<Vec<Value>> {
    let (done, rows, _) = device(path, &["list", "--json"]);
    done.then(|| rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect())
}

fn rail(path: &Path, name: &str) -> Value {
    let rails = rails(path).expect("rails");
    rails.into_iter().find(|rail| rail["device"] == name).expect("the device")
}

/// A command over loopback with two devices.
fn start(arguments: &[&str]) -> RunningCommand {
    let mut command = multirail(&[arguments, &["--backend", "loopback"]].concat());
    command.env("MULTIRAIL_LOOPBACK_THREADS", "2");
    RunningCommand::spawn(command)
}

#[test]
fn a_device_is_drained_and_restored_during_a_transfer() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).into_os_string().into_string().expect("UTF-8");
    let (theirs, ours) = (text("server"), text("client"));
    let mut server = start(&["bench", "server", "--listen", "127.0.0.1:0", "--json", "--admin", &theirs]);
    let address = server.json()["listening"].as_str().expect("an address").to_owned();
    let load = ["--duration", "5s", "--inflight", "4", "--json", "--admin", &ours];
    let mut client = start(&[&["bench", "client", &address], &load[..]].concat());
    let ours = path("client");
    eventually(LIMIT, "both devices carry bytes", || {
        let rails = rails(&ours)?;
        rails.iter().all(|rail| rail["bytes"].as_u64() > Some(0)).then_some(())
    });
    let (done, said, errors) = device(&ours, &["drain", "lo1"]);
    assert!(done && said.contains("lo1 is out of service"), "{said}{errors}");
    let drained = rail(&ours, "lo1");
    assert_eq!(drained["state"], "out_of_service");
    let other = rail(&ours, "lo0")["bytes"].as_u64();
    eventually(LIMIT, "the other device goes on", || {
        (rail(&ours, "lo0")["bytes"].as_u64() > other).then_some(())
    });
    assert_eq!(rail(&ours, "lo1")["bytes"], drained["bytes"]);
    let (done, table, _) = device(&ours, &["list"]);
    assert!(done && table.contains("out of service") && table.contains("in service"), "{table}");
    assert!(device(&ours, &["restore", "lo1"]).0);
    eventually(LIMIT, "the device carries bytes again", || {
        (rail(&ours, "lo1")["bytes"].as_u64() > drained["bytes"].as_u64()).then_some(())
    });
    assert_eq!(rail(&ours, "lo1")["state"], "in_service");
    assert_eq!(rails(&path("server")).map(|rails| rails.len()), Some(2));
    let row = client.json();
    assert_eq!(row["verified"], true, "{row}");
    client.succeeds_silently();
    server.succeeds_silently();
    assert!(!ours.exists() && !path("server").exists(), "the sockets' files are left");
}

#[test]
fn a_server_of_files_has_a_socket() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, into) = (folder.path().join("admin"), folder.path().join("files"));
    std::fs::create_dir(&into).expect("a folder");
    let arguments = ["--into", into.to_str().expect("UTF-8"), "--admin", path.to_str().expect("UTF-8")];
    let (mut server, _) =
        RunningCommand::server(&[&["serve", "--backend", "loopback"], &arguments[..]].concat());
    assert!(rails(&path).is_some());
    let (done, _, said) = device(&path, &["drain", "nonsense"]);
    assert!(!done && said.contains("no transport has a device \"nonsense\""), "{said}");
    server.signal(rustix::process::Signal::INT);
    server.succeeds_silently();
    assert!(!path.exists());
    let (done, _, said) = device(&path, &["list"]);
    assert!(!done && said.contains("give the path that the process got by --admin"), "{said}");
}

#[test]
fn a_socket_that_cannot_be_opened_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "kept").expect("a file");
    let path = file.to_str().expect("UTF-8");
    let (done, _, said) = run(&["bench", "--backend", "loopback", "--duration", "10ms", "--admin", path]);
    assert!(!done && said.contains("exists and is no socket"), "{said}");
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), "kept");
}

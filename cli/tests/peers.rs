//! Directories on the command line: `serve` joins, `peers` lists, `send` looks up.
#![cfg(all(unix, feature = "directories"))]

mod process;

use process::{LIMIT, RunningCommand, eventually, run};
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn a_server_is_found_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/fleet", folder.path().display());
    let into = folder.path().join("into");
    let file = folder.path().join("file");
    std::fs::write(&file, "content").unwrap();
    std::fs::create_dir(&into).unwrap();
    let (into_text, file_text) = (into.to_str().unwrap(), file.to_str().unwrap());

    let (done, said, errors) = run(&["peers", "--directory", &url]);
    assert!(done && said.trim().is_empty(), "{said}{errors}");
    let arguments = ["send", file_text, "--to", "store", "--directory", &url, "--backend", "loopback"];
    let (done, _, errors) = run(&arguments);
    assert!(!done && errors.contains("lists no member \"store\""), "{errors}");

    let listen = ["serve", "--into", into_text, "--listen", "127.0.0.1:0", "--backend", "loopback", "--json"];
    let mut server =
        RunningCommand::start(&[&listen[..], &["--directory", &url, "--name", "store"]].concat());
    let row: Value = eventually(LIMIT, "the server joins", || {
        let (_, rows, _) = run(&["peers", "--directory", &url, "--json"]);
        serde_json::from_str(rows.lines().next()?).ok()
    });
    assert_eq!((&row["name"], &row["attributes"]["service"]), (&"store".into(), &"multirail-serve".into()));
    let (done, table, _) = run(&["peers", "--directory", &url]);
    assert!(done && table.contains("store") && table.contains("127.0.0.1:"), "{table}");
    let (done, _, errors) = run(&arguments);
    assert!(done, "{errors}");
    assert_eq!(std::fs::read_to_string(into.join("file")).unwrap(), "content");

    let watch = RunningCommand::start(&["peers", "--directory", &url, "--watch", "--json"]);
    let row = watch.json();
    assert_eq!((&row["event"], &row["member"]["name"]), (&"joined".into(), &"store".into()));
    assert_eq!(watch.json()["event"], "synced");
    // Stopped in order, it leaves at once.
    server.signal(Signal::INT);
    server.succeeds();
    assert_eq!(watch.json()["event"], "left");
}

#[test]
fn arguments_that_cannot_work_say_why() {
    let (done, _, errors) = run(&["peers", "--directory", "/tmp"]);
    assert!(!done && errors.contains("no URL of a directory"), "{errors}");
    let (done, _, errors) = run(&["serve", "--into", "/tmp", "--directory", "file:///tmp/x"]);
    assert!(!done && errors.contains("--name"), "{errors}");
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().to_str().unwrap();
    let url = format!("file://{into}/fleet");
    let listen = ["serve", "--into", into, "--listen", "0.0.0.0:0", "--backend", "loopback"];
    let (done, _, errors) = run(&[&listen[..], &["--directory", &url, "--name", "a"]].concat());
    assert!(!done && errors.contains("nobody can connect to 0.0.0.0:"), "{errors}");
}

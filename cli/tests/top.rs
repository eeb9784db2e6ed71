//! `multirail top`: one frame of a running process, and a live view until the process ends.
#![cfg(target_os = "linux")]

mod process;

use process::{LIMIT, RunningCommand, eventually, in_terminal, run};

/// A bench that runs until it is killed, and its socket.
fn bench(folder: &tempfile::TempDir) -> (RunningCommand, String) {
    let path = folder.path().join("admin").into_os_string().into_string().expect("UTF-8");
    let load = [
        "bench",
        "--backend",
        "loopback",
        "--in-process",
        "--duration",
        "10min",
        "--no-verify",
        "--no-limit",
    ];
    let bench = RunningCommand::start(&[&load[..], &["--admin", &path]].concat());
    eventually(LIMIT, "the socket", || std::path::Path::new(&path).exists().then_some(()));
    (bench, path)
}

#[test]
fn one_frame_has_the_rates_and_fits_80_columns() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let frame = eventually(LIMIT, "bytes per second", || {
        let (done, frame, said) = run(&["top", "--once", "--interval", "200ms", "--admin", &path]);
        assert!(done && said.is_empty(), "{said}");
        (!frame.contains("\n0.00 GB/s")).then_some(frame)
    });
    assert!(frame.lines().all(|line| line.chars().count() <= 80), "{frame}");
    for wanted in ["multirail top: process ", "Rails: ", "lo0", "in service", "Peers: 1", "Operations: "] {
        assert!(frame.contains(wanted), "{wanted} in:\n{frame}");
    }
}

#[test]
fn the_live_view_says_that_the_process_has_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (bench, path) = bench(&folder);
    let killed = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        bench.signal(rustix::process::Signal::KILL);
        bench
    });
    let Some(shown) = in_terminal(80, &["top", "--interval", "100ms", "--admin", &path]) else { return };
    drop(killed.join());
    assert!(shown.contains("Operations: "), "{shown}");
    let last = shown.rsplit("\u{1b}[?1049l").next().expect("what follows the view");
    assert!(last.contains("process ") && last.contains(" has ended: "), "{last:?}");
}

#[test]
fn what_cannot_be_watched_is_an_error() {
    let (done, _, said) = run(&["top", "--admin", "/no/such/socket"]);
    assert!(!done && said.contains("give the path that the process got by --admin"), "{said}");
    let folder = tempfile::tempdir().expect("a folder");
    let (_bench, path) = bench(&folder);
    let (done, _, said) = run(&["top", "--admin", &path]);
    assert!(!done && said.contains("--once"), "{said}");
    let (done, _, said) = run(&["top", "--interval", "1ms", "--admin", &path]);
    assert!(!done && said.contains("between 100ms and 30s"), "{said}");
}

//! `multirail bench ladder`: all rungs, and the gain of batching and lazy posting.
#![cfg(target_os = "linux")]

mod process;

use process::run;
use serde_json::Value;

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

//! The output of commands fits the terminal, cuts no word, and is plain text in a pipe.
#![cfg(target_os = "linux")]

mod process;

use std::collections::HashSet;

use process::{in_terminal, multirail};

/// Commands whose output depends on the machine only.
const STEADY: [&[&str]; 4] = [
    &["info"],
    &["doctor"],
    &["topo", "--from", "p5.48xlarge"],
    &["explain", "--from", "p5.48xlarge", "--gpu", "3"],
];

/// A command whose numbers differ in each run.
const MEASURING: [&[&str]; 7] = [
    &["bench", "--duration", "20ms", "--pages", "16"],
    &["bench", "--duration", "5ms", "--pages", "4", "--sweep"],
    &["bench", "ladder", "--null", "--duration", "5ms"],
    &[
        "simulate",
        "--post-cost-ns",
        "100",
        "--cards",
        "1",
        "--groups",
        "1",
        "--size",
        "64KiB",
        "--size",
        "4KiB",
    ],
    &["simulate", "--provider", "efa", "--groups", "1", "--size", "4KiB", "--coalesce", "always"],
    &["simulate", "--post-cost-ns", "100", "--incast", "4"],
    &["bench", "--duration", "5ms", "--op", "write-list", "--contiguous", "0.5", "--pages", "16", "--sweep"],
];

/// The characters of table borders.
const BOXES: &str = "│┆┌┐└┘├┤┬┴┼╞╪╡─═╌";

fn words(text: &str) -> HashSet<&str> {
    text.split(|c: char| c.is_whitespace() || BOXES.contains(c)).filter(|word| !word.is_empty()).collect()
}

/// Fails for lines that are too long although they could be wrapped between words.
fn assert_fits(text: &str, columns: usize) {
    for line in text.lines() {
        let is_one_word = words(line).len() < 2;
        assert!(
            line.chars().count() <= columns || is_one_word,
            "{} columns: {line}\nin:\n{text}",
            line.chars().count()
        );
    }
}

fn in_pipe(arguments: &[&str]) -> String {
    let output = multirail(arguments).output().expect("start");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn every_table_fits_its_terminal() {
    for columns in [80, 200] {
        for arguments in STEADY.into_iter().chain(MEASURING) {
            let Some(text) = in_terminal(columns, arguments) else { return };
            assert!(!text.is_empty(), "{arguments:?}");
            assert_fits(&text, columns);
        }
    }
}

#[test]
fn no_word_is_broken_at_any_width() {
    for arguments in STEADY {
        let pipe = in_pipe(arguments);
        for columns in [80, 120, 200] {
            let Some(text) = in_terminal(columns, arguments) else { return };
            assert_fits(&text, columns);
            // With one key per line, a name ends with a colon.
            let shown: HashSet<_> = words(&text).into_iter().map(|word| word.trim_end_matches(':')).collect();
            let broken: Vec<_> = words(&pipe)
                .into_iter()
                .filter(|word| {
                    let word = word.trim_end_matches(':');
                    // The limits of this process change from moment to moment.
                    !word.contains(|c: char| c.is_ascii_digit()) && !shown.contains(word)
                })
                .collect();
            // Tables have column headings, the other form has keys.
            let headings = [
                "yes",
                "no",
                "check",
                "level",
                "backend",
                "available",
                "decision",
                "option",
                "chosen",
                "devices",
                "capabilities",
            ];
            let broken: Vec<_> = broken.into_iter().filter(|word| !headings.contains(word)).collect();
            assert!(broken.is_empty(), "{arguments:?} at {columns}: {broken:?} in:\n{text}");
        }
    }
}

#[test]
fn a_pipe_gets_plain_aligned_text() {
    for arguments in MEASURING.into_iter().chain([&["info"][..], &["doctor"]]) {
        let text = in_pipe(arguments);
        assert!(!text.is_empty() && !text.contains(|c| BOXES.contains(c)), "{text}");
    }
    let sweep = in_pipe(MEASURING[1]);
    let heading = sweep.lines().find(|line| line.contains("GB/s")).expect("a heading");
    let row = sweep.lines().find(|line| line.trim_start().starts_with("8 B")).expect("a row");
    let column = |line: &str, word: &str| line.split_once(word).map(|(before, _)| before.chars().count());
    assert_eq!(column(heading, "verified"), column(row, "yes"), "{sweep}");
}

#[test]
fn a_narrow_terminal_names_hidden_columns_and_one_row_has_a_key_per_line() {
    let Some(sweep) = in_terminal(80, MEASURING[1]) else { return };
    assert!(sweep.contains("hidden columns: ") && sweep.contains("p99.9"), "{sweep}");
    let Some(one) = in_terminal(80, MEASURING[0]) else { return };
    for key in ["size", "GB/s", "p99.9 µs", "% of memcpy", "verified"] {
        assert!(one.lines().any(|line| line.starts_with(key)), "{key} in {one}");
    }
}

#[test]
fn the_rails_of_a_sweep_have_their_sizes_and_small_pages_no_imbalance() {
    let sweep = in_pipe(&["bench", "--backend", "loopback", "--duration", "5ms", "--pages", "4", "--sweep"]);
    let rails = sweep.split("busiest rail").nth(1).unwrap_or_else(|| panic!("a table of rails in {sweep}"));
    let of = |size: &str| rails.lines().find(|line| line.trim_start().starts_with(size));
    for size in ["8 B", "64 KiB", "4 MiB"] {
        assert!(of(size).is_some(), "{size} in {sweep}");
    }
    assert!(of("8 B").is_some_and(|row| row.contains("all on one rail")), "{sweep}");
    assert!(!sweep.contains("200.00"), "{sweep}");
}

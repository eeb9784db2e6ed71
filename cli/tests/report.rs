//! `multirail bench --report`: the page is well-formed, needs nothing else, and has the figures of `--json`.
#![cfg(target_os = "linux")]

mod process;

use std::path::{Path, PathBuf};

use process::{LIMIT, RunningCommand, run};
use roxmltree::{Document, Node, ParsingOptions};
use rustix::process::Signal;
use serde_json::Value;

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("the page")
}

fn parse(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(page, options).unwrap_or_else(|error| panic!("{error}: {page}"))
}

fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).collect()
}

fn with_id<'a, 'input>(document: &'a Document<'input>, id: &str) -> Node<'a, 'input> {
    let found = document.descendants().find(|node| node.attribute("id") == Some(id));
    found.unwrap_or_else(|| panic!("no element {id}"))
}

/// The page of a bench, and the rows that it has printed.
fn bench(folder: &tempfile::TempDir, arguments: &[&str]) -> (PathBuf, Vec<Value>, String) {
    let path = folder.path().join("out.html");
    let common = ["bench", "--backend", "loopback", "--duration", "40ms", "--json", "--report"];
    let words = [&common[..], &[path.to_str().expect("UTF-8")], arguments].concat();
    let (done, rows, said) = run(&words);
    assert!(done, "{said}");
    let values = rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect();
    (path, values, rows)
}

#[test]
fn the_page_has_the_figures_of_all_sizes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, rows, printed) = bench(&folder, &["--sweep", "--in-process"]);
    let page = read(&path);
    let document = parse(&page);
    assert_eq!(text(with_id(&document, "json")).trim(), printed.trim());
    let table = with_id(&document, "results");
    let cells: Vec<Vec<String>> = table
        .children()
        .filter(|row| row.has_tag_name(("http://www.w3.org/1999/xhtml", "tr")))
        .skip(1)
        .map(|row| row.children().map(text).collect())
        .collect();
    assert_eq!(cells.len(), rows.len());
    for (cells, row) in cells.iter().zip(&rows) {
        let figure = |key: &str| row[key].as_f64().expect("a figure");
        assert_eq!(cells[1], row["pages"].to_string());
        assert_eq!(cells[2], format!("{:.2}", figure("gbytes_per_s")));
        assert_eq!(cells[5], format!("{:.2}", figure("p50_us")));
        assert_eq!(cells.last().map(String::as_str), Some("yes"));
    }
    let plots: Vec<_> = document
        .descendants()
        .filter(|node| node.tag_name().name() == "svg")
        .filter_map(|svg| svg.children().find(|node| node.tag_name().name() == "title"))
        .map(text)
        .collect();
    for wanted in
        ["Bandwidth over size", "Latency over size", "Bytes of each rail", "Timeline", "Rail groups of "]
    {
        assert!(plots.iter().any(|plot| plot.starts_with(wanted)), "{wanted} in {plots:?}");
    }
    // Each size has a point in the plot of the transfer.
    let first = document.descendants().find(|node| node.tag_name().name() == "polyline").expect("a line");
    assert_eq!(first.attribute("points").expect("points").split_whitespace().count(), rows.len());
    assert!(text(with_id(&document, "doctor")).contains("memlock"));
    assert!(text(with_id(&document, "machine")).contains("Linux "));
}

#[test]
fn the_page_needs_no_other_file_and_no_network() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, _, _) = bench(&folder, &["--in-process"]);
    let page = read(&path);
    let document = parse(&page);
    for node in document.descendants().filter(Node::is_element) {
        assert!(
            !["script", "img", "iframe", "object", "embed"].contains(&node.tag_name().name()),
            "{node:?}"
        );
        for attribute in node.attributes() {
            let is_reference = ["src", "href", "srcset", "data", "action"].contains(&attribute.name());
            assert!(!is_reference || attribute.value().starts_with("data:"), "{attribute:?}");
        }
    }
    assert!(!page.contains("url(") && !page.contains("@import"), "{page}");
}

#[test]
fn a_bench_that_is_interrupted_writes_what_it_has_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.html");
    let words = ["bench", "--backend", "loopback", "--in-process", "--duration", "10min", "-v", "--report"];
    let mut bench = RunningCommand::start(&[&words[..], &[path.to_str().expect("UTF-8")]].concat());
    bench.await_error("measuring");
    bench.signal(Signal::INT);
    let (status, said) = bench.end_within(LIMIT);
    assert_eq!(status.code(), Some(130), "{said:?}");
    let page = read(&path);
    let all = text(parse(&page).root());
    assert!(all.contains("The bench ended early: interrupted by SIGINT"), "{all}");
}

#[test]
fn a_file_that_cannot_be_written_ends_the_bench_at_once() {
    let words = [
        "bench",
        "--backend",
        "loopback",
        "--in-process",
        "--duration",
        "10min",
        "--report",
        "/no/such/folder/a",
    ];
    let (done, rows, said) = run(&words);
    assert!(!done && rows.is_empty() && said.contains("cannot write the report"), "{said}");
}

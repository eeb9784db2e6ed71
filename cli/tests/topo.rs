//! `multirail topo`: machines from all sources, and sources that cannot be read.
#![cfg(unix)]

mod process;

use std::fs;
use std::path::Path;

use process::run;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// The one sentence of a failure.
fn refused(arguments: &[&str]) -> String {
    let (done, shown, said) = run(arguments);
    assert!(!done && shown.is_empty(), "{shown}");
    assert!(said.starts_with("multirail: ") && said.lines().count() == 1, "{said}");
    said
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let (done, shown, said) = run(&[&["topo", "--json"], arguments].concat());
    assert!(done, "{said}");
    assert_eq!(shown.lines().count(), 1, "{shown}");
    serde_json::from_str(&shown).expect("JSON")
}

#[test]
fn p5_has_eight_groups_of_four_cards() {
    let p5 = json(&["--from", "p5.48xlarge"]);
    assert_eq!(p5["name"], "p5.48xlarge");
    let groups = p5["groups"].as_array().expect("groups");
    assert_eq!(groups.len(), 8);
    for group in groups {
        assert_eq!(group["cards"].as_array().map(Vec::len), Some(4), "{group}");
        assert_eq!(group["gpus"].as_array().map(Vec::len), Some(1), "{group}");
    }
    for (part, count) in [("nodes", 2), ("cores", 96)] {
        assert_eq!(p5["machine"][part].as_array().map(Vec::len), Some(count), "{part}");
    }
    assert_eq!(p5["machine"]["allowed"], "0-95");
    let kinds = p5["machine"]["functions"].as_array().expect("functions").iter().map(|f| &f["kind"]);
    assert_eq!(kinds.filter(|kind| *kind == "nic").count(), 32);
}

#[test]
fn p5_fits_a_hundred_columns() {
    let (done, shown, said) = run(&["topo", "--from", "p5.48xlarge"]);
    assert!(done, "{said}");
    assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
    for words in ["worker", "rdmap200s0 rdmap201s0", "same PCIe switch", "84-95"] {
        assert!(shown.contains(words), "{words} in {shown}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn this_host_is_shown() {
    let (done, shown, said) = run(&["topo"]);
    assert!(done, "{said}");
    let host = json(&[]);
    let cards = host["groups"].as_array().expect("groups").len();
    assert_eq!(shown.contains("no RDMA card on this host"), cards == 0, "{shown}");
    assert_eq!(shown.contains("worker"), cards > 0, "{shown}");
}

#[test]
fn a_copy_of_sys_is_read() {
    let folder = TempDir::new().unwrap();
    let p5 = topology::Description::p5().machine().unwrap();
    topology::fixture::write_sysfs(&p5, folder.path()).unwrap();
    let copy = json(&["--from", &format!("sysfs:{}", text(folder.path()))]);
    assert_eq!(copy["groups"], json(&["--from", "p5.48xlarge"])["groups"]);
}

/// Four EFA cards and two of InfiniBand, behind the switches of four GPUs.
fn two_kinds() -> String {
    format!("file:{}/../multirail/tests/machines/two-kinds-of-cards.toml", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_backend_has_only_its_own_cards() {
    let of = |arguments: &[&str]| {
        let machine = json(&[arguments, &["--from", &two_kinds()]].concat());
        let groups = machine["groups"].as_array().expect("groups").clone();
        let list = |group: &serde_json::Value, of: &str| {
            let addresses = group[of].as_array().expect("addresses").iter();
            let buses = addresses.map(|at| at.as_str().expect("an address")[5..7].to_owned());
            buses.collect::<Vec<_>>().join(" ")
        };
        let row = |group: &serde_json::Value| {
            format!(
                "{} {} <- {}",
                group["backend"].as_str().expect("a name"),
                list(group, "gpus"),
                list(group, "cards")
            )
        };
        groups.iter().map(row).collect::<Vec<_>>()
    };
    // Each GPU has an EFA card of its own switch, next to any other cards.
    let efa = ["efa 14 <- 12", "efa 15 <- 13", "efa 26 <- 22", "efa 27 <- 23"];
    let verbs = ["verbs 14 26 <- 24", "verbs 15 27 <- 25"];
    assert_eq!(of(&["--backend", "efa"]), efa);
    assert_eq!(of(&["--backend", "verbs"]), verbs);
    assert_eq!(of(&[]), [&efa[..], &verbs[..]].concat());
    assert!(of(&["--backend", "loopback"]).is_empty());
    let (done, shown, said) = run(&["topo", "--backend", "loopback", "--from", &two_kinds()]);
    assert!(done && shown.contains("loopback supports no RDMA card"), "{shown}{said}");
}

#[test]
fn a_description_without_cards_has_a_note() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("laptop.toml");
    fs::write(&file, "name = \"laptop\"\n[[node]]\nnumber = 0\ncores = \"0-7\"\n").unwrap();
    let (done, shown, said) = run(&["topo", "--from", &format!("file:{}", text(&file))]);
    assert!(done, "{said}");
    assert!(shown.contains("no RDMA card on laptop") && shown.contains("loopback"), "{shown}");
    assert!(!shown.contains("worker"), "{shown}");
}

#[test]
fn sources_that_cannot_be_read_are_named() {
    assert!(refused(&["topo", "--from", "sysfs:/nonexistent"]).contains("/nonexistent"));
    let folder = TempDir::new().unwrap();
    assert!(
        refused(&["topo", "--from", &format!("sysfs:{}", text(folder.path()))]).contains(text(folder.path()))
    );
    let file = folder.path().join("machine.toml");
    let from = format!("file:{}", text(&file));
    assert!(refused(&["topo", "--from", &from]).contains(text(&file)));
    let deep = "/01:00.0".repeat(100_000);
    let deep =
        format!("name = \"x\"\n[[function]]\npath = \"0000:00{deep}\"\nclass = \"0302\"\nid = \"10de:2330\"");
    for wrong in [
        "",
        &deep,
        "name = \"x\"\n[[node]]\nnumber = 0\ncores = \"5\"\nsibling = 4294967295",
        "[[",
        "name = 7",
        "name = \"x\"\nnodes = 3",
        "name = \"x\"\n[[function]]\npath = \"nowhere\"\nclass = \"0302\"\nid = \"10de:2330\"",
        "name = \"x\"\n[[node]]\nnumber = 0\ncores = \"many\"",
        "name = \"x\"",
    ] {
        fs::write(&file, wrong).unwrap();
        assert!(refused(&["topo", "--from", &from]).contains(text(&file)), "{wrong}");
    }
    let (done, _, said) = run(&["topo", "--from", "p4"]);
    assert!(!done && said.contains("p5.48xlarge"), "{said}");
}

#[test]
#[cfg(not(feature = "hwloc"))]
fn without_the_feature_hwloc_is_refused() {
    for source in ["hwloc", "hwloc:machine.xml"] {
        assert!(refused(&["topo", "--from", source]).contains("--features hwloc"));
    }
}

#[test]
fn the_picture_is_written() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("p5.svg");
    fs::write(&file, "old").unwrap();
    let (done, shown, said) = run(&["topo", "--from", "p5.48xlarge", "--svg", text(&file)]);
    assert!(done && shown.contains("NUMA node 1"), "{said}");
    let svg = fs::read_to_string(&file).unwrap();
    roxmltree::Document::parse(&svg).expect("XML");
    let nowhere = folder.path().join("nowhere/p5.svg");
    let said = refused(&["topo", "--from", "p5.48xlarge", "--svg", text(&nowhere)]);
    assert!(said.contains(text(&nowhere)), "{said}");
}

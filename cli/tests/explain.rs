//! `multirail explain`, run as a program.

use std::process::{Command, Output};

use serde_json::Value;

fn explain(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_multirail"));
    for variable in ["MULTIRAIL_BACKEND", "MULTIRAIL_TOPOLOGY", "MULTIRAIL_RAIL_GROUPS", "MULTIRAIL_GPUS"] {
        command.env_remove(variable);
    }
    command.arg("explain").args(arguments).output().unwrap()
}

fn choices(arguments: &[&str]) -> Vec<Value> {
    let output = explain(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn taken<'a>(choices: &'a [Value], question: &str) -> Vec<&'a str> {
    let is_it = |choice: &&Value| choice["question"] == question && choice["taken"] == true;
    choices.iter().filter(is_it).map(|choice| choice["choice"].as_str().unwrap()).collect()
}

#[test]
fn a_gpu_of_a_p5_has_the_cards_of_its_switch() {
    let choices = choices(&["--from", "p5.48xlarge", "--gpu", "3", "--json"]);
    let cards = "rdmap130s0 rdmap131s0 rdmap132s0 rdmap133s0";
    assert_eq!(taken(&choices, "rails"), [format!("group 3: {cards}")]);
    assert_eq!(taken(&choices, "worker's core"), ["36"]);
    assert_eq!(taken(&choices, "peer to peer"), [cards]);
    let left = choices.iter().filter(|choice| choice["question"] == "rails" && choice["taken"] == false);
    let whys: Vec<_> = left.map(|choice| choice["why"].as_str().unwrap()).collect();
    assert_eq!(whys.len(), 7);
    assert_eq!(whys.iter().filter(|why| why.starts_with("the same NUMA node")).count(), 3);
}

#[test]
fn host_memory_uses_the_cards_of_its_node() {
    let choices = choices(&["--from", "p5.48xlarge", "--numa", "1", "--json"]);
    assert_eq!(taken(&choices, "rails").len(), 4);
    assert_eq!(taken(&choices, "registration"), ["by address"]);
}

#[test]
fn a_gpu_takes_the_cards_of_one_backend() {
    let file =
        format!("file:{}/../multirail/tests/machines/two-kinds-of-cards.toml", env!("CARGO_MANIFEST_DIR"));
    let rails = |more: &[&str]| {
        let arguments = [&["--from", file.as_str(), "--gpu", "3", "--json"], more].concat();
        taken(&choices(&arguments), "rails").join("; ")
    };
    assert_eq!(rails(&[]), "group 3: rdmap35s0");
    assert_eq!(rails(&["--backend", "efa"]), "group 3: rdmap35s0");
    assert_eq!(rails(&["--backend", "verbs"]), "group 1: ibp37s0");
    let all = choices(&["--from", &file, "--gpu", "3", "--json"]);
    let behind = all.iter().find(|choice| choice["choice"] == "verbs: ibp36s0 ibp37s0");
    assert!(
        behind.is_some_and(|choice| choice["why"].as_str().unwrap().contains("--backend verbs")),
        "{all:?}"
    );
}

#[test]
fn this_host_is_explained() {
    let choices = choices(&["--json"]);
    assert!(taken(&choices, "backend").contains(&"loopback"));
}

#[test]
fn missing_gpus_and_nodes_are_errors() {
    for (arguments, says) in [
        (["--from", "p5.48xlarge", "--gpu", "8"], "8 GPUs; GPU numbers start at 0"),
        (["--from", "p5.48xlarge", "--numa", "2"], "it has: 0, 1"),
        (["--from", "file:no/such", "--gpu", "0"], "no/such"),
    ] {
        let output = explain(&arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(says), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

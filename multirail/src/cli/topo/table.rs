//! The rail groups as a table.

use topology::{Cpus, Machine, RailGroup};

use super::label;

/// Narrow enough for 100 columns with the cards of a p5.
pub const HEADER: [&str; 7] = ["group", "GPUs", "cards", "distance", "NUMA\nnode", "cores", "worker\ncore"];

/// Names of cards in a line.
const ABREAST: usize = 2;

/// A row per group, the first of which has the number `first`.
pub fn rows(machine: &Machine, first: usize, groups: &[RailGroup]) -> Vec<Vec<String>> {
    (first..).zip(groups).map(|(number, group)| row(machine, number, group)).collect()
}

fn row(machine: &Machine, number: usize, group: &RailGroup) -> Vec<String> {
    let gpus: Vec<String> = group.gpus.iter().map(|gpu| gpu.to_string()).collect();
    let cards: Vec<String> = group.cards.iter().map(|card| label::card(machine, *card)).collect();
    let cards: Vec<String> = cards.chunks(ABREAST).map(|cards| cards.join(" ")).collect();
    let cores: Cpus = group.cores.iter().copied().collect();
    let known = |number: Option<u32>| number.map_or("unknown".to_owned(), |number| number.to_string());
    vec![
        number.to_string(),
        if gpus.is_empty() { "host memory".to_owned() } else { gpus.join("\n") },
        cards.join("\n"),
        group.distance.map(label::distance).unwrap_or_default().to_owned(),
        known(group.node),
        label::cpus(&cores, 24),
        known(group.core),
    ]
}

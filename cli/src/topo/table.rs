//! The rail groups as a table.

use topology::{Cpus, Machine, RailGroup};

use super::label;
use crate::table::Table;

/// Names of cards in a line.
const ABREAST: usize = 2;

/// A row per group, the first of which has the number `first`, in at most 100 columns for the cards of a p5.
pub fn of(machine: &Machine, first: usize, groups: &[RailGroup]) -> Table {
    let table = Table::named_by(0).text("group").text("GPUs").text("cards").text("distance");
    let mut table = table.text("NUMA node").text("cores").text("worker core");
    (first..).zip(groups).for_each(|(number, group)| table.row(row(machine, number, group)));
    table
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

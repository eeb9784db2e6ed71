//! The rail groups as an SVG picture without external files.
//!
//! [`Picture`] is the layout. It has one [`Panel`] per group. `draw` turns the layout
//! into [`mod@svg`] elements.

mod draw;
mod panel;
pub mod svg;

pub use panel::PixelRect;
use panel::{Panel, PanelContent, TileKind, columns};
use topology::{Address, Kind, Machine, RailGroup};

use super::label;

/// The picture of a machine called `name`.
pub fn svg(name: &str, machine: &Machine, groups: &[RailGroup]) -> String {
    draw::draw(&Picture::new(name, machine, groups))
}

/// The same as an element of a page.
pub fn element(name: &str, machine: &Machine, groups: &[RailGroup]) -> String {
    let document = svg(name, machine, groups);
    document.split_once("?>\n").map_or(document.clone(), |(_, element)| element.to_owned())
}

/// The picture of a machine: every element with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// The page.
    pub frame: PixelRect,
    /// The machine's name.
    pub title: String,
    /// The machine's summary.
    pub subtitle: String,
    /// The NUMA nodes by number, and last the groups without a node.
    pub nodes: Vec<NodeBox>,
    /// The legend, with the symbols of this picture only.
    pub legend: Vec<LegendEntry>,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeBox {
    /// The position.
    pub frame: PixelRect,
    /// The node's name.
    pub title: String,
    /// The node's CPUs.
    pub subtitle: String,
    /// The node's rail groups.
    pub panels: Vec<Panel>,
    /// The text of a node without rail groups.
    pub note: Option<&'static str>,
}

/// A symbol and its meaning.
#[derive(Debug, Clone, PartialEq)]
pub struct LegendEntry {
    /// The symbol's position. The label is to the right of it.
    pub symbol: PixelRect,
    /// The symbol.
    pub kind: Symbol,
    /// The label.
    pub label: &'static str,
}

/// A symbol of the legend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symbol {
    /// A tile.
    Tile(TileKind),
    /// The bar between the served memory and the cards.
    Bar {
        /// True if transfers stay below one host bridge.
        is_local: bool,
    },
    /// The cell of a worker's core.
    Worker,
}

const MARGIN: f64 = 28.0;
const TITLE: f64 = 84.0;
const NODE_TITLE: f64 = 44.0;
const PADDING: f64 = 16.0;
const GAP: f64 = 14.0;
const LEGEND_LINE: f64 = 26.0;
/// The minimum width, for the title of the smallest machine.
const MIN_WIDTH: f64 = 760.0;
/// Text sizes.
pub const HEADLINE: f64 = 24.0;
pub const BODY: f64 = 13.0;

impl Picture {
    /// The picture of a machine called `name`.
    pub fn new(name: &str, machine: &Machine, groups: &[RailGroup]) -> Self {
        let card = panel::card_width(machine, groups);
        let gpus_without_card = gpus_without_card(machine, groups);
        let mut nodes: Vec<NodeBox> = Vec::new();
        let numbers = numbers(machine, groups, &gpus_without_card);
        for number in &numbers {
            let mut contents: Vec<PanelContent<'_>> = groups
                .iter()
                .enumerate()
                .filter(|(_, group)| group.node == *number)
                .map(|group| PanelContent { group: Some(group), gpus: &group.1.gpus })
                .collect();
            let gpus = gpus_without_card.iter().find(|(node, _)| node == number);
            contents.extend(gpus.map(|(_, gpus)| PanelContent { group: None, gpus }));
            let across = columns(contents.len(), if numbers.len() > 1 { 1.0 } else { 2.0 });
            nodes.push(NodeBox::new(machine, *number, &contents, card, across));
        }
        let (width, bottom) = place(&mut nodes);
        let mut legend = symbols(&nodes);
        let bottom = place_legend(&mut legend, bottom, width);
        Self {
            frame: PixelRect::new(0.0, 0.0, width, bottom),
            title: svg::fitted(name, HEADLINE, true, width - 2.0 * MARGIN),
            subtitle: label::summary(machine, groups.len()),
            nodes,
            legend,
        }
    }
}

/// The GPUs that are in no group, by node. Only machines without a card have such GPUs.
fn gpus_without_card(machine: &Machine, groups: &[RailGroup]) -> Vec<(Option<u32>, Vec<Address>)> {
    let mut gpus_without_card: Vec<(Option<u32>, Vec<Address>)> = Vec::new();
    for gpu in machine.of_kind(Kind::Gpu) {
        if groups.iter().any(|group| group.gpus.contains(&gpu.address)) {
            continue;
        }
        let node = machine.node_of(gpu);
        match gpus_without_card.iter_mut().find(|(known, _)| *known == node) {
            Some((_, gpus)) => gpus.push(gpu.address),
            None => gpus_without_card.push((node, vec![gpu.address])),
        }
    }
    gpus_without_card
}

/// The nodes to draw: those with a panel, and last the unknown node. Nodes with CPUs only are added if no node is
/// unknown.
fn numbers(
    machine: &Machine,
    groups: &[RailGroup],
    gpus_without_card: &[(Option<u32>, Vec<Address>)],
) -> Vec<Option<u32>> {
    let with_cpus = machine.nodes.iter().filter(|node| !node.cpus.0.is_empty());
    let mut numbers: Vec<Option<u32>> = groups.iter().map(|group| group.node).collect();
    numbers.extend(gpus_without_card.iter().map(|(node, _)| *node));
    if !numbers.contains(&None) {
        numbers.extend(with_cpus.map(|node| Some(node.number)));
    }
    numbers.sort_by_key(|number| (number.is_none(), *number));
    numbers.dedup();
    numbers
}

impl NodeBox {
    /// A node with its upper left corner at 0,0.
    fn new(
        machine: &Machine,
        number: Option<u32>,
        contents: &[PanelContent<'_>],
        card: f64,
        across: usize,
    ) -> Self {
        let wide = panel::width(card);
        let mut panels = Vec::new();
        let mut y = NODE_TITLE;
        for row in contents.chunks(across) {
            let height = row.iter().map(PanelContent::height).fold(0.0, f64::max);
            for (column, content) in row.iter().enumerate() {
                let x = PADDING + column as f64 * (wide + GAP);
                panels.push(Panel::new(machine, content, PixelRect::new(x, y, wide, height), card));
            }
            y += height + GAP;
        }
        let across = across.min(contents.len()).max(1) as f64;
        let width = 2.0 * PADDING + across * (wide + GAP) - GAP;
        let bottom = if panels.is_empty() { NODE_TITLE + 28.0 } else { y - GAP + PADDING };
        let known = machine.nodes.iter().find(|node| Some(node.number) == number);
        let cpus = known.map(|node| format!("CPUs {}", label::cpus(&node.cpus, 28)));
        Self {
            frame: PixelRect::new(0.0, 0.0, width, bottom),
            title: label::node(machine, number),
            subtitle: cpus.unwrap_or_default(),
            note: panels.is_empty().then_some("no rail group"),
            panels,
        }
    }

    /// Moves the node and its panels.
    fn shift(&mut self, right: f64, down: f64) {
        let panels = self.panels.iter_mut().flat_map(Panel::frames);
        for frame in panels.chain([&mut self.frame]) {
            frame.x += right;
            frame.y += down;
        }
    }
}

/// Places the nodes on the page. Returns the page's width and the lower edge of the nodes.
fn place(nodes: &mut [NodeBox]) -> (f64, f64) {
    let across = columns(nodes.len(), 1.0);
    let row_width = |row: &[NodeBox]| row.iter().map(|node| node.frame.width + GAP).sum::<f64>() - GAP;
    let widest = nodes.chunks(across).map(row_width).fold(MIN_WIDTH - 2.0 * MARGIN, f64::max);
    let mut y = TITLE;
    for row in nodes.chunks_mut(across) {
        let height = row.iter().map(|node| node.frame.height).fold(0.0, f64::max);
        let mut x = MARGIN + (widest - row_width(row)) / 2.0;
        for node in row {
            node.shift(x, y);
            if !node.panels.is_empty() {
                node.frame.height = height;
            }
            x += node.frame.width + GAP;
        }
        y += height + GAP;
    }
    (widest + 2.0 * MARGIN, y)
}

/// The symbols that the picture uses.
fn symbols(nodes: &[NodeBox]) -> Vec<LegendEntry> {
    let panels = || nodes.iter().flat_map(|node| &node.panels);
    let tile =
        |kind| panels().flat_map(|panel| panel.served.iter().chain(&panel.cards)).any(|t| t.kind == kind);
    let bar = |is_local| panels().flat_map(|panel| &panel.bar).any(|bar| bar.is_local == is_local);
    let worker = panels().any(|panel| panel.cores.as_ref().is_some_and(|cores| cores.worker.is_some()));
    [
        (tile(TileKind::Gpu), Symbol::Tile(TileKind::Gpu), "GPU"),
        (tile(TileKind::Memory), Symbol::Tile(TileKind::Memory), "host memory"),
        (tile(TileKind::Card), Symbol::Tile(TileKind::Card), "RDMA card, in its group's colour"),
        (bar(true), Symbol::Bar { is_local: true }, "below one PCIe switch or host bridge"),
        (bar(false), Symbol::Bar { is_local: false }, "through the CPU"),
        (worker, Symbol::Worker, "the worker's core among the group's cores"),
    ]
    .into_iter()
    .filter(|(is_used, ..)| *is_used)
    .map(|(_, kind, label)| LegendEntry { symbol: PixelRect::default(), kind, label })
    .collect()
}

/// Places the legend below `top`. Returns its lower edge.
fn place_legend(legend: &mut [LegendEntry], top: f64, width: f64) -> f64 {
    let (mut x, mut y) = (MARGIN, top + 8.0);
    for entry in legend.iter_mut() {
        let room = 30.0 + svg::width(entry.label, BODY, false);
        if x > MARGIN && x + room > width - MARGIN {
            (x, y) = (MARGIN, y + LEGEND_LINE);
        }
        entry.symbol = PixelRect::new(x, y, 22.0, 16.0);
        x += room + 20.0;
    }
    y + if legend.is_empty() { 0.0 } else { LEGEND_LINE } + MARGIN / 2.0
}

#[cfg(test)]
mod tests;

//! The panel of one rail group: the memory it serves, its cards, the path between them, and its cores.

use topology::{Address, Cpus, Distance, Machine, RailGroup};

use super::super::label;
use super::svg;

/// The box of a rail group.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// The position.
    pub frame: PixelRect,
    /// The group's number, or `None` for GPUs without a card.
    pub number: Option<usize>,
    /// `group 3`.
    pub title: String,
    /// `4 cards`.
    pub subtitle: String,
    /// GPUs, or host memory.
    pub served: Vec<Tile>,
    /// The bar between the served memory and the cards.
    pub bar: Option<Bar>,
    /// The cards.
    pub cards: Vec<Tile>,
    /// The cores.
    pub cores: Option<Cores>,
}

/// A GPU, a card, or host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tile {
    /// The position.
    pub frame: PixelRect,
    /// The kind of the tile.
    pub kind: TileKind,
    /// The upper line.
    pub name: String,
    /// The lower line; may be empty.
    pub detail: String,
}

/// The kind of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TileKind {
    /// A GPU.
    Gpu,
    /// A card.
    Card,
    /// Host memory.
    Memory,
}

/// The bar between the served memory and the cards.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// The position.
    pub frame: PixelRect,
    /// The label.
    pub label: &'static str,
    /// True if transfers stay below one host bridge.
    pub is_local: bool,
}

/// The group's cores.
#[derive(Debug, Clone, PartialEq)]
pub struct Cores {
    /// The strip of cells.
    pub strip: PixelRect,
    /// The number of cores.
    pub count: usize,
    /// The position of the worker's core, if it is known.
    pub worker: Option<usize>,
    /// The label above the strip.
    pub label: String,
}

/// The content of a panel before its layout.
pub struct PanelContent<'a> {
    /// The group and its number, or `None` for GPUs without a card.
    pub group: Option<(usize, &'a RailGroup)>,
    /// The GPUs.
    pub gpus: &'a [Address],
}

const EDGE: f64 = 14.0;
const HEADER: f64 = 42.0;
const FOOTER: f64 = 56.0;
const TILE: f64 = 36.0;
const STEP: f64 = 42.0;
const SERVED: f64 = 110.0;
const LINK: f64 = 22.0;
const BAR: f64 = 24.0;
/// The minimum height, for the longest label of a bar.
const BODY: f64 = 132.0;
/// The text sizes of a tile's lines.
pub const NAME: f64 = 12.0;
pub const DETAIL: f64 = 11.0;

impl PanelContent<'_> {
    fn cards(&self) -> &[Address] {
        self.group.map_or(&[], |(_, group)| &group.cards)
    }

    /// The height of the panel.
    pub fn height(&self) -> f64 {
        let tiles = self.gpus.len().max(self.cards().len()).max(1) as f64;
        let body = (tiles * STEP - (STEP - TILE)).max(if self.group.is_some() { BODY } else { 0.0 });
        HEADER + body + if self.group.is_some() { FOOTER } else { EDGE }
    }
}

/// The width of card tiles, in which the machine's longest card name fits, up to a maximum.
pub fn card_width(machine: &Machine, groups: &[RailGroup]) -> f64 {
    let cards = groups.iter().flat_map(|group| &group.cards);
    let widths = cards.map(|card| svg::width(&label::card(machine, *card), NAME, true) + 18.0);
    widths.fold(106.0, f64::max).min(240.0).ceil()
}

/// The width of a panel with card tiles of this width.
pub fn width(card: f64) -> f64 {
    EDGE + SERVED + LINK + BAR + LINK + card + EDGE
}

impl Panel {
    /// Lays out the content in `frame`.
    pub fn new(machine: &Machine, content: &PanelContent<'_>, frame: PixelRect, card: f64) -> Self {
        let footer = if content.group.is_some() { FOOTER } else { EDGE };
        let body = PixelRect::new(
            frame.x + EDGE,
            frame.y + HEADER,
            frame.width - 2.0 * EDGE,
            frame.height - HEADER - footer,
        );
        let mut served: Vec<Tile> = content.gpus.iter().map(|gpu| gpu_tile(machine, content, *gpu)).collect();
        if let (true, Some((_, group))) = (served.is_empty(), content.group) {
            served.push(Tile::new(
                TileKind::Memory,
                "host memory".to_owned(),
                label::node(machine, group.node),
            ));
        }
        let mut cards: Vec<Tile> = content.cards().iter().map(|at| card_tile(machine, *at)).collect();
        stack(&mut served, body.x, SERVED, &body);
        stack(&mut cards, body.right() - card, card, &body);
        let bar = content.group.map(|(_, group)| Bar {
            frame: PixelRect::new(body.x + SERVED + LINK, body.y, BAR, body.height),
            label: group.distance.map_or("CPU", label::distance),
            is_local: group.distance.is_some_and(|distance| distance <= Distance::Root),
        });
        let strip = PixelRect::new(body.x, frame.bottom() - EDGE - 12.0, body.width, 12.0);
        Self {
            frame,
            number: content.group.map(|(number, _)| number),
            title: content.group.map_or("no card".to_owned(), |(number, _)| format!("group {number}")),
            subtitle: match content.group {
                Some(_) => label::count(cards.len(), "card"),
                None => label::count(served.len(), "GPU"),
            },
            served,
            bar,
            cards,
            cores: content.group.map(|(_, group)| Cores::new(group, strip)),
        }
    }

    /// The frames of the panel and its parts.
    pub fn frames(&mut self) -> impl Iterator<Item = &mut PixelRect> {
        let tiles = self.served.iter_mut().chain(&mut self.cards).map(|tile| &mut tile.frame);
        let bar = self.bar.as_mut().map(|bar| &mut bar.frame);
        let strip = self.cores.as_mut().map(|cores| &mut cores.strip);
        [&mut self.frame].into_iter().chain(tiles).chain(bar).chain(strip)
    }
}

impl Tile {
    fn new(kind: TileKind, name: String, detail: String) -> Self {
        Self { frame: PixelRect::default(), kind, name, detail }
    }
}

fn gpu_tile(machine: &Machine, content: &PanelContent<'_>, at: Address) -> Tile {
    let gpu = machine.function(at);
    let here = content.group.and_then(|(_, group)| group.node);
    let name = match (gpu.and_then(|gpu| machine.node_of(gpu)), gpu.and_then(label::maker)) {
        (Some(node), _) if here.is_some_and(|here| here != node) => format!("GPU, node {node}"),
        (_, Some(maker)) => format!("{maker} GPU"),
        _ => "GPU".to_owned(),
    };
    Tile::new(TileKind::Gpu, name, at.to_string())
}

fn card_tile(machine: &Machine, at: Address) -> Tile {
    let devices = machine.function(at).map(label::devices).unwrap_or_default();
    match devices.is_empty() {
        true => Tile::new(TileKind::Card, at.to_string(), String::new()),
        false => Tile::new(TileKind::Card, devices, at.to_string()),
    }
}

/// Places tiles below each other, vertically centered in `body`.
fn stack(tiles: &mut [Tile], x: f64, width: f64, body: &PixelRect) {
    let height = tiles.len() as f64 * STEP - (STEP - TILE);
    let top = body.middle() - height / 2.0;
    for (turn, tile) in tiles.iter_mut().enumerate() {
        tile.frame = PixelRect::new(x, top + turn as f64 * STEP, width, TILE);
        tile.name = svg::fitted(&tile.name, NAME, true, width - 14.0);
        tile.detail = svg::fitted(&tile.detail, DETAIL, false, width - 14.0);
    }
}

impl Cores {
    fn new(group: &RailGroup, strip: PixelRect) -> Self {
        let list: Cpus = group.cores.iter().copied().collect();
        let label = match group.core {
            Some(core) => format!("cores {}, worker on {core}", label::cpus(&list, 26)),
            None => "unknown cores".to_owned(),
        };
        Self {
            strip,
            count: group.cores.len(),
            worker: group.cores.iter().position(|core| Some(*core) == group.core),
            label,
        }
    }
}

/// A rectangle, in pixels at 100 % zoom.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PixelRect {
    /// The left edge.
    pub x: f64,
    /// The upper edge.
    pub y: f64,
    /// The width.
    pub width: f64,
    /// The height.
    pub height: f64,
}

impl PixelRect {
    /// A rectangle with this corner and size.
    pub fn new(x: f64, y: f64, width: f64, height: f64) -> Self {
        Self { x, y, width, height }
    }

    /// The right edge.
    pub fn right(&self) -> f64 {
        self.x + self.width
    }

    /// The lower edge.
    pub fn bottom(&self) -> f64 {
        self.y + self.height
    }

    /// The vertical center.
    pub fn middle(&self) -> f64 {
        self.y + self.height / 2.0
    }

    /// The horizontal center.
    pub fn center(&self) -> f64 {
        self.x + self.width / 2.0
    }
}

/// The number of columns of a grid with `count` cells and about `aspect` times as many columns as rows.
pub fn columns(count: usize, aspect: f64) -> usize {
    let rows = (count as f64 / aspect).sqrt().round().max(1.0) as usize;
    count.div_ceil(rows).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_wide_and_full() {
        let of = |aspect| [0, 1, 2, 4, 8, 16].map(|count| columns(count, aspect));
        assert_eq!(of(1.0), [1, 1, 2, 2, 3, 4]);
        assert_eq!(of(2.0), [1, 1, 2, 4, 4, 6]);
    }
}

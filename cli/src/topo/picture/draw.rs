//! Draws a layout as SVG.

use super::panel::{Bar, Cores, DETAIL, NAME, Panel, PixelRect, Tile, TileKind};
use super::svg::{Style, Svg};
use super::{BODY, HEADLINE, LegendEntry, NodeBox, Picture, Symbol};

/// The SVG document of a picture.
pub fn draw(picture: &Picture) -> String {
    let mut svg = Svg::default();
    svg.rectangle(&picture.frame, 0.0, &[("fill", WHITE)]);
    let x = 28.0;
    svg.text(x, 34.0, bold(HEADLINE, TEXT), &picture.title);
    svg.text(x, 62.0, plain(BODY, SECONDARY_TEXT), &picture.subtitle);
    picture.nodes.iter().for_each(|node| draw_node(&mut svg, node));
    picture.legend.iter().for_each(|entry| draw_entry(&mut svg, entry));
    svg.document(picture.frame.width, picture.frame.height, &format!("Rail groups of {}", picture.title))
}

fn plain(size: f64, fill: &'static str) -> Style {
    Style { size, is_bold: false, anchor: "start", fill }
}

fn bold(size: f64, fill: &'static str) -> Style {
    Style { is_bold: true, ..plain(size, fill) }
}

fn draw_node(svg: &mut Svg, node: &NodeBox) {
    let PixelRect { x, y, .. } = node.frame;
    svg.rectangle(&node.frame, 10.0, &[("fill", BACKGROUND), ("stroke", BORDER)]);
    svg.text(x + 16.0, y + 23.0, bold(15.0, TEXT), &node.title);
    let right = Style { anchor: "end", ..plain(BODY, SECONDARY_TEXT) };
    svg.text(node.frame.right() - 16.0, y + 23.0, right, &node.subtitle);
    node.panels.iter().for_each(|panel| draw_panel(svg, panel));
    if let Some(note) = node.note {
        svg.text(x + 16.0, y + 53.0, plain(BODY, SECONDARY_TEXT), note);
    }
}

fn draw_panel(svg: &mut Svg, panel: &Panel) {
    let (colour, on_colour) = panel.number.map_or((BORDER, TEXT), group_colours);
    let PixelRect { x, y, .. } = panel.frame;
    svg.rectangle(&panel.frame, 8.0, &[("fill", WHITE), ("stroke", colour), ("stroke-width", "1.5")]);
    let badge = PixelRect::new(x + 14.0, y + 11.0, 76.0, 21.0);
    svg.rectangle(&badge, 10.5, &[("fill", colour)]);
    let centered = Style { anchor: "middle", ..bold(12.0, on_colour) };
    svg.text(badge.center(), badge.middle(), centered, &panel.title);
    let right = Style { anchor: "end", ..plain(12.0, SECONDARY_TEXT) };
    svg.text(panel.frame.right() - 14.0, badge.middle(), right, &panel.subtitle);
    if let Some(bar) = &panel.bar {
        draw_links(svg, panel, bar, colour);
        draw_bar(svg, bar, colour, on_colour);
    }
    panel.served.iter().chain(&panel.cards).for_each(|tile| draw_tile(svg, tile, colour));
    if let Some(cores) = &panel.cores {
        draw_cores(svg, cores, colour);
    }
}

fn draw_links(svg: &mut Svg, panel: &Panel, bar: &Bar, colour: &'static str) {
    let dashes = if bar.is_local { "none" } else { "4 3" };
    let line = [("stroke", colour), ("stroke-width", "2"), ("stroke-dasharray", dashes)];
    for tile in &panel.served {
        let y = tile.frame.middle();
        svg.line((tile.frame.right(), y), (bar.frame.x, y), &line);
    }
    for tile in &panel.cards {
        let y = tile.frame.middle();
        svg.line((bar.frame.right(), y), (tile.frame.x, y), &line);
    }
}

fn draw_bar(svg: &mut Svg, bar: &Bar, colour: &'static str, on_colour: &'static str) {
    bar_shape(svg, &bar.frame, bar.is_local, colour);
    let ink = if bar.is_local { on_colour } else { TEXT };
    let style = Style { anchor: "middle", ..plain(DETAIL, ink) };
    svg.upwards(bar.frame.center(), bar.frame.middle(), style, bar.label);
}

fn bar_shape(svg: &mut Svg, frame: &PixelRect, is_local: bool, colour: &'static str) {
    match is_local {
        true => svg.rectangle(frame, 4.0, &[("fill", colour)]),
        false => svg.rectangle(
            frame,
            4.0,
            &[("fill", WHITE), ("stroke", colour), ("stroke-width", "1.5"), ("stroke-dasharray", "4 3")],
        ),
    }
}

fn draw_tile(svg: &mut Svg, tile: &Tile, colour: &'static str) {
    tile_shape(svg, &tile.frame, tile.kind, colour);
    let (center, middle) = (tile.frame.center(), tile.frame.middle());
    let name = Style { anchor: "middle", ..bold(NAME, TEXT) };
    if tile.detail.is_empty() {
        return svg.text(center, middle, name, &tile.name);
    }
    svg.text(center, middle - 7.5, name, &tile.name);
    svg.text(center, middle + 8.0, Style { anchor: "middle", ..plain(DETAIL, SECONDARY_TEXT) }, &tile.detail);
}

fn tile_shape(svg: &mut Svg, frame: &PixelRect, kind: TileKind, colour: &'static str) {
    match kind {
        TileKind::Gpu => {
            svg.rectangle(frame, 4.0, &[("fill", GPU), ("stroke", SECONDARY_TEXT), ("stroke-width", "1.5")])
        }
        TileKind::Memory => svg.rectangle(frame, 4.0, &[("fill", WHITE), ("stroke", SECONDARY_TEXT)]),
        TileKind::Card => {
            svg.rectangle(frame, 4.0, &[("fill", WHITE)]);
            let tint = [("fill", colour), ("fill-opacity", "0.14"), ("stroke", colour)];
            svg.rectangle(frame, 4.0, &tint);
        }
    }
}

/// Draws one cell per core. If cells would be too thin to see, draws one bar with the worker's position.
fn draw_cores(svg: &mut Svg, cores: &Cores, colour: &'static str) {
    let PixelRect { x, y, width, height } = cores.strip;
    svg.text(x, y - 13.0, plain(DETAIL, TEXT), &cores.label);
    if cores.count == 0 {
        return;
    }
    let step = width / cores.count as f64;
    let cell =
        |turn: usize, gap: f64| PixelRect::new(x + turn as f64 * step, y, (step - gap).max(3.0), height);
    let empty = [("fill", GPU)];
    if step < 5.0 {
        svg.rectangle(&cores.strip, 2.0, &empty);
    } else {
        (0..cores.count).for_each(|turn| svg.rectangle(&cell(turn, 2.0), 2.0, &empty));
    }
    if let Some(worker) = cores.worker {
        svg.rectangle(&cell(worker, 2.0), 2.0, &[("fill", colour)]);
    }
}

fn draw_entry(svg: &mut Svg, entry: &LegendEntry) {
    let symbol = &entry.symbol;
    match entry.kind {
        Symbol::Tile(kind) => tile_shape(svg, symbol, kind, group_colours(0).0),
        Symbol::Bar { is_local } => {
            let bar = PixelRect::new(symbol.center() - 4.0, symbol.y, 8.0, symbol.height);
            let dashes = if is_local { "none" } else { "4 3" };
            let line = [("stroke", SECONDARY_TEXT), ("stroke-width", "2"), ("stroke-dasharray", dashes)];
            svg.line((symbol.x, symbol.middle()), (symbol.right(), symbol.middle()), &line);
            bar_shape(svg, &bar, is_local, SECONDARY_TEXT);
        }
        Symbol::Worker => {
            for turn in 0..3 {
                let fill = if turn == 1 { SECONDARY_TEXT } else { GPU };
                let cell = PixelRect::new(symbol.x + f64::from(turn) * 8.0, symbol.middle() - 6.0, 6.0, 12.0);
                svg.rectangle(&cell, 2.0, &[("fill", fill)]);
            }
        }
    }
    svg.text(symbol.right() + 8.0, symbol.middle(), plain(BODY, SECONDARY_TEXT), entry.label);
}

/// The colour of a group, and the colour of text on it.
///
/// This is Paul Tol's muted scheme (SRON/EPS/TN/09-002), which is safe for colour-blind people. The order gives
/// neighbours different colours. Colours repeat after nine groups, so each group also shows its number.
fn group_colours(number: usize) -> (&'static str, &'static str) {
    const COLOURS: [(&str, &str); 9] = [
        ("#332288", "#ffffff"),
        ("#44aa99", TEXT),
        ("#cc6677", TEXT),
        ("#117733", "#ffffff"),
        ("#88ccee", TEXT),
        ("#882255", "#ffffff"),
        ("#ddcc77", TEXT),
        ("#aa4499", "#ffffff"),
        ("#999933", TEXT),
    ];
    COLOURS[number % COLOURS.len()]
}

/// The colour of text.
const TEXT: &str = "#1b1f24";
/// The colour of secondary text.
const SECONDARY_TEXT: &str = "#57606a";
/// The colour of borders outside groups.
const BORDER: &str = "#afb8c1";
/// The background of a NUMA node.
const BACKGROUND: &str = "#f3f5f7";
/// The colour of a GPU.
const GPU: &str = "#dfe3e8";
/// The colour of the page and of boxes on a background.
const WHITE: &str = "#ffffff";

//! From the layout to SVG.

use super::frame::Frame;
use super::layout::{BODY, Entry, HEADLINE, NodeBox, Picture, Sign};
use super::palette::{self, GPU, GREY, GROUND, INK, LINE, PAPER};
use super::panel::{Bar, Cores, DETAIL, NAME, Panel, Tile, What};
use super::svg::{Style, Svg};

/// The document.
pub fn draw(picture: &Picture) -> String {
    let mut svg = Svg::default();
    svg.rectangle(&picture.frame, 0.0, &[("fill", PAPER)]);
    let x = 28.0;
    svg.text(x, 34.0, bold(HEADLINE, INK), &picture.title);
    svg.text(x, 62.0, plain(BODY, GREY), &picture.subtitle);
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
    let Frame { x, y, .. } = node.frame;
    svg.rectangle(&node.frame, 10.0, &[("fill", GROUND), ("stroke", LINE)]);
    svg.text(x + 16.0, y + 23.0, bold(15.0, INK), &node.title);
    let right = Style { anchor: "end", ..plain(BODY, GREY) };
    svg.text(node.frame.right() - 16.0, y + 23.0, right, &node.subtitle);
    node.panels.iter().for_each(|panel| draw_panel(svg, panel));
    if let Some(note) = node.note {
        svg.text(x + 16.0, y + 53.0, plain(BODY, GREY), note);
    }
}

fn draw_panel(svg: &mut Svg, panel: &Panel) {
    let (colour, on_colour) = panel.number.map_or((LINE, INK), palette::group);
    let Frame { x, y, .. } = panel.frame;
    svg.rectangle(&panel.frame, 8.0, &[("fill", PAPER), ("stroke", colour), ("stroke-width", "1.5")]);
    let badge = Frame::new(x + 14.0, y + 11.0, 76.0, 21.0);
    svg.rectangle(&badge, 10.5, &[("fill", colour)]);
    let centered = Style { anchor: "middle", ..bold(12.0, on_colour) };
    svg.text(badge.center(), badge.middle(), centered, &panel.title);
    let right = Style { anchor: "end", ..plain(12.0, GREY) };
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
    let dashes = if bar.is_near { "none" } else { "4 3" };
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
    bar_shape(svg, &bar.frame, bar.is_near, colour);
    let ink = if bar.is_near { on_colour } else { INK };
    let style = Style { anchor: "middle", ..plain(DETAIL, ink) };
    svg.upwards(bar.frame.center(), bar.frame.middle(), style, bar.label);
}

fn bar_shape(svg: &mut Svg, frame: &Frame, is_near: bool, colour: &'static str) {
    match is_near {
        true => svg.rectangle(frame, 4.0, &[("fill", colour)]),
        false => svg.rectangle(
            frame,
            4.0,
            &[("fill", PAPER), ("stroke", colour), ("stroke-width", "1.5"), ("stroke-dasharray", "4 3")],
        ),
    }
}

fn draw_tile(svg: &mut Svg, tile: &Tile, colour: &'static str) {
    tile_shape(svg, &tile.frame, tile.what, colour);
    let (center, middle) = (tile.frame.center(), tile.frame.middle());
    let name = Style { anchor: "middle", ..bold(NAME, INK) };
    if tile.detail.is_empty() {
        return svg.text(center, middle, name, &tile.name);
    }
    svg.text(center, middle - 7.5, name, &tile.name);
    svg.text(center, middle + 8.0, Style { anchor: "middle", ..plain(DETAIL, GREY) }, &tile.detail);
}

fn tile_shape(svg: &mut Svg, frame: &Frame, what: What, colour: &'static str) {
    match what {
        What::Gpu => svg.rectangle(frame, 4.0, &[("fill", GPU), ("stroke", GREY), ("stroke-width", "1.5")]),
        What::Memory => svg.rectangle(frame, 4.0, &[("fill", PAPER), ("stroke", GREY)]),
        What::Card => {
            svg.rectangle(frame, 4.0, &[("fill", PAPER)]);
            let tint = [("fill", colour), ("fill-opacity", "0.14"), ("stroke", colour)];
            svg.rectangle(frame, 4.0, &tint);
        }
    }
}

/// Cells side by side; where they would be too thin to see, one bar and the worker's place in it.
fn draw_cores(svg: &mut Svg, cores: &Cores, colour: &'static str) {
    let Frame { x, y, width, height } = cores.strip;
    svg.text(x, y - 13.0, plain(DETAIL, INK), &cores.label);
    if cores.count == 0 {
        return;
    }
    let step = width / cores.count as f64;
    let cell = |turn: usize, gap: f64| Frame::new(x + turn as f64 * step, y, (step - gap).max(3.0), height);
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

fn draw_entry(svg: &mut Svg, entry: &Entry) {
    let sign = &entry.sign;
    match entry.what {
        Sign::Tile(what) => tile_shape(svg, sign, what, palette::group(0).0),
        Sign::Bar { is_near } => {
            let bar = Frame::new(sign.center() - 4.0, sign.y, 8.0, sign.height);
            let dashes = if is_near { "none" } else { "4 3" };
            let line = [("stroke", GREY), ("stroke-width", "2"), ("stroke-dasharray", dashes)];
            svg.line((sign.x, sign.middle()), (sign.right(), sign.middle()), &line);
            bar_shape(svg, &bar, is_near, GREY);
        }
        Sign::Worker => {
            for turn in 0..3 {
                let fill = if turn == 1 { GREY } else { GPU };
                let cell = Frame::new(sign.x + f64::from(turn) * 8.0, sign.middle() - 6.0, 6.0, 12.0);
                svg.rectangle(&cell, 2.0, &[("fill", fill)]);
            }
        }
    }
    svg.text(sign.right() + 8.0, sign.middle(), plain(BODY, GREY), entry.label);
}

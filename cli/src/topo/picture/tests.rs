use roxmltree::Document;
use topology::rail_groups;

use super::super::samples;
use super::Picture;
use super::panel::PixelRect;
use super::*;

fn machines() -> [(&'static str, Machine); 5] {
    [
        ("p5", samples::p5()),
        ("eight GPUs, four cards", samples::eight_gpus_four_cards()),
        ("no GPU", samples::no_gpu()),
        ("one GPU", samples::one_gpu()),
        ("desk", samples::no_card()),
    ]
}

fn overlap(a: &PixelRect, b: &PixelRect) -> bool {
    a.x < b.right() && b.x < a.right() && a.y < b.bottom() && b.y < a.bottom()
}

fn holds(outer: &PixelRect, inner: &PixelRect) -> bool {
    outer.x <= inner.x
        && outer.y <= inner.y
        && inner.right() <= outer.right() + 0.01
        && inner.bottom() <= outer.bottom() + 0.01
}

fn assert_disjoint(kind: &str, outer: &PixelRect, frames: &[PixelRect]) {
    for (number, frame) in frames.iter().enumerate() {
        assert!(holds(outer, frame), "{kind}: {frame:?} is not within {outer:?}");
        for other in &frames[..number] {
            assert!(!overlap(frame, other), "{kind}: {frame:?} and {other:?}");
        }
    }
}

#[test]
fn nothing_overlaps() {
    for (name, machine) in machines() {
        let groups = rail_groups(&machine);
        let picture = Picture::new(name, &machine, &groups);
        let nodes = picture.nodes.iter().map(|node| node.frame);
        let symbols = picture.legend.iter().map(|entry| entry.symbol);
        assert_disjoint(name, &picture.frame, &nodes.chain(symbols).collect::<Vec<_>>());
        let panels = picture.nodes.iter().flat_map(|node| &node.panels);
        assert_eq!(panels.filter(|panel| panel.number.is_some()).count(), groups.len(), "{name}");
        for node in &picture.nodes {
            assert_disjoint(
                name,
                &node.frame,
                &node.panels.iter().map(|panel| panel.frame).collect::<Vec<_>>(),
            );
            for panel in &node.panels {
                let tiles = panel.served.iter().chain(&panel.cards).map(|tile| tile.frame);
                let bar = panel.bar.iter().map(|bar| bar.frame);
                let strip = panel.cores.iter().map(|cores| cores.strip);
                assert_disjoint(name, &panel.frame, &tiles.chain(bar).chain(strip).collect::<Vec<_>>());
            }
        }
    }
}

/// The texts of a picture.
fn words(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).unwrap();
    assert_eq!(document.root_element().tag_name().name(), "svg");
    let texts =
        document.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "text")));
    texts.map(|node| node.text().unwrap_or_default().to_owned()).collect()
}

#[test]
fn every_group_and_card_is_shown_once() {
    for (name, machine) in machines() {
        let groups = rail_groups(&machine);
        let words = words(&svg(name, &machine, &groups));
        let once = |word: &str| assert_eq!(words.iter().filter(|w| *w == word).count(), 1, "{name}: {word}");
        once(name);
        (0..groups.len()).for_each(|number| once(&format!("group {number}")));
        for function in &machine.functions {
            function.rdma.iter().for_each(|card| once(card));
            if matches!(function.kind, topology::Kind::Gpu | topology::Kind::Nic) {
                once(&function.address.to_string());
            }
        }
    }
}

#[test]
fn the_label_shows_the_distance() {
    let labels = |machine: Machine| {
        let words = words(&svg("sample", &machine, &rail_groups(&machine)));
        ["same PCIe switch", "same host bridge", "CPU"]
            .map(|label| words.iter().filter(|word| *word == label).count())
    };
    assert_eq!(labels(samples::p5()), [8, 0, 0]);
    assert_eq!(labels(samples::eight_gpus_four_cards()), [4, 0, 0]);
    assert_eq!(labels(samples::one_gpu()), [0, 1, 0]);
    assert_eq!(labels(samples::no_gpu()), [0, 0, 2]);
}

#[test]
fn hostile_names_stay_text() {
    let name = "</text><script>\u{1b}&\"'";
    let mut machine = samples::p5();
    machine.functions.iter_mut().for_each(|function| function.rdma = vec![name.to_owned(); 40]);
    let words = words(&svg(name, &machine, &rail_groups(&machine)));
    assert!(words.iter().any(|word| word.starts_with("</text><script>")), "{words:?}");
    assert!(words.iter().all(|word| word.chars().count() < 120), "{words:?}");
}

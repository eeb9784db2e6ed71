//! Machines for tests.

use std::fmt::Write as _;
use std::path::Path;

use topology::{Description, Machine};

/// The built-in p5.48xlarge.
pub fn p5() -> Machine {
    Description::p5().machine().unwrap()
}

/// Eight GPUs below four switches on two NUMA nodes, with one ConnectX per switch.
pub fn eight_gpus_four_cards() -> Machine {
    let mut text = String::from(TWO_NODES);
    for switch in 0..4 {
        let (root, node) = (0x10 + switch * 0x10, switch / 2);
        for port in 0..3 {
            let path = format!(
                "0000:{root:02x}/{root:02x}:00.0/{:02x}:0{port}.0/{:02x}:00.0",
                root + 1,
                root + 2 + port
            );
            let (class, id) = if port < 2 { ("0302", "10de:2330") } else { ("0207", "15b3:1021") };
            function(&mut text, &path, class, id, Some(node));
            if port == 2 {
                let _ = writeln!(text, "rdma = \"mlx5_{switch}\"");
            }
        }
    }
    parse(&text)
}

/// Two cards per NUMA node, and no GPU.
pub fn no_gpu() -> Machine {
    let mut text = String::from(TWO_NODES);
    for card in 0..4 {
        function(
            &mut text,
            &format!("0000:{card}0/{card}0:01.0/{card}1:00.0"),
            "0200",
            "15b3:101d",
            Some(card / 2),
        );
        let _ = writeln!(text, "rdma = \"mlx5_{card}\"");
    }
    parse(&text)
}

/// A workstation whose firmware reports no NUMA node, with a GPU and a card on different root ports.
pub fn one_gpu() -> Machine {
    let mut text =
        String::from("name = \"workstation\"\n[[node]]\nnumber = 0\ncores = \"0-15\"\nsibling = 16\n");
    function(&mut text, "0000:00/00:01.0/01:00.0", "0300", "10de:2684", None);
    function(&mut text, "0000:00/00:1c.0/02:00.0", "0200", "15b3:1015", None);
    text.push_str("rdma = \"rocep2s0\"\n");
    function(&mut text, "0000:00/00:1d.0/03:00.0", "0108", "144d:a808", None);
    parse(&text)
}

/// A desktop with a GPU and no card.
pub fn no_card() -> Machine {
    let mut text = String::from("name = \"desk\"\n[[node]]\nnumber = 0\ncores = \"0-7\"\n");
    function(&mut text, "0000:00/00:01.0/01:00.0", "0300", "10de:2684", Some(0));
    parse(&text)
}

const TWO_NODES: &str = "name = \"two\"\n\
    [[node]]\nnumber = 0\ncores = \"0-31\"\nsibling = 64\n\
    [[node]]\nnumber = 1\ncores = \"32-63\"\nsibling = 64\n";

fn function(text: &mut String, path: &str, class: &str, id: &str, node: Option<i32>) {
    let _ = writeln!(text, "[[function]]\npath = \"{path}\"\nclass = \"{class}\"\nid = \"{id}\"");
    if let Some(node) = node {
        let _ = writeln!(text, "node = {node}");
    }
}

fn parse(text: &str) -> Machine {
    Description::parse(text, Path::new("sample")).and_then(|description| description.machine()).unwrap()
}

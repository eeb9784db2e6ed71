use topology::rail_groups;

use super::super::samples;
use super::*;

fn shown(machine: &Machine, disks: bool) -> String {
    text("sample", machine, &rail_groups(machine), disks)
}

/// Fails unless these lines follow each other in `text`.
fn has_lines(text: &str, lines: &[&str]) {
    let all: Vec<&str> = text.lines().collect();
    assert!(all.windows(lines.len()).any(|window| window == lines), "{lines:#?} in\n{text}");
}

#[test]
fn p5() {
    let text = shown(&samples::p5(), false);
    has_lines(&text, &["sample: 8 GPUs, 32 RDMA cards, 8 rail groups, 96 cores, 2 NUMA nodes"]);
    has_lines(
        &text,
        &[
            "NUMA node 0, CPUs 0-47",
            "├─ host bridge 0000:44 ─ 44:00.0 ─ 45:00.0",
            "│  ├─ 46:01.0   card  0000:4f:00.0  rdmap79s0   Amazon 1d0f:efa1  group 0",
        ],
    );
    has_lines(
        &text,
        &[
            "   ├─ bd:01.3   card  0000:c9:00.0  rdmap201s0  Amazon 1d0f:efa1  group 7",
            "   └─ bd:01.4   GPU   0000:ca:00.0              NVIDIA 10de:2330  group 7",
        ],
    );
    assert_eq!(text.matches(" card ").count(), 32);
    assert_eq!(text.matches("host bridge").count(), 8);
    assert!(!text.contains("disk"));
    assert_eq!(shown(&samples::p5(), true).matches(" disk ").count(), 8);
    assert!(text.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn chains_end_at_branches() {
    let text = shown(&samples::one_gpu(), false);
    has_lines(
        &text,
        &[
            "NUMA node 0, CPUs 0-31",
            "└─ host bridge 0000:00",
            "   ├─ 00:01.0   GPU   0000:01:00.0              NVIDIA 10de:2684  group 0",
            "   └─ 00:1c.0   card  0000:02:00.0  rocep2s0    Mellanox 15b3:1015  group 0",
        ],
    );
    has_lines(
        &shown(&samples::no_card(), false),
        &["└─ host bridge 0000:00", "   └─ 00:01.0   GPU   0000:01:00.0              NVIDIA 10de:2684"],
    );
}

#[test]
fn a_restricted_process_is_shown() {
    let mut machine = samples::one_gpu();
    machine.allowed = (2..4).collect();
    has_lines(&shown(&machine, false), &["this process may use CPUs 2-3 of 0-31"]);
}

#[test]
fn names_cannot_control_the_terminal() {
    let mut machine = samples::one_gpu();
    machine.functions.iter_mut().for_each(|function| function.rdma = vec!["\u{1b}[2J\n".to_owned()]);
    let text = shown(&machine, true);
    assert!(!text.contains('\u{1b}') && text.contains(" [2J "), "{text}");
}

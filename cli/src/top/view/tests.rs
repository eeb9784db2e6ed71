//! Frames of dumps that were recorded over an admin socket: a bench whose peer was stopped, and one of its devices
//! drained.

use super::*;

fn sample(json: &str) -> Sample {
    Sample { dump: serde_json::from_str(json).expect("a dump"), omitted_operations: 0, omitted_peers: 0 }
}

fn before() -> Sample {
    sample(include_str!("before.json"))
}

fn after() -> Sample {
    sample(include_str!("after.json"))
}

fn view() -> TopView {
    let mut view = TopView::new(before(), Duration::from_secs(1));
    view.show(after());
    view
}

/// The lines of a frame of this size.
fn frame(view: &mut TopView, width: u16, height: u16) -> Vec<String> {
    let Ok(mut terminal) = ratatui::Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| view.draw(frame));
    let cells = terminal.backend().buffer().content();
    let line = |line: &[ratatui::buffer::Cell]| line.iter().map(|cell| cell.symbol()).collect::<String>();
    cells.chunks(usize::from(width)).map(|cells| line(cells).trim_end().to_owned()).collect()
}

#[test]
fn a_frame_has_rails_peers_operations_and_what_they_wait_for() {
    let expected = "\
multirail top: process 4242 on node7, every 1.0 s q quit, Tab table, arrows rows
0.91 GB/s   7.3 Gbps   222k WRs/s   stalled: 3
Rails: 2
device         transport      state          GB/s     WRs/s   queue       errors
lo0            loopback/0     in service     0.91     222k    0/16384     0
lo1            loopback/1     out of service 0.00     0       0/16384     0
Peers: 1
peer   host                 address                        heard      operations
1      node8                10.0.0.8:7410                  1.5 s ago  3
Operations: 3
op        kind        bytes     peer age     waits for
922.1     write       4 KiB     1    1.5 s   stalled: room in the peer's queue o
923.1     write       4 KiB     1    1.5 s   stalled: room in the peer's queue o
924.1     write       4 KiB     1    1.5 s   stalled: room in the peer's queue o

loopback/0: op 922.1 write of 4096 bytes with imm 0x0 with peer 1 (node8,
10.0.0.8:7410, incarnation 64d742c9e76a86fa): 1.5 s old, no progress for 1.5 s,
deadline in 28.5 s; rail 0 (lo0): 1 unposted, 0 outstanding; waits for room in
the peer's queue on rail 0 (lo0)
";
    assert_eq!(view().text(80), expected);
}

#[test]
fn nothing_is_cut_off_at_80_columns_and_24_lines() {
    let lines = frame(&mut view(), 80, 24);
    let text = lines.join("\n");
    for wanted in [
        "lo0",
        "out of service",
        "10.0.0.8:7410",
        "Rails: 2",
        "Operations: 3",
        "stalled: 3",
        "waits for room in",
    ] {
        assert!(text.contains(wanted), "{wanted} in:\n{text}");
    }
    assert_eq!(lines.len(), 24);
}

#[test]
fn no_size_and_no_key_causes_a_panic() {
    let mut view = view();
    for (width, height) in [(1, 1), (10, 3), (40, 12), (80, 24), (250, 80)] {
        for step in [
            Step::NextTable,
            Step::Rows(1),
            Step::Rows(isize::MAX),
            Step::PreviousTable,
            Step::Rows(isize::MIN),
        ] {
            view.step(step);
            frame(&mut view, width, height);
        }
    }
}

#[test]
fn many_rows_scroll_to_the_selected_one() {
    let mut many = after();
    let rails = many.dump.transports[0].rails.clone();
    for at in 0..32 {
        let mut rail = rails[0].clone();
        (rail.counters.rail, rail.counters.device) = (at, format!("card{at:02}"));
        many.dump.transports[0].rails.push(rail);
    }
    let mut view = TopView::new(many, Duration::from_secs(1));
    let first = frame(&mut view, 80, 24).join("\n");
    assert!(
        first.contains("card00") && !first.contains("card31") && first.contains("Operations: 3"),
        "{first}"
    );
    view.step(Step::NextTable);
    view.step(Step::Rows(33));
    let last = frame(&mut view, 80, 24).join("\n");
    assert!(!last.contains("card00") && last.contains("card31"), "{last}");
    // All of them are in the text.
    let text = view.text(80);
    assert!((0..32).all(|at| text.contains(&format!("card{at:02}"))), "{text}");
}

#[test]
fn hostile_names_do_not_control_the_terminal() {
    let mut hostile = after();
    hostile.dump.peers[0].name.host = "\u{1b}[2Jnode\n".into();
    hostile.dump.transports[0].rails[0].counters.device = "\u{7}lo".into();
    let text = TopView::new(hostile, Duration::from_secs(1)).text(80);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}

#[test]
fn rates_are_differences_over_the_time_of_the_process() {
    let (before, after) = (before().dump, after().dump);
    let (rates, took) = (Rates::between(&before, &after), after.time.since(before.time));
    let bytes = |dump: &Dump| {
        let counters = &dump.transports[0].rails[0].counters;
        counters.bytes + counters.direct_bytes
    };
    let expected = (bytes(&after) - bytes(&before)) as f64 / took.as_secs_f64();
    assert!(expected > 0.0 && (rates.of(0).bytes - expected).abs() < 1.0, "{rates:?}");
    assert_eq!(Rates::between(&after, &after).sum().bytes, 0.0);
}

#[test]
fn figures_keep_their_width() {
    for number in [0.0, 9_999.4, 10_000.0, 123_456.0, 9_999_499.0, 9_999_500.0, 900e6] {
        assert!(count(number).len() <= 6, "{}", count(number));
    }
    for size in [0, 1023, 1024, 1536, 32 << 20, (1 << 30) - 1, u64::MAX >> 8] {
        assert!(bytes(size).len() <= 10, "{}", bytes(size));
    }
    assert_eq!((bytes(4096), bytes(1536)), ("4 KiB".to_owned(), "1.5 KiB".to_owned()));
    for time in [0.0, 0.0005, 0.5, 99.0, 5000.0, 1e6] {
        assert!(short(Duration::from_secs_f64(time)).chars().count() <= 7);
    }
}

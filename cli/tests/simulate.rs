//! `multirail simulate`: virtual time and a given CPU cost, so that every result is exact.
#![cfg(target_os = "linux")]

mod process;

use process::run;
use serde_json::Value;

/// The CPU cost of a request in these tests, far more than measured (about 10 ns).
const COST: [&str; 2] = ["--post-cost-ns", "100"];

/// The rows of `simulate` with these options.
fn simulate(options: &[&str]) -> Vec<Value> {
    let (done, rows, said) = run(&[&["simulate", "--json"], options].concat());
    assert!(done, "{said}");
    rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect()
}

fn one(options: &[&str]) -> Value {
    let mut rows = simulate(&[&COST, options].concat());
    assert_eq!(rows.len(), 1);
    rows.remove(0)
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"))
}

#[test]
fn p5_reaches_its_ceiling() {
    let row = one(&["--size", "64KiB", "--fewest-cores"]);
    assert_eq!(row["rails"], 32);
    assert!((number(&row, "ceiling_gbps") - 3118.0).abs() < 1.0, "{row}");
    assert!(number(&row, "percent_of_ceiling") >= 99.8, "{row}");
    assert!(number(&row, "imbalance_percent") < 1.0, "{row}");
    // 6 million requests a second at 100 ns each.
    assert_eq!(row["fewest_cores"], 1, "{row}");
    assert_eq!(row["rail_bytes"].as_array().expect("rails").len(), 32);
    assert!(row["model"].as_str().expect("text").contains("simulation"));
}

#[test]
fn a_lost_card_costs_its_share_only() {
    let row = one(&["--size", "64KiB", "--lost-cards", "1"]);
    assert_eq!(row["rails"], 31);
    assert!(number(&row, "percent_of_ceiling") >= 99.0, "{row}");
}

#[test]
fn lost_rails_heal_and_nothing_lands_late() {
    for (failed, left) in [("1", 31.0), ("3", 29.0), ("24", 8.0)] {
        let row = one(&["--size", "64KiB", "--fail-rails", failed]);
        assert_eq!((&row["rails"], row["failed_rails"].to_string().as_str()), (&32.into(), failed), "{row}");
        assert!((number(&row, "ceiling_gbps") / (left * 97.433) - 1.0).abs() < 0.001, "{row}");
        assert!((95.0..102.0).contains(&number(&row, "percent_of_ceiling")), "{row}");
        let percent = number(&row, "gbps") / number(&row, "ceiling_gbps") * 100.0;
        assert!((percent - number(&row, "percent_of_ceiling")).abs() < 0.001, "{row}");
        assert!(number(&row, "replayed") >= failed.parse().expect("a number"), "{row}");
        assert_eq!(number(&row, "replayed_bytes"), 65536.0 * number(&row, "replayed"), "{row}");
        // The fence takes 30 µs, and what comes around it less than three round trips.
        assert!((0.03..0.13).contains(&number(&row, "heal_ms")), "{row}");
        assert_eq!(row["late_bytes"], 0, "{row}");
    }
    let slow = one(&["--size", "64KiB", "--groups", "1", "--fail-rails", "1", "--fence-us", "500000"]);
    assert!((500.0..520.0).contains(&number(&slow, "heal_ms")), "{slow}");
    assert_eq!(slow["late_bytes"], 0, "{slow}");
    let (done, table, said) = run(&["simulate", "--size=64KiB", "--fail-rails=2", "--post-cost-ns=10"]);
    assert!(done && table.contains("late bytes") && table.contains("64 KiB"), "{said}{table}");
}

#[test]
fn cards_may_differ_in_number() {
    for (remote, ceiling) in [("2", 2.0), ("3", 3.0), ("8", 4.0)] {
        let row = one(&["--size", "64KiB", "--groups", "1", "--cards", "4", "--remote-cards", remote]);
        assert_eq!(row["rails"], 4, "{row}");
        assert!((number(&row, "ceiling_gbps") / (ceiling * 97.433) - 1.0).abs() < 0.01, "{row}");
        assert!(number(&row, "percent_of_ceiling") >= 99.0, "{row}");
    }
}

#[test]
fn small_pages_meet_the_cards_rate_of_requests() {
    let row = one(&["--size", "1KiB", "--groups", "1"]);
    // Four cards of 0.81 million requests a second.
    let gbps = 4.0 * 0.81e6 * 1024.0 * 8.0 / 1e9;
    assert!((number(&row, "gbps") / gbps - 1.0).abs() < 0.01, "{row}");
}

#[test]
fn a_slow_core_is_the_limit() {
    let row = one(&["--size", "64KiB", "--cores", "1", "--op-rate", "0"]);
    assert!(number(&row, "percent_of_ceiling") >= 99.0, "{row}");
    let row = simulate(&["--size", "64KiB", "--cores", "1", "--post-cost-ns", "400"]).remove(0);
    assert!((number(&row, "busy_cores") - 1.0).abs() < 0.02, "{row}");
    // One request of 64 KiB in 400 ns.
    assert!((number(&row, "gbps") / 1310.7 - 1.0).abs() < 0.02, "{row}");
}

#[test]
fn it_is_calibrated_by_published_figures() {
    // fabric-lib over two EFA cards of 200 Gbps: 17 Gbps at 1 KiB and 274 at 16 KiB, limited by 470 ns per request.
    for (size, gbps) in [("1KiB", 17.0), ("16KiB", 274.0)] {
        let row = simulate(&["--profile", "efa2x200", "--post-cost-ns", "470", "--size", size]).remove(0);
        assert!((number(&row, "gbps") / gbps - 1.0).abs() < 0.1, "{row}");
    }
}

/// A p5 over efa-direct, with all costs counted, so that the rows are the same on every machine.
const P5: [&str; 4] = ["--profile", "p5", "--provider", "efa-direct"];

fn p5(options: &[&str]) -> Value {
    let mut rows = simulate(&[&P5, options].concat());
    assert_eq!(rows.len(), 1);
    rows.remove(0)
}

#[test]
fn rows_name_their_limit_and_its_use() {
    let stages = ["line", "requests", "cpu", "copy"];
    for (options, way, limit) in [
        (&["--size", "64KiB"][..], "direct", "line"),
        (&["--size", "4KiB"], "direct", "requests"),
        (&["--size", "4KiB", "--cores", "1"], "direct", "cpu"),
        (&["--size", "4KiB", "--run", "8"], "merged", "line"),
        (&["--size", "4KiB", "--coalesce", "always"], "coalesced", "line"),
        (&["--size", "4KiB", "--coalesce", "always", "--memory", "host"], "coalesced", "copy"),
    ] {
        let row = p5(&[options, &["--groups", "2"]].concat());
        assert_eq!((&row["way"], &row["limit"]), (&way.into(), &limit.into()), "{row}");
        let used = |stage: &str| number(&row, &format!("{stage}_percent"));
        assert!(stages.iter().all(|stage| used(stage) <= used(limit)), "{row}");
        assert!((90.0..101.0).contains(&used(limit)), "{row}");
        assert!((0.0..=2.01).contains(&number(&row, "cores")), "{row}");
        let percent = number(&row, "gbps") / number(&row, "ceiling_gbps") * 100.0;
        assert!((percent - number(&row, "percent_of_ceiling")).abs() < 0.001, "{row}");
    }
    let row = &simulate(&["--profile", "cx7", "--post-cost-ns=90", "--size=2KiB", "--target-run=16"])[0];
    assert_eq!(row["way"], "gathered", "{row}");
}

#[test]
fn a_provider_takes_cores() {
    // 5.95 million writes of 64 KiB a second, of 878, 1811 and 12325 instructions, at 4.5 a nanosecond.
    for (provider, cores) in [("efa-direct", 1.16), ("efa", 2.39)] {
        let row = simulate(&["--provider", provider, "--size", "64KiB"]).remove(0);
        assert!((number(&row, "cores") / cores - 1.0).abs() < 0.02, "{row}");
        assert!(number(&row, "percent_of_ceiling") >= 99.8, "{row}");
    }
    let row = simulate(&["--provider", "efa-1.17", "--size", "64KiB"]).remove(0);
    assert_eq!(row["limit"], "cpu", "{row}");
    assert!((number(&row, "gbps") / (8.0 * 65536.0 * 8.0 / (12325.0 / 4.5)) - 1.0).abs() < 0.02, "{row}");
    // A faster processor, and no other cost.
    let row = p5(&["--size", "64KiB", "--instructions-per-ns", "9", "--post-cost-ns", "0"]);
    assert!((number(&row, "request_ns") - 734.0 / 9.0).abs() < 0.001, "{row}");
}

#[test]
fn coalescing_brings_small_pages_of_gpus_to_the_line() {
    for (size, never, auto, way) in [
        ("1KiB", 6.8, 60.0, "coalesced"),
        ("4KiB", 27.3, 90.0, "coalesced"),
        ("64KiB", 100.0, 99.8, "direct"),
    ] {
        // Groups share nothing: two are as fast as eight, each.
        let row = p5(&["--size", size, "--groups", "2", "--coalesce", "never"]);
        assert!((number(&row, "percent_of_ceiling") / never - 1.0).abs() < 0.01, "{row}");
        let row = p5(&["--size", size, "--groups", "2", "--coalesce", "auto"]);
        assert_eq!(row["way"], way, "{row}");
        assert!(number(&row, "percent_of_ceiling") >= auto, "{row}");
        assert!(number(&row, "imbalance_percent") < 1.0, "{row}");
    }
}

#[test]
fn the_slowest_stage_of_slots_sets_the_pace() {
    let always =
        |options: &[&str]| p5(&[&["--groups=1", "--size=4KiB", "--coalesce=always"], options].concat());
    let full = always(&[]);
    // Both sides' cores work, and the page table of 9 bytes a page is on the line, with a request for each slot.
    assert!(number(&full, "target_cores") > 0.2 && number(&full, "cores") > 0.2, "{full}");
    let table = number(&full, "line_percent") / number(&full, "percent_of_ceiling");
    assert!((table - (4096.0 + 9.0 + 64.0 / 128.0) / 4096.0).abs() < 0.001, "{full}");
    // Each small slot costs as much as a large one.
    let small = always(&["--slot-bytes", "64KiB"]);
    assert_eq!(small["limit"], "cpu", "{small}");
    assert!(number(&small, "gbps") < 0.5 * number(&full, "gbps"), "{small}");
    // Two slots leave the line idle while they are emptied.
    let two = always(&["--ring-bytes", "1MiB"]);
    assert!(number(&two, "gbps") < 0.8 * number(&full, "gbps"), "{two}");
    // One core copies 9.7 GB/s of pages of 4 KiB on each side, and lists them.
    let host = always(&["--memory", "host"]);
    assert!((0.85..1.0).contains(&(number(&host, "gbytes_per_s") / 9.7)), "{host}");
}

#[test]
fn auto_is_as_fast_as_the_better_one() {
    for options in [
        &["--provider=efa-direct"][..],
        &["--provider=efa", "--memory=host"],
        &["--provider=efa-direct", "--run=8"],
        &["--provider=efa", "--profile=p5en"],
        &["--post-cost-ns=90", "--profile=cx7", "--target-run=16"],
    ] {
        let rows = |coalesce: &str| {
            let sizes = ["--size=1KiB", "--size=4KiB", "--size=16KiB", "--groups=1", "--coalesce", coalesce];
            simulate(&[options, &sizes].concat())
        };
        for ((never, always), auto) in rows("never").iter().zip(rows("always")).zip(rows("auto")) {
            let best = number(never, "gbps").max(number(&always, "gbps"));
            assert!(number(&auto, "gbps") >= 0.95 * best, "{never}\n{always}\n{auto}");
        }
    }
}

#[test]
fn one_seed_one_row() {
    let rows = || simulate(&["--size", "16KiB", "--groups", "2", "--seed", "7", COST[0], COST[1]]);
    assert_eq!(rows(), rows());
}

#[test]
fn peers_are_cheap() {
    let row = simulate(&["--peers", "10000"]).remove(0);
    assert_eq!((&row["peers"], &row["rails"]), (&10_000.into(), &4.into()));
    let each = number(&row, "bytes_per_rail_pair");
    assert!(each > 0.0 && each < 4096.0, "{row}");
}

#[test]
fn a_small_write_waits_for_no_large_one() {
    let row = one(&["--fairness", "--large", "1GiB"]);
    assert_eq!((&row["small"], &row["large"], &row["rails"]), (&4096.into(), &(1 << 30).into(), &4.into()));
    assert!(number(&row, "idle_p99_us") > 15.0, "{row}");
    assert!(
        number(&row, "beside_p99_us") > 1.2 * number(&row, "idle_p99_us"),
        "the large write moved no bytes: {row}"
    );
    assert!(number(&row, "times_idle") < 3.0, "{row}");
    // The large write gets the rest of the line rate.
    assert!(number(&row, "large_gbps") > 0.97 * number(&row, "ceiling_gbps"), "{row}");
}

#[test]
fn large_pages_keep_the_line_busy_too() {
    let row = one(&["--size", "1MiB", "--cores", "1", "--groups", "1"]);
    assert!(number(&row, "percent_of_ceiling") >= 99.8, "{row}");
}

#[test]
fn many_senders_overrun_no_receiver() {
    for depth in ["128", "1024"] {
        let row = simulate(&["--incast", "64", "--cq-depth", depth]).remove(0);
        assert_eq!(
            (&row["senders"], &row["grants"], &row["overruns"]),
            (&64.into(), &true.into(), &0.into())
        );
        assert_eq!(row["arrived"], row["sent"], "{row}");
        let depth: f64 = depth.parse().expect("a number");
        assert!(number(&row, "fullest") > 0.0 && number(&row, "fullest") <= depth, "{row}");
        assert!(number(&row, "spread_percent") <= 10.0, "{row}");
    }
    // The model loses imms that the queue cannot hold.
    let row = simulate(&["--incast", "64", "--no-grants"]).remove(0);
    assert_eq!(row["fullest"], 1024, "{row}");
    assert!(number(&row, "overruns") > 1000.0, "{row}");
    assert_eq!(number(&row, "arrived") + number(&row, "overruns"), number(&row, "sent"), "{row}");
    assert!(
        (number(&row, "gbps") / number(&row, "ceiling_gbps") - 1.0).abs() < 0.02,
        "the line rate is the limit: {row}"
    );
}

#[test]
fn invalid_options_are_refused_in_a_sentence() {
    for (options, says) in [
        (["--cores", "9"], "between 1 and 8, the number of rail groups"),
        (["--cards", "0"], "between 1 and 64"),
        (["--lost-cards", "4"], "less than the 4 cards"),
        (["--size", "0"], "between 1 byte"),
        (["--card-gbps", "0"], "more than 0"),
        (["--post-cost-ns", "-1"], "0 or more"),
        (["--peers", "0"], "between 1 and"),
        (["--incast", "0"], "between 1 and"),
        (["--provider", "tcp"], "give efa-direct or efa"),
        (["--instructions-per-ns", "0"], "between 0.1 and 100"),
        (["--slot-bytes", "1KiB"], "between 4 KiB and 4 MiB"),
        (["--ring-bytes", "256KiB"], "at least two slots"),
        (["--run", "0"], "1..=1024"),
    ] {
        let joined = format!("{}={}", options[0], options[1]);
        let (done, _, said) = run(&["simulate", &joined]);
        assert!(!done && said.contains(says), "{joined}: {said}");
    }
    for (failed, says) in [
        ("0", "give at least 1"),
        ("25", "a rail group would have no rail left"),
        ("32", "these are all 32 rails"),
        ("33", "there are 32 rails"),
    ] {
        let joined = format!("--fail-rails={failed}");
        let (done, _, said) = run(&["simulate", &joined, "--post-cost-ns=1"]);
        assert!(!done && said.contains(says) && said.contains("--fail-rails"), "{joined}: {said}");
    }
    let (done, _, said) = run(&["simulate", "--fail-rails=1", "--post-cost-ns=1", "--size=1GiB"]);
    assert!(!done && said.contains("use a smaller --size"), "{said}");
    let (done, _, said) = run(&["simulate", "--fence-us=1"]);
    assert!(!done && said.contains("--fail-rails"), "{said}");
    let (done, _, said) = run(&["simulate", "--fairness", "--post-cost-ns=1", "--large=0"]);
    assert!(!done && said.contains("between 1 byte"), "{said}");
    for (options, says) in [
        (["--coalesce=auto", "--remote-cards=2"], "remove --remote-cards"),
        (["--coalesce=auto", "--peers=1"], "cannot be used with"),
        (["--provider=efa", "--peers=1"], "no effect on --peers"),
        (["--provider=efa-1.17", "--fairness"], "those of efa-1.17 differ"),
        (["--run=1024", "--size=2MiB"], "must not exceed 1 GiB"),
    ] {
        let (done, _, said) = run(&[&["simulate"][..], &options].concat());
        assert!(!done && said.contains(says), "{options:?}: {said}");
    }
    let (done, _, said) = run(&["simulate", "--no-grants"]);
    assert!(!done && said.contains("--incast"), "{said}");
}

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
    let (done, _, said) = run(&["simulate", "--no-grants"]);
    assert!(!done && said.contains("--incast"), "{said}");
}

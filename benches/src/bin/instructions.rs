//! Counts instructions per operation with callgrind, caller-driven, on one thread.
//!
//! `cargo run --profile dist -p benches --bin instructions` runs itself under valgrind
//! once per case, with and without the operations around the copies, and prints
//! what is ours. It exits with 1 if a case is over its limit: counts, unlike
//! times, are the same on every machine with the same binary.

use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use backend_loopback::{Loopback, Null};
use benches::list_load::ListLoad;
use benches::{Driven, FabricPair, LIMIT, shuffled};
use transport_core::copy::{CopyStrategy, copy};
use transport_core::{Pages, RecvPool, Region, Result, WriteOptions};

const PAGE: usize = 4096;
const PAGES: u32 = 256;
const ROUNDS: u64 = 200;
const WARM: u64 = 20;
const NULL_PAGE: usize = 64 << 10;
const NULL_PAGES: u32 = 1024;
const ENTRIES: u32 = 4096;
const REGIONS: u32 = 64;
const POOL: usize = 64;

/// A measured loop, its name, the operations per round and the limit beyond the copy.
struct Case {
    name: &'static str,
    open: fn() -> Result<FabricPair>,
    measured: fn(&FabricPair),
    copies: fn(&FabricPair),
    per_round: u64,
    limit: u64,
}

const CASES: &[Case] = &[
    Case {
        name: "4 KiB write, post to done",
        open: loopback,
        measured: writes,
        copies: bare_copies,
        per_round: 1,
        limit: 250,
    },
    Case {
        name: "page of a 256 x 4 KiB batch",
        open: loopback,
        measured: batches,
        copies: bare_batches,
        per_round: PAGES as u64,
        limit: 65,
    },
    Case {
        name: "page of 1024 x 64 KiB over 4 null rails",
        open: null,
        measured: null_batches,
        copies: bare_pages,
        per_round: NULL_PAGES as u64,
        limit: 36,
    },
    Case {
        name: "lone 8 B write with imm, and an imm that comes, null",
        open: answering,
        measured: lone_writes,
        copies: nothing,
        per_round: 1,
        limit: 3700,
    },
    Case {
        name: "entry of a prepared list, 4096 x 4 KiB over 64 regions, null",
        open: one_rail,
        measured: prepared_lists,
        copies: bare_lists,
        per_round: ENTRIES as u64,
        limit: 45,
    },
    Case {
        name: "entry of a list selected by index, 4096 x 4 KiB over 64 regions, null",
        open: one_rail,
        measured: selected_lists,
        copies: bare_lists,
        per_round: ENTRIES as u64,
        limit: 310,
    },
    Case {
        name: "notification of 8 bytes, until it is taken",
        open: notifying,
        measured: notifications,
        copies: nothing,
        per_round: 1,
        limit: 5200,
    },
    Case {
        name: "message of 8 bytes into a receive, until it is taken",
        open: loopback,
        measured: messages,
        copies: nothing,
        per_round: 1,
        limit: 2900,
    },
    Case {
        name: "message of 8 bytes into a pool, until it is taken and its buffer is free",
        open: loopback,
        measured: pooled_messages,
        copies: with_a_pool,
        per_round: 1,
        limit: 2900,
    },
    Case {
        name: "turn in which nothing happens, null",
        open: silent,
        measured: idle_turns,
        copies: nothing,
        per_round: 1,
        limit: 260,
    },
];

fn loopback() -> Result<FabricPair> {
    FabricPair::open(Driven::ByCaller, PAGES as usize * PAGE)
}

/// The sides take turns, so that the target's buffers come back.
fn notifying() -> Result<FabricPair> {
    let pair = FabricPair::notifying(Arc::new(Loopback::new()), PAGE)?;
    (0..WARM).for_each(|_| notify(&pair));
    Ok(pair)
}

fn null() -> Result<FabricPair> {
    FabricPair::null(Driven::ByCaller, 4, NULL_PAGES as usize * NULL_PAGE)
}

fn one_rail() -> Result<FabricPair> {
    FabricPair::null(Driven::ByCaller, 1, PAGE)
}

/// Each poll brings an imm.
fn answering() -> Result<FabricPair> {
    let pair = FabricPair::over(Arc::new(Null::new(1).imms_per_poll(1)), Driven::ByCaller, PAGE)?;
    // So that what comes once is not counted.
    (0..WARM).for_each(|_| lone_write(&pair));
    Ok(pair)
}

/// One operation has passed, whose deadline the engine has not come to.
fn silent() -> Result<FabricPair> {
    let pair = FabricPair::null(Driven::ByCaller, 1, PAGE)?;
    let page = Pages::new([0]);
    pair.write_pages(&page, &page, PAGE)?;
    Ok(pair)
}

#[inline(never)]
fn lone_writes(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| lone_write(pair));
}

/// One side's part of a ping-pong.
fn lone_write(pair: &FabricPair) {
    let answers = pair.peer.imm(0);
    let options = WriteOptions::new().imm(1);
    let mut op = pair.peer.write_with(&pair.src, 0..8, &pair.dst, 0, &options).expect("write");
    while !answers.try_take(1) {
        pair.writer.step();
    }
    op.try_result().expect("done").expect("done well");
}

#[inline(never)]
fn notifications(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| notify(pair));
}

fn notify(pair: &FabricPair) {
    let mut op = pair.peer.notify(&[7; 8]).expect("notify");
    let mut notifications = pair.target.notifications().expect("notifications");
    while notifications.try_next().transpose().expect("a notification").is_none() {
        pair.target.step();
    }
    while op.try_result().transpose().expect("done").is_none() {
        pair.writer.step();
    }
}

#[inline(never)]
fn messages(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| message(pair));
}

fn message(pair: &FabricPair) {
    let mut receive = pair.target.recv(&pair.landing, 0..8).expect("recv");
    pair.peer.send(&pair.src, 0..8).expect("send").wait(LIMIT).expect("sent");
    while receive.try_result().transpose().expect("received").is_none() {
        pair.target.step();
    }
}

#[inline(never)]
fn pooled_messages(pair: &FabricPair) {
    let pool = pool(pair);
    (0..ROUNDS).for_each(|_| pooled_message(pair, &pool));
}

/// Makes the pool, as the loop does.
#[inline(never)]
fn with_a_pool(pair: &FabricPair) {
    black_box(pool(pair));
}

/// A pool whose receives are posted.
fn pool(pair: &FabricPair) -> RecvPool {
    let pool = pair.target.recv_pool(POOL, 8).expect("a pool");
    pair.target.step();
    pool
}

fn pooled_message(pair: &FabricPair, pool: &RecvPool) {
    pair.peer.send(&pair.src, 0..8).expect("send").wait(LIMIT).expect("sent");
    while pool.try_next().transpose().expect("received").is_none() {
        pair.target.step();
    }
}

#[inline(never)]
fn idle_turns(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| _ = black_box(pair.writer.step()));
}

#[inline(never)]
fn writes(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| pair.write(black_box(0), PAGE).expect("write"));
}

#[inline(never)]
fn bare_copies(pair: &FabricPair) {
    (0..ROUNDS).for_each(|_| bare_copy(&pair.src, &pair.landing, black_box(0), 0));
}

#[inline(never)]
fn batches(pair: &FabricPair) {
    let (from, to) = (Pages::new(shuffled(PAGES, 1)), Pages::new(shuffled(PAGES, 2)));
    (0..ROUNDS).for_each(|_| pair.write_pages(&from, &to, PAGE).expect("write_pages"));
}

#[inline(never)]
fn null_batches(pair: &FabricPair) {
    let (from, to) = (Pages::new(shuffled(NULL_PAGES, 1)), Pages::new(shuffled(NULL_PAGES, 2)));
    (0..ROUNDS).for_each(|_| pair.write_pages(&from, &to, NULL_PAGE).expect("write_pages"));
}

/// Makes the page tables, once, as the loop does.
#[inline(never)]
fn bare_pages(_: &FabricPair) {
    let (from, to) = (Pages::new(shuffled(NULL_PAGES, 1)), Pages::new(shuffled(NULL_PAGES, 2)));
    (0..ROUNDS).for_each(|_| _ = black_box((&from, &to)));
}

#[inline(never)]
fn prepared_lists(pair: &FabricPair) {
    let load = ListLoad::new(pair, REGIONS, ENTRIES).expect("lists");
    let options = WriteOptions::new();
    let prepared = pair.peer.prepare_write_list(&load.local, &load.from, &load.remote, &load.to, &options);
    let prepared = prepared.expect("prepared");
    (0..ROUNDS).for_each(|_| _ = prepared.post().expect("post").wait(LIMIT).expect("done"));
}

#[inline(never)]
fn selected_lists(pair: &FabricPair) {
    let load = ListLoad::new(pair, REGIONS, ENTRIES).expect("lists");
    let options = WriteOptions::new();
    for _ in 0..ROUNDS {
        let op = pair.peer.write_list(&load.local, &load.from, &load.remote, &load.to, &options);
        op.expect("write_list").wait(LIMIT).expect("done");
    }
}

/// Makes the lists, once, as the loops do.
#[inline(never)]
fn bare_lists(pair: &FabricPair) {
    black_box(ListLoad::new(pair, REGIONS, ENTRIES).expect("lists"));
}

/// A null device copies nothing; what stands around the loop is subtracted alike.
#[inline(never)]
fn nothing(_: &FabricPair) {
    (0..ROUNDS).for_each(|round| _ = black_box(round));
}

#[inline(never)]
fn bare_batches(pair: &FabricPair) {
    let (from, to) = (shuffled(PAGES, 1), shuffled(PAGES, 2));
    for _ in 0..ROUNDS {
        for (from, to) in from.iter().zip(&to) {
            bare_copy(&pair.src, &pair.landing, *from as usize * PAGE, *to as usize * PAGE);
        }
    }
}

fn bare_copy(src: &Region, landing: &Region, from: usize, to: usize) {
    // SAFETY: both regions hold `PAGES` pages, do not overlap, and nobody else
    // touches them: everything here is one thread.
    unsafe { copy(CopyStrategy::Plain, landing.as_ptr().add(to), src.as_ptr().add(from), PAGE) };
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => report(),
        [index, which] => {
            let case = &CASES[index.parse::<usize>().expect("a case's number")];
            let pair = (case.open)().expect("the devices open");
            if which == "bare" {
                (case.copies)(&pair)
            } else {
                (case.measured)(&pair)
            }
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("instructions takes no arguments");
            ExitCode::FAILURE
        }
    }
}

fn report() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for (index, case) in CASES.iter().enumerate() {
        let counted = count(index, "ours").and_then(|ours| Ok((ours, count(index, "bare")?)));
        match counted {
            Ok((ours, bare)) => {
                let each = ours.saturating_sub(bare) / (ROUNDS * case.per_round);
                println!("{}: {each} instructions beyond the copy (limit {})", case.name, case.limit);
                if each > case.limit {
                    code = ExitCode::FAILURE;
                }
            }
            Err(why) => {
                eprintln!("{}: not measured: {why}", case.name);
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

/// Instructions of one measured loop, by callgrind's own total.
fn count(index: usize, which: &str) -> std::result::Result<u64, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let functions: &[&str] = match which {
        "bare" => &[
            "instructions::bare_copies*",
            "instructions::bare_batches*",
            "instructions::bare_pages*",
            "instructions::bare_lists*",
            "instructions::nothing*",
            "instructions::with_a_pool*",
        ],
        _ => &[
            "instructions::writes*",
            "instructions::batches*",
            "instructions::null_batches*",
            "instructions::lone_writes*",
            "instructions::idle_turns*",
            "instructions::notifications*",
            "instructions::messages*",
            "instructions::pooled_messages*",
            "instructions::prepared_lists*",
            "instructions::selected_lists*",
        ],
    };
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"]);
    valgrind.args(functions.iter().map(|function| format!("--toggle-collect={function}")));
    let run = valgrind.arg(program).args([&index.to_string(), which]).output();
    let run = run.map_err(|e| format!("valgrind does not start ({e}); install Debian's package valgrind"))?;
    let text = String::from_utf8_lossy(&run.stderr);
    let total = text.lines().find_map(|line| line.split("Collected :").nth(1)).map(str::trim);
    total
        .and_then(|total| total.parse().ok())
        .filter(|total| *total > 0)
        .ok_or_else(|| format!("no count in: {text}"))
}

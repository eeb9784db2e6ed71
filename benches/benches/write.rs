//! Writes over loopback beside the same copies made by `memcpy` in the same run.

#![allow(missing_docs, reason = "criterion's macros write undocumented functions")]

use std::collections::VecDeque;
use std::hint::black_box;

use benches::{Driven, FabricPair, LIMIT, shuffled};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use transport_core::{Op, Pages};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn memcpy(pair: &FabricPair, from: usize, to: usize, len: usize) {
    // SAFETY: both regions are at least `from.max(to) + len` bytes, they do not
    // overlap, and nobody else touches them while a bench runs.
    unsafe { pair.src.as_ptr().add(from).copy_to_nonoverlapping(pair.landing.as_ptr().add(to), len) };
    black_box(pair.landing.as_ptr());
}

/// Hot 4 KiB writes, post to done: one page over and over (in the first-level
/// cache), and 64 pages in turn (in the second-level cache).
fn small(c: &mut Criterion) {
    let mut group = c.benchmark_group("hot-4KiB");
    group.throughput(Throughput::Bytes(4096));
    for pages in [1, 64] {
        let pair = FabricPair::open(Driven::ByWorkers, pages * 4096).expect("loopback opens");
        let mut turn = 0;
        let mut next = || {
            turn = (turn + 1) % pages;
            black_box(turn * 4096)
        };
        group.bench_function(BenchmarkId::new("memcpy", pages), |b| {
            b.iter(|| {
                let at = next();
                memcpy(&pair, at, at, 4096);
            })
        });
        group.bench_function(BenchmarkId::new("write", pages), |b| {
            b.iter(|| pair.write(next(), 4096).expect("write"))
        });
    }
    group.finish();
}

/// Batches of 256 hot 4 KiB pages, shuffled.
fn batch(c: &mut Criterion) {
    let mut group = c.benchmark_group("hot-256-pages-of-4KiB");
    let (from, to) = (shuffled(256, 1), shuffled(256, 2));
    let (from_pages, to_pages) = (Pages::new(from.clone()), Pages::new(to.clone()));
    group.throughput(Throughput::Elements(256));
    for driven in [Driven::ByCaller, Driven::ByWorkers] {
        let pair = FabricPair::open(driven, MIB).expect("loopback opens");
        let pages = from.iter().zip(&to);
        group.bench_function(BenchmarkId::new("memcpy", format!("{driven:?}")), |b| {
            b.iter(|| {
                pages
                    .clone()
                    .for_each(|(from, to)| memcpy(&pair, *from as usize * 4096, *to as usize * 4096, 4096))
            })
        });
        group.bench_function(BenchmarkId::new("write_pages", format!("{driven:?}")), |b| {
            b.iter(|| pair.write_pages(&from_pages, &to_pages, 4096).expect("write_pages"))
        });
    }
    group.finish();
}

/// 64 KiB to 1 MiB, hot, eight in flight.
fn in_flight(c: &mut Criterion) {
    let mut group = c.benchmark_group("hot-8-in-flight");
    for size in [64 * KIB, 256 * KIB, MIB] {
        let pair = FabricPair::open(Driven::ByWorkers, 2 * MIB).expect("loopback opens");
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(BenchmarkId::new("memcpy", size), |b| b.iter(|| memcpy(&pair, 0, 0, size)));
        group.bench_function(BenchmarkId::new("write", size), |b| {
            b.iter_custom(|rounds| {
                let started = std::time::Instant::now();
                let mut flight: VecDeque<Op> = VecDeque::with_capacity(8);
                for _ in 0..rounds {
                    if flight.len() == 8 {
                        flight.pop_front().map(|mut op| op.wait(LIMIT).expect("write"));
                    }
                    flight.push_back(pair.peer.write(&pair.src, 0..size, &pair.dst, 0).expect("submit"));
                }
                flight.iter_mut().for_each(|op| assert!(op.wait(LIMIT).is_ok()));
                started.elapsed()
            })
        });
    }
    group.finish();
}

/// 64 MiB as one write and as shuffled 64 KiB pages: past the caches, streamed.
fn large(c: &mut Criterion) {
    let mut group = c.benchmark_group("64MiB");
    group.sample_size(20).throughput(Throughput::Bytes(64 * MIB as u64));
    let pair = FabricPair::open(Driven::ByWorkers, 64 * MIB).expect("loopback opens");
    let (from, to) = (shuffled(1024, 1), shuffled(1024, 2));
    group.bench_function("memcpy", |b| b.iter(|| memcpy(&pair, 0, 0, 64 * MIB)));
    group.bench_function("write", |b| b.iter(|| pair.write(0, 64 * MIB).expect("write")));
    group.bench_function("memcpy-pages", |b| {
        let page = 64 * KIB;
        b.iter(|| {
            from.iter()
                .zip(&to)
                .for_each(|(from, to)| memcpy(&pair, *from as usize * page, *to as usize * page, page))
        })
    });
    let (from, to) = (Pages::new(from.clone()), Pages::new(to.clone()));
    group.bench_function("write_pages", |b| {
        b.iter(|| pair.write_pages(&from, &to, 64 * KIB).expect("write_pages"))
    });
    group.finish();
}

/// 16 MiB and 32 MiB, each the next part of regions of 256 MiB: bytes that a shared
/// cache of tens of MiB holds on neither side.
fn cold(c: &mut Criterion) {
    const REGION: usize = 256 * MIB;
    let mut group = c.benchmark_group("cold");
    group.sample_size(20);
    let pair = FabricPair::open(Driven::ByWorkers, REGION).expect("loopback opens");
    for size in [16 * MIB, 32 * MIB] {
        group.throughput(Throughput::Bytes(size as u64));
        let mut at = 0;
        let mut next = || {
            at = (at + size) % REGION;
            black_box(at)
        };
        group.bench_function(BenchmarkId::new("memcpy", size), |b| {
            b.iter(|| {
                let at = next();
                memcpy(&pair, at, at, size);
            })
        });
        group.bench_function(BenchmarkId::new("write", size), |b| {
            b.iter(|| pair.write(next(), size).expect("write"))
        });
    }
    group.finish();
}

criterion_group!(writes, small, batch, in_flight, large, cold);
criterion_main!(writes);

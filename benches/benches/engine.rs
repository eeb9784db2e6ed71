//! What the engine costs by itself: null devices accept and complete, nothing moves.
//!
//! `cargo bench -p benches --bench engine`; one thread, caller-driven. Elements are
//! work requests, or imms.

#![allow(missing_docs, reason = "criterion's macros write undocumented functions")]

use std::sync::Arc;

use backend_loopback::Null;
use benches::{Driven, FabricPair, shuffled};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use transport_core::Pages;

const PAGE: usize = 64 << 10;
const PAGES: u32 = 1024;

/// Imms per poll: as many as the engine takes of one.
const IMMS: u32 = 256;

/// Scattered pages of 64 KiB. 3200 Gbps of them are 6.1 million requests a second.
fn requests(c: &mut Criterion) {
    let mut group = c.benchmark_group("null/write_pages-64KiB");
    group.throughput(Throughput::Elements(PAGES.into()));
    let (from, to) = (Pages::new(shuffled(PAGES, 1)), Pages::new(shuffled(PAGES, 2)));
    for rails in [1, 4, 32] {
        let pair =
            FabricPair::null(Driven::ByCaller, rails, PAGES as usize * PAGE).expect("null devices open");
        group.bench_function(BenchmarkId::new("rails", rails), |b| {
            b.iter(|| pair.write_pages(&from, &to, PAGE).expect("write_pages"))
        });
    }
    group.finish();
}

/// Imms that arrive: one turn of the engine takes a poll's worth and counts them.
fn imms(c: &mut Criterion) {
    let mut group = c.benchmark_group("null/imms");
    group.throughput(Throughput::Elements(IMMS.into()));
    let null = Arc::new(Null::new(1).imms_per_poll(IMMS));
    let pair = FabricPair::over(null, Driven::ByCaller, PAGE).expect("null devices open");
    group.bench_function("received", |b| b.iter(|| assert!(pair.writer.step().events >= IMMS as usize)));
    group.finish();
}

criterion_group!(engine, requests, imms);
criterion_main!(engine);

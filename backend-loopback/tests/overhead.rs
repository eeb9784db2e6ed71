//! The time that loopback adds to its copies. Run it alone and optimised:
//! `cargo test --release -p multirail-loopback --test overhead -- --ignored --nocapture`

mod common;

use std::hint::black_box;
use std::time::Instant;

use common::*;
use multirail_spi::{Access, Locality, Memory, copy, *};

const PAGE: usize = 4096;
const ROUNDS: usize = 200_000;

/// Nanoseconds per call, the best of several tries: the machine is shared.
fn best(calls: usize, mut run: impl FnMut()) -> f64 {
    let mut one = || {
        let start = Instant::now();
        (0..calls).for_each(|_| run());
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..7).map(|_| one()).fold(f64::MAX, f64::min)
}

#[test]
#[ignore = "a measurement"]
fn beyond_the_copy() {
    let (mut a, b, to_b, _) = pair();
    let (source, target) = (a.register(PAGE, Access::LOCAL), b.register(PAGE, BOTH));
    let import = a.import(to_b, &*target.region);
    let direct = a.domain.direct(to_b).unwrap();
    for len in [8, 4096] {
        let request = WorkRequest { len, ..write(1, to_b, &source, Some(&import)) };
        let (to, from) = (target.buffer.as_ptr(), source.buffer.as_ptr());
        let copied = best(ROUNDS, || {
            let strategy = copy::strategy(black_box(len), Locality::Auto);
            // SAFETY: both buffers hold a page.
            unsafe { copy::copy(strategy, black_box(to), black_box(from), len as usize) };
            copy::finish(strategy);
        });
        let directly = best(ROUNDS, || {
            // SAFETY: buffers and import outlive the call.
            unsafe { direct.run(black_box(&request), Some(&*import)) }.unwrap().unwrap();
        });
        let batch: Vec<_> = (0..256).map(|id| WorkRequest { id, ..request }).collect();
        let mut events = Completions::with_room(256);
        let batched = best(ROUNDS / 256, || {
            assert_eq!(a.post(black_box(&batch)).accepted, 256);
            events.clear();
            a.endpoint.poll(&mut events);
            assert_eq!(events.as_slice(), [done(0, 256)]);
        }) / 256.0;
        println!(
            "{len} B: copy {copied:.1} ns; direct +{:.1} ns; batch of 256 +{:.1} ns per request, polled",
            directly - copied,
            batched - copied
        );
    }
}

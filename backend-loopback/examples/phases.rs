//! Scratch.
use std::sync::Arc;
use std::time::Instant;
use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use transport_core::{Access, FabricBuilder, TransportConfig, VirtualClock};
fn main() {
    let n: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(32);
    let mut sums = [0.0f64; 6];
    const ROUNDS: usize = 20;
    for _ in 0..ROUNDS {
        let clock = VirtualClock::default();
        let t0 = Instant::now();
        let open = |seed| {
            let config = LoopbackConfig::default().devices(n).link(LinkModel::p5());
            FabricBuilder::new().transport(TransportConfig::new("x", Arc::new(Loopback::with(config)))).caller_driven().clock(Arc::new(clock.clone())).seed(seed).incarnation(seed).open().unwrap()
        };
        let (a, b) = (open(1), open(2));
        let t1 = Instant::now();
        let (to_b, _to_a) = a.connect_local(&b).unwrap();
        let t2 = Instant::now();
        let src = a.alloc(65536, Access::LOCAL).unwrap();
        let dst = b.alloc(65536, Access::all()).unwrap();
        let remote = to_b.import(&dst.descriptor()).unwrap();
        let t3 = Instant::now();
        let mut op = to_b.write(&src, 0..65536, &remote, 0).unwrap();
        let mut steps = 0;
        while op.try_result().is_none() { a.step(); b.step(); steps += 1; clock.advance(std::time::Duration::from_micros(1)); }
        let t4 = Instant::now();
        drop((remote, src, dst));
        let t5 = Instant::now();
        drop((to_b, _to_a, a, b));
        let t6 = Instant::now();
        for (sum, (x, y)) in sums.iter_mut().zip([(t0, t1), (t1, t2), (t2, t3), (t3, t4), (t4, t5), (t5, t6)]) { *sum += (y - x).as_secs_f64() * 1e3; }
        let _ = steps;
    }
    for (name, sum) in ["open x2", "connect", "alloc+import", "write", "drop regions", "drop fabrics"].iter().zip(sums) { println!("{name:15} {:.3} ms", sum / ROUNDS as f64); }
}

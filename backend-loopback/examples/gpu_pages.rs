//! Writes shuffled pages between GPUs, driven by this thread alone, and says what a page takes: this thread or the GPUs,
//! whichever is slower. Within one GPU (`gpu_pages 4096 262144 0 0`) it is the thread.
//!
//! `gpu_pages [PAGE BYTES] [PAGES] [FROM GPU] [TO GPU]`

use std::sync::Arc;
use std::time::Instant;

use backend_loopback::Loopback;
use cuda::{CudaMemory, Device};
use transport_core::{Access, Fabric, FabricBuilder, Memory, Pages, Region, Result, TransportConfig};

const ROUNDS: usize = 20;

fn main() -> Result<()> {
    let mut numbers = std::env::args().skip(1).map(|number| number.parse::<usize>().expect("a number"));
    let mut number = |usual| numbers.next().unwrap_or(usual);
    let (page, count, from, to) = (number(4096), number(1 << 18), number(0), number(1));
    let devices = Device::all()?;
    let open = || {
        let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
        FabricBuilder::new().transport(loopback).caller_driven().open()
    };
    let (here, there) = (open()?, open()?);
    let (peer, _) = here.connect_local(&there)?;
    let region = |fabric: &Fabric, gpu: usize, access| -> Result<Region> {
        let memory: Arc<dyn Memory> = Arc::new(CudaMemory::new(&devices[gpu], page * count)?);
        // SAFETY: nobody refers to the bytes.
        unsafe { fabric.register(memory, access) }
    };
    let source = region(&here, from, Access::LOCAL)?;
    let target = region(&there, to, Access::REMOTE_WRITE)?;
    let remote = peer.import(&target.descriptor())?;
    let order = |seed| {
        let mut order: Vec<u32> = (0..count as u32).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        Pages::new(order)
    };
    let (pages_here, pages_there) = (order(1), order(2));
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let mut op = peer.write_pages(&source, &pages_here, &remote, &pages_there, page)?;
        let outcome = loop {
            if let Some(outcome) = op.try_result() {
                break outcome;
            }
            here.step();
        };
        outcome?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    println!(
        "{count} pages of {page} bytes, GPU {from} to {to}, by one thread: {:.1} ns per page, {:.1} GB/s",
        best * 1e9 / count as f64,
        (page * count) as f64 / best / 1e9,
    );
    Ok(())
}

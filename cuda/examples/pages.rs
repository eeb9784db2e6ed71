//! Writes shuffled pages between GPUs through a fabric that one thread drives. Prints the time per page: of the thread
//! or of the GPUs, whichever is slower. Within one GPU (`pages 4096 262144 0 0`) the thread is slower.
//!
//! `pages [PAGE BYTES] [PAGES] [FROM GPU] [TO GPU]`

mod arguments;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_loopback::Loopback;
use multirail_cuda::{CudaMemory, Device};
use multirail_spi::{Access, Result};
use transport_core::{Fabric, FabricBuilder, Pages, Region, TransportConfig};

const ROUNDS: usize = 20;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    arguments::end(run())
}

fn run() -> Result<()> {
    let wanted = [("PAGE BYTES", 4096, 1), ("PAGES", 1 << 18, 1), ("FROM GPU", 0, 0), ("TO GPU", 1, 0)];
    let [page, count, from, to] = arguments::numbers(wanted)?;
    let open = || {
        let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
        FabricBuilder::new().transport(loopback).caller_driven().open()
    };
    let (here, there) = (open()?, open()?);
    let (peer, _) = here.connect_local(&there)?;
    let region = |fabric: &Fabric, gpu: usize, access| -> Result<Region> {
        let memory = CudaMemory::new(&Device::open(gpu as u32)?, page.saturating_mul(count))?;
        // SAFETY: there are no references into the memory.
        unsafe { fabric.register(Arc::new(memory), access) }
    };
    let source = region(&here, from, Access::LOCAL)?;
    let target = region(&there, to, Access::REMOTE_WRITE)?;
    let remote = peer.import(&target.descriptor())?;
    let pages = |step| Pages::new(arguments::shuffled(count, step).map(|at| at as u32).collect::<Vec<_>>());
    let (pages_here, pages_there) = (pages(30_011), pages(40_503));
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        peer.write_pages(&source, &pages_here, &remote, &pages_there, page)?.wait(LIMIT)?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    println!(
        "{count} pages of {page} bytes, GPU {from} to {to}, by one thread: {:.1} ns per page, {:.1} GB/s",
        best * 1e9 / count as f64,
        (page * count) as f64 / best / 1e9,
    );
    Ok(())
}

//! Copies shuffled pages by a [`BatchCopier`] alone. Prints the speed, and the time of a launch. If a fabric is slower,
//! the difference is the engine's cost.
//!
//! `batch_copier [PAGE BYTES] [BLOCKS] [BYTES PER BATCH] [FROM GPU] [TO GPU] [REPEATS]`
//!
//! Each batch is launched `REPEATS` times. With many repeats, the speed is that of the GPU alone: with one, a thread lists
//! every page that the GPU copies.

mod arguments;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail_cuda::{BatchCopier, CudaMemory, Device, PlainCopy, Reach};
use multirail_spi::{Memory, Result};

const TOTAL: usize = 1 << 30;
const ROUNDS: usize = 5;

fn main() -> ExitCode {
    arguments::end(run())
}

fn run() -> Result<()> {
    let wanted = [
        ("PAGE BYTES", 65536, 1),
        ("BLOCKS", 32, 1),
        ("BYTES PER BATCH", 4 << 20, 1),
        ("FROM GPU", 0, 0),
        ("TO GPU", 1, 0),
        ("REPEATS", 1, 1),
    ];
    let [page, blocks, batch, from, to, repeats] = arguments::numbers(wanted)?;
    let (from_gpu, to_gpu) = (Device::open(from as u32)?, Device::open(to as u32)?);
    let memory = |gpu| CudaMemory::new(gpu, TOTAL).map(Arc::new);
    let (source, target) = (memory(&from_gpu)?, memory(&to_gpu)?);
    let _ = to_gpu.reaches(&from_gpu);
    let plain = PlainCopy::new(Arc::clone(&source), Arc::clone(&target))?;
    let mut copier = BatchCopier::new(&to_gpu, blocks as u32)?;
    let count = TOTAL / page;
    let order = |step| arguments::shuffled(count, step).map(|at| at * page).collect::<Vec<_>>();
    let (here, there) = (order(30_011), order(40_503));
    let mut best = (f64::MAX, f64::MAX, Duration::ZERO, 0);
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        plain.run()?;
        best.0 = best.0.min(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let (mut launching, mut launches) = (Duration::ZERO, 0);
        for at in 0..count {
            let (to, from) =
                (target.as_ptr() as u64 + there[at] as u64, source.as_ptr() as u64 + here[at] as u64);
            let ends = (to, from, page as u64);
            // SAFETY: in bounds of two memories that outlive the copies: the loop below waits for them.
            unsafe { copier.add(std::iter::once(ends), Reach::Kernel) };
            if copier.open_bytes() >= batch as u64 || copier.room() == 0 || at + 1 == count {
                while !copier.can_launch() {
                    copier.take_completed().transpose()?;
                }
                let before = Instant::now();
                copier.launch_repeatedly(repeats as u32)?;
                launching += before.elapsed();
                launches += repeats as u32;
            }
        }
        while copier.in_flight() > 0 {
            copier.take_completed().transpose()?;
        }
        let took = begun.elapsed().as_secs_f64() / repeats as f64;
        if took < best.1 {
            (best.1, best.2, best.3) = (took, launching, launches);
        }
    }
    let speed = |seconds: f64| TOTAL as f64 / seconds / 1e9;
    println!(
        "pages of {page}, {blocks} blocks, batches of {batch}, {repeats} times, GPU {from} to {to}: {:.1} GB/s, {:.3} of one copy's {:.1}; \
         {:.1} us per launch",
        speed(best.1),
        best.0 / best.1,
        speed(best.0),
        best.2.as_secs_f64() * 1e6 / f64::from(best.3),
    );
    Ok(())
}

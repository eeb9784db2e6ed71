//! The core of each of the two processes.

use crate::BenchResult;

/// Which of the two processes this is.
#[derive(Clone, Copy)]
pub enum ProcessRole {
    /// Measures.
    Writer,
    /// Is written to.
    Target,
}

/// Binds this thread, which drives all, to its side's core as `writes.c` does: the first or the
/// second of those it may use. Where the scheduler puts them else decides more than what is measured.
#[cfg(target_os = "linux")]
pub fn pin(side: ProcessRole) -> BenchResult<()> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let may = sched_getaffinity(None)?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| may.is_set(*core));
    if let Some(core) = cores.nth(side as usize) {
        let mut only = CpuSet::new();
        only.set(core);
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}

/// There is nothing to measure.
#[cfg(not(target_os = "linux"))]
pub fn pin(_: ProcessRole) -> BenchResult<()> {
    Ok(())
}

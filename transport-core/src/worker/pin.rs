//! Keeping a worker on one core.

/// Cores of this machine that lie next to NUMA node `node`, as the system lists them;
/// all where there is no such list.
#[cfg(target_os = "linux")]
fn of_node(node: u32) -> Option<Vec<usize>> {
    let list = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
    parse(list.trim())
}

/// A list as the kernel prints it: `0-3,8,10-11`.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn parse(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last.checked_sub(first)? > 1 << 16 {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// The core next to `node` for the `turn`-th worker there: one that this process may
/// use, and not core 0, which serves most interrupts, while there is another.
#[cfg(target_os = "linux")]
pub(super) fn near(node: u32, turn: usize) -> Option<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cores = of_node(node)?;
    cores.retain(|core| *core < rustix::thread::CpuSet::MAX_CPU && allowed.is_set(*core));
    if cores.len() > 1 {
        cores.retain(|core| *core != 0);
    }
    (!cores.is_empty()).then(|| cores[turn % cores.len()])
}

/// Binds the calling thread to `core`.
#[cfg(target_os = "linux")]
pub(super) fn bind(core: usize) -> std::io::Result<()> {
    if core >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut only = rustix::thread::CpuSet::new();
    only.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &only)?)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn near(_: u32, _: usize) -> Option<usize> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(super) fn bind(_: usize) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_prints_them() {
        assert_eq!(parse("0-3,8,10-11").unwrap(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse("").unwrap(), [0_usize; 0]);
        for wrong in ["x", "3-1", "0-99999999", "1-"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_thread_keeps_to_its_core() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let core = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|core| allowed.is_set(*core)).unwrap();
        let bound = std::thread::spawn(move || {
            bind(core).unwrap();
            rustix::thread::sched_getaffinity(None).unwrap()
        });
        let bound = bound.join().unwrap();
        assert_eq!((bound.count(), bound.is_set(core)), (1, true));
        assert!(bind(usize::MAX).is_err());
    }
}

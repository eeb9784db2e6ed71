//! Keeping a worker on one core.

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
pub(super) fn bind(_: usize) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
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

//! Loading and opening libfabric does not change the program's signal dispositions.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use multirail_efa::{Efa, EfaConfig};
use multirail_spi::{Backend, DomainSetup, EndpointConfig, SystemClock};

extern "C" fn ours(_: c_int) {}

/// The handler and the flags of a signal; `None` for the signals that the C library reserves for itself.
fn disposition(signal: c_int) -> Option<(usize, c_int)> {
    // SAFETY: plain data, which may be zero; nothing is changed.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, null(), &raw mut now) == 0).then_some((now.sa_sigaction, now.sa_flags))
    }
}

fn all() -> Vec<Option<(usize, c_int)>> {
    (1..=libc::SIGRTMAX()).map(disposition).collect()
}

/// Sets dispositions of each kind: a handler, and to ignore. The others stay the default.
fn set_dispositions() {
    // SAFETY: plain data, which may be zero; the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ours as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        for signal in [libc::SIGTERM, libc::SIGABRT] {
            assert_eq!(libc::sigaction(signal, &raw const action, null_mut()), 0);
        }
        action.sa_sigaction = libc::SIG_IGN;
        assert_eq!(libc::sigaction(libc::SIGINT, &raw const action, null_mut()), 0);
    }
}

/// Calls `act`. Returns the signals whose disposition another thread saw changed meanwhile.
fn changed_during(act: impl FnOnce()) -> Vec<c_int> {
    let before = all();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut changed = Vec::new();
            loop {
                // Checks once more after the end.
                let is_last = is_over.load(Ordering::Acquire);
                for (signal, before) in (1..).zip(&before) {
                    if disposition(signal) != *before && !changed.contains(&signal) {
                        changed.push(signal);
                    }
                }
                if is_last {
                    return changed;
                }
            }
        });
        act();
        is_over.store(true, Ordering::Release);
        watch.join().unwrap()
    })
}

fn open(provider: &str) {
    let efa = Efa::with(EfaConfig::default().provider(provider));
    let devices = match efa.probe() {
        Ok(devices) => devices,
        // Without cards, the test covers loading and the probe.
        Err(why) => return eprintln!("{provider}: {}", why.reason),
    };
    let setup =
        DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, worker_sleeps: true };
    let domain = efa.open(&devices[0], &setup).unwrap();
    drop(domain.endpoint(EndpointConfig::default()).unwrap());
}

/// One test, because a process loads libfabric only once.
#[test]
fn dispositions_stay() {
    set_dispositions();
    let before = all();
    let changed = changed_during(|| open("efa"));
    if let Err(why) = multirail_efa::libfabric_version() {
        return eprintln!("skipped: {why}");
    }
    assert_eq!(changed, [], "signals had another disposition while libfabric was loaded");
    assert_eq!(changed_during(|| open("tcp")), [], "signals had another disposition while tcp was opened");
    // shm's handlers are removed after the call.
    open("shm");
    assert_eq!(all(), before, "signals have another disposition after shm was opened");
}

//! Loading and opening libfabric leaves the program's signal dispositions as they were.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use multirail_efa::{Efa, EfaConfig};
use multirail_spi::{Backend, DomainSetup, EndpointConfig, SystemClock};

extern "C" fn ours(_: c_int) {}

/// What the process does on a signal: handler and flags; `None` for what the C library keeps to itself.
fn disposition(signal: c_int) -> Option<(usize, c_int)> {
    // SAFETY: plain data, for which zero will do; nothing is changed.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, null(), &raw mut now) == 0).then_some((now.sa_sigaction, now.sa_flags))
    }
}

fn all() -> Vec<Option<(usize, c_int)>> {
    (1..=libc::SIGRTMAX()).map(disposition).collect()
}

/// One of each kind: a handler, ignored, as the system has it.
fn settle() {
    // SAFETY: plain data, for which zero will do; the handler does nothing.
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

/// Calls `act`; the signals that another thread saw with another disposition meanwhile, if it saw any.
fn watched(act: impl FnOnce()) -> Vec<c_int> {
    let before = all();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut changed = Vec::new();
            loop {
                // Once more after the end.
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
        // There are no cards here: then it ends with the probe.
        Err(why) => return eprintln!("{provider}: {}", why.reason),
    };
    let setup =
        DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, sleeps: true };
    let domain = efa.open(&devices[0], &setup).unwrap();
    drop(domain.endpoint(EndpointConfig::default()).unwrap());
}

/// In one, as a process loads libfabric once.
#[test]
fn dispositions_stay() {
    settle();
    let before = all();
    let changed = watched(|| open("efa"));
    if let Err(why) = multirail_efa::libfabric_version() {
        return eprintln!("skipped: {why}");
    }
    assert_eq!(changed, [], "signals had another disposition while libfabric was loaded");
    assert_eq!(watched(|| open("tcp")), [], "and while tcp was opened");
    // Its handlers are taken back.
    open("shm");
    assert_eq!(all(), before, "signals have another disposition after shm was opened");
}

//! Two processes of an ordinary user, neither of which is the other's parent. This test starts both, and passes
//! addresses on. The tests cover foreign memory through the kernel, every way in which the kernel refuses it, and
//! staging, and the portable path. If the test runs as root, the two processes run as user 65534, else as the test's
//! user.
#![cfg(target_os = "linux")]

mod child;
mod sibling;

use child::{Child, Start};

/// Two connected children, of which `a` uses memory of `b`.
fn pair(a: Start, b: Start) -> (Child, Child) {
    let (mut a, mut b) = (Child::start(a), Child::start(b));
    let address = b.ask("listen");
    b.send("accept");
    a.ask(&format!("connect {address}"));
    b.receive("accept");
    (a, b)
}

/// Moves bytes between memory of `a` and `b` by every operation, in both directions, and verifies them.
fn exercise(a: &mut Child, b: &mut Child, path: &str) {
    for child in [&mut *a, &mut *b] {
        child.ask("own theirs");
        child.ask("own ours");
    }
    for (from, to) in [(1, 2), (2, 1)] {
        let (a, b) = if from == 1 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
        assert_eq!(a.ask("import theirs"), path);
        let seed = from * 10 + to;
        a.ask(&format!("fill ours {seed}"));
        a.ask("write ours theirs 7");
        b.ask("expect 7 1");
        b.ask(&format!("check theirs {seed}"));
        for (mode, imm) in [("last", 8), ("each", 9)] {
            a.ask(&format!("fill ours {}", seed + imm));
            let requests = a.ask(&format!("pages ours theirs {mode} {imm}"));
            b.ask(&format!("expect {imm} {}", if mode == "last" { "1" } else { &requests }));
            b.ask(&format!("check theirs {}", seed + imm));
        }
        b.ask("fill theirs 77");
        a.ask("read ours theirs");
        a.ask("check ours 77");
        assert!(a.ask("explain").contains(&format!("regions by {path}")));
        let outside = a.refused("beyond ours theirs");
        assert!(outside.starts_with("OutOfBounds"), "{outside}");
        b.ask("revoke theirs");
        b.ask("fill theirs 5");
        let late = a.refused("write ours theirs 7");
        assert!(late.starts_with("Revoked"), "{late}");
        b.ask("check theirs 5");
    }
}

const KERNEL: &str = "process_vm_writev and process_vm_readv";
const STAGED: &str = "staged through shared memory";
const NO_CALLS: &str = "the portable path makes no calls on memory of other processes";

/// Returns true if this run is over the portable path (MULTIRAIL_LOOPBACK_PORTABLE=1).
fn is_portable() -> bool {
    multirail_spi::HostSharing::of_this_process().unwrap().is_portable()
}

#[test]
fn siblings_reach_each_other_by_the_kernel() {
    if is_portable() {
        return println!("skipped: {NO_CALLS}");
    }
    let (mut a, mut b) = pair(Start::default(), Start::default());
    exercise(&mut a, &mut b, KERNEL);
}

#[test]
fn staging_is_not_used_if_the_kernel_permits() {
    if is_portable() {
        return println!("skipped: {NO_CALLS}");
    }
    let start = || Start { staging: "1", ..Start::default() };
    let (mut a, mut b) = pair(start(), start());
    exercise(&mut a, &mut b, KERNEL);
}

#[test]
fn refused_siblings_stage() {
    let start = |refuse| Start { staging: "1", refuse, ..Start::default() };
    let (mut a, mut b) = pair(start(libc::EPERM), start(libc::ENOSYS));
    exercise(&mut a, &mut b, STAGED);
}

#[test]
fn a_filter_is_named() {
    if is_portable() {
        return println!("skipped: {NO_CALLS}");
    }
    for (refuse, errno) in [(libc::EPERM, "os error 1"), (libc::ENOSYS, "os error 38")] {
        let (mut a, mut b) = pair(Start { refuse, ..Start::default() }, Start::default());
        b.ask("own theirs");
        names(&a.refused("import theirs"), &["seccomp", errno, "process_vm_writev"]);
    }
    // A filter that is installed after the import is found at the next transfer.
    let (mut a, mut b) = pair(Start::default(), Start::default());
    b.ask("own theirs");
    a.ask("own ours");
    assert_eq!(a.ask("import theirs"), KERNEL);
    a.ask(&format!("filter {}", libc::EPERM));
    names(&a.refused("write ours theirs 1"), &["seccomp"]);
    names(&a.refused("pages ours theirs last 1"), &["seccomp"]);
}

#[test]
fn a_peer_that_is_not_dumpable_is_named() {
    if is_portable() {
        return println!("skipped: {NO_CALLS}");
    }
    let (mut a, mut b) = pair(Start::default(), Start { hidden: true, ..Start::default() });
    b.ask("own theirs");
    names(&a.refused("import theirs"), &["PR_SET_DUMPABLE"]);
}

/// Checks that a refusal contains `parts`, and the alternatives that every refusal names.
fn names(refusal: &str, parts: &[&str]) {
    assert!(refusal.starts_with("Permission"), "{refusal}");
    for part in [parts, &["Fabric::alloc", "MULTIRAIL_LOOPBACK_STAGING=1"]].concat() {
        assert!(refusal.contains(part), "{part:?} is not in {refusal:?}");
    }
}

#[test]
fn the_portable_path_stages_memory_that_is_not_shared() {
    let start = || Start { staging: "1", portable: true, ..Start::default() };
    let (mut a, mut b) = pair(start(), start());
    exercise(&mut a, &mut b, STAGED);
    // Where staging is forbidden, the refusal says what to do.
    let (mut a, mut b) = pair(Start { staging: "0", ..start() }, start());
    b.ask("own theirs");
    names(&a.refused("import theirs"), &["the portable path"]);
}

#[test]
fn processes_on_different_paths_are_told() {
    for portable in [true, false] {
        let mut a = Child::start(Start { portable, ..Start::default() });
        let mut b = Child::start(Start { portable: !portable, ..Start::default() });
        let address = b.ask("listen");
        b.send("accept");
        let refusal = a.refused(&format!("connect {address}"));
        assert!(refusal.contains("MULTIRAIL_LOOPBACK_PORTABLE=1"), "{refusal}");
    }
}

#[test]
fn a_peer_that_does_not_stage_is_named() {
    let a = Start { staging: "1", refuse: libc::EPERM, ..Start::default() };
    let (mut a, mut b) = pair(a, Start::default());
    b.ask("own theirs");
    let refusal = a.refused("import theirs");
    assert!(refusal.contains("the peer does not allow staging"), "{refusal}");
}

#[test]
fn other_users_are_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start processes of two users");
    }
    let mut b = Child::start(Start::default());
    let mut a = Child::start(Start { user: 65533, ..Start::default() });
    let address = b.ask("listen");
    b.send("accept");
    let refusal = a.refused(&format!("connect {address}"));
    for part in ["user 65534", "user 65533", "run both processes as one user"] {
        assert!(refusal.contains(part), "{refusal}");
    }
}

#[test]
fn yama_is_respected_and_named() {
    if is_portable() {
        return println!("skipped: {NO_CALLS}");
    }
    let Ok(scope) = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") else {
        return println!("skipped: this kernel has no Yama");
    };
    let (mut a, mut b) = pair(Start::default(), Start::default());
    b.ask("own theirs");
    match scope.trim() {
        // With 1, the target's PR_SET_PTRACER permits it.
        "0" | "1" => assert_eq!(a.ask("import theirs"), KERNEL),
        more => names(&a.refused("import theirs"), &[&format!("kernel.yama.ptrace_scope is {more}")]),
    }
}

#[test]
fn a_staging_target_that_dies_fails_the_write() {
    let start = |refuse| Start { staging: "1", refuse, ..Start::default() };
    let (mut a, mut b) = pair(start(libc::EPERM), start(libc::EPERM));
    a.ask("own ours");
    b.ask("own theirs");
    assert_eq!(a.ask("import theirs"), STAGED);
    b.stop();
    a.send("write ours theirs 1");
    b.signal(rustix::process::Signal::KILL);
    let refusal = a.receive_refusal("write");
    assert!(refusal.starts_with("PeerDied"), "{refusal}");
}

#[test]
fn a_staging_initiator_that_dies_keeps_no_region_busy() {
    let start = |refuse| Start { staging: "1", refuse, ..Start::default() };
    for _ in 0..3 {
        let (mut a, mut b) = pair(start(libc::EPERM), start(libc::EPERM));
        a.ask("own ours");
        b.ask("own theirs");
        assert_eq!(a.ask("import theirs"), STAGED);
        a.send("hammer ours theirs 1");
        b.ask("expect 1 5");
        a.signal(rustix::process::Signal::KILL);
        b.ask("revoke theirs");
        b.ask("fill theirs 5");
        b.ask("ended");
        b.ask("check theirs 5");
    }
}

/// The other process of the tests above.
#[test]
#[ignore = "started by the others"]
fn sibling() {
    sibling::run();
}

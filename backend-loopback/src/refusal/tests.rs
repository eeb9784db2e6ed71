use std::path::PathBuf;

use super::*;

const OURS: &str = "Name:\ta\nUid:\t7\t7\t7\t7\nGid:\t8\t8\t8\t8\nCapPrm:\t0000000000000000\nSeccomp:\t0\nSeccomp_filters:\t0\n";
const OPEN: Hints = Hints { permitted: 0, dumpable: true, users: 5 };

/// A /proc of our own making.
struct Root(PathBuf);

impl Root {
    fn new(name: &str, ours: &str, theirs: &str, yama: Option<&str>) -> Self {
        let root = std::env::temp_dir().join(format!("multirail-refusal-{}-{name}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/thread-self/status", ours);
        write("proc/42/status", theirs);
        yama.into_iter().for_each(|scope| write("proc/sys/kernel/yama/ptrace_scope", scope));
        Self(root)
    }

    fn verdict(&self, errno: i32, own: Option<i32>, target: &Hints) -> String {
        let pid = Pid::from_raw(42).unwrap();
        Evidence::gather(&self.0, pid, Call::Write, errno, own, 5, target).verdict()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn says(text: &str, all: &[&str]) {
    assert!(text.contains("process_vm_writev on the peer (process 42)"), "{text}");
    all.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text:?}"));
}

#[test]
fn yama_is_named_with_its_value() {
    let scope = |scope: &str, target: &Hints| {
        Root::new(&format!("yama{scope}"), OURS, OURS, Some(&format!("{scope}\n"))).verdict(
            libc::EPERM,
            None,
            target,
        )
    };
    let us = std::process::id();
    says(
        &scope("1", &OPEN),
        &["ptrace_scope is 1: process 42 must permit", &format!("PR_SET_PTRACER, {us}")],
    );
    let unable = Hints { permitted: libc::EINVAL, ..OPEN };
    says(&scope("1", &unable), &["ptrace_scope is 1", "PR_SET_PTRACER) failed with Invalid argument"]);
    says(&scope("2", &OPEN), &["kernel.yama.ptrace_scope is 2", "CAP_SYS_PTRACE", "ptrace_scope=1"]);
    says(&scope("3", &OPEN), &["kernel.yama.ptrace_scope is 3", "next boot"]);
    says(&scope("0", &OPEN), &["security module"]);
}

#[test]
fn a_filter_is_told_from_a_kernel_without_the_call() {
    let filtered = OURS.replace("Seccomp:\t0", "Seccomp:\t2");
    let root = Root::new("seccomp", &filtered, OURS, Some("2"));
    for errno in [libc::EPERM, libc::ENOSYS] {
        says(
            &root.verdict(errno, Some(errno), &OPEN),
            &["seccomp", "--cap-add SYS_PTRACE", "--security-opt seccomp="],
        );
    }
    let root = Root::new("old", OURS, OURS, None);
    says(&root.verdict(libc::ENOSYS, Some(libc::ENOSYS), &OPEN), &["CONFIG_CROSS_MEMORY_ATTACH"]);
}

#[test]
fn who_is_who_comes_before_yama() {
    let root = |name: &str, theirs: String| Root::new(name, OURS, &theirs, Some("1"));
    let plain = root("plain", OURS.into());
    says(&plain.verdict(libc::EPERM, None, &Hints { dumpable: false, ..OPEN }), &["PR_SET_DUMPABLE"]);
    says(&plain.verdict(libc::EPERM, None, &Hints { users: 6, ..OPEN }), &["another user namespace"]);
    let saved = root("uid", OURS.replace("Uid:\t7\t7\t7", "Uid:\t7\t7\t0"));
    says(&saved.verdict(libc::EPERM, None, &OPEN), &["our real user id is 7, the peer's are [7, 7, 0]"]);
    let group = root("gid", OURS.replace("Gid:\t8", "Gid:\t9"));
    says(&group.verdict(libc::EPERM, None, &OPEN), &["our real group id is 8"]);
    let able = root("caps", OURS.replace("CapPrm:\t0000000000000000", "CapPrm:\t0000000000080000"));
    says(&able.verdict(libc::EPERM, None, &OPEN), &["capabilities 0x80000"]);
}

#[test]
fn the_error_names_the_ways_out() {
    let error = error("because");
    assert_eq!(error.kind(), ErrorKind::Permission);
    for part in
        ["because; or else", "Fabric::alloc", "LoopbackConfig::staging", "MULTIRAIL_LOOPBACK_STAGING=1"]
    {
        assert!(error.context().contains(part), "{error}");
    }
    assert!(guess(libc::EPERM).contains("staging"));
}

#[test]
fn this_kernels_own_status_parses() {
    let us = Identity::of(Path::new("/"), "thread-self").unwrap();
    assert_eq!(us.uids[0], rustix::process::getuid().as_raw());
    assert_eq!(Some(us), Identity::of(Path::new("/"), "self"));
}

use std::path::PathBuf;

use super::*;

const OURS: &str = "Name:\ta\nUid:\t7\t7\t7\t7\nGid:\t8\t8\t8\t8\nCapPrm:\t0000000000000000\nSeccomp:\t0\nSeccomp_filters:\t0\n";
const OPEN: PtraceHints = PtraceHints { permit_errno: 0, dumpable: true, user_namespace: 5 };

/// A /proc that the test writes.
struct FakeRoot(PathBuf);

impl FakeRoot {
    fn new(name: &str, ours: &str, theirs: &str, yama: Option<&str>) -> Self {
        let root =
            std::env::temp_dir().join(format!("multirail-ptrace-diagnosis-{}-{name}", std::process::id()));
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

    fn text(&self, errno: i32, own: Option<i32>, target: &PtraceHints) -> String {
        let pid = Pid::from_raw(42).unwrap();
        PtraceDiagnosis::gather(&self.0, pid, VmCall::Write, errno, own, 5, target).text()
    }
}

impl Drop for FakeRoot {
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
    let scope = |scope: &str, target: &PtraceHints| {
        FakeRoot::new(&format!("yama{scope}"), OURS, OURS, Some(&format!("{scope}\n"))).text(
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
    let unable = PtraceHints { permit_errno: libc::EINVAL, ..OPEN };
    says(&scope("1", &unable), &["ptrace_scope is 1", "PR_SET_PTRACER) failed with Invalid argument"]);
    says(&scope("2", &OPEN), &["kernel.yama.ptrace_scope is 2", "CAP_SYS_PTRACE", "ptrace_scope=1"]);
    says(&scope("3", &OPEN), &["kernel.yama.ptrace_scope is 3", "next boot"]);
    says(&scope("0", &OPEN), &["security module"]);
}

#[test]
fn a_filter_is_distinguished_from_a_kernel_without_the_call() {
    let filtered = OURS.replace("Seccomp:\t0", "Seccomp:\t2");
    let root = FakeRoot::new("seccomp", &filtered, OURS, Some("2"));
    for errno in [libc::EPERM, libc::ENOSYS] {
        says(
            &root.text(errno, Some(errno), &OPEN),
            &["seccomp", "--cap-add SYS_PTRACE", "--security-opt seccomp="],
        );
    }
    let root = FakeRoot::new("old", OURS, OURS, None);
    says(&root.text(libc::ENOSYS, Some(libc::ENOSYS), &OPEN), &["CONFIG_CROSS_MEMORY_ATTACH"]);
}

#[test]
fn identities_are_compared_before_yama() {
    let root = |name: &str, theirs: String| FakeRoot::new(name, OURS, &theirs, Some("1"));
    let plain = root("plain", OURS.into());
    says(&plain.text(libc::EPERM, None, &PtraceHints { dumpable: false, ..OPEN }), &["PR_SET_DUMPABLE"]);
    says(
        &plain.text(libc::EPERM, None, &PtraceHints { user_namespace: 6, ..OPEN }),
        &["another user namespace"],
    );
    let saved = root("uid", OURS.replace("Uid:\t7\t7\t7", "Uid:\t7\t7\t0"));
    says(
        &saved.text(libc::EPERM, None, &OPEN),
        &["the real user id of this process is 7, those of the peer are [7, 7, 0]"],
    );
    let group = root("gid", OURS.replace("Gid:\t8", "Gid:\t9"));
    says(&group.text(libc::EPERM, None, &OPEN), &["the real group id of this process is 8"]);
    let able = root("caps", OURS.replace("CapPrm:\t0000000000000000", "CapPrm:\t0000000000080000"));
    says(&able.text(libc::EPERM, None, &OPEN), &["capabilities 0x80000"]);
}

#[test]
fn the_error_names_the_alternatives() {
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
    let us = ProcessIdentity::of(Path::new("/"), "thread-self").unwrap();
    assert_eq!(us.uids[0], rustix::process::getuid().as_raw());
    assert_eq!(Some(us), ProcessIdentity::of(Path::new("/"), "self"));
}

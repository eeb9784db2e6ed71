//! Limits of both versions, limits of parent groups, and malformed files.

use super::super::finding::Level;
use super::super::host::fake::Fake;
use super::*;

/// A group `/a/b` of version 2 on eight cores.
fn v2(files: &[(&str, &str)]) -> Fake {
    let base = Fake::new(&[
        (MEMBERSHIP, "0::/a/b\n"),
        ("/sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
        ("/sys/fs/cgroup/a/b/cgroup.procs", ""),
        ("/proc/self/status", "Cpus_allowed_list:\t0-7\n"),
    ]);
    files.iter().fold(base, |fake, (path, content)| fake.with(&format!("{MOUNT}/{path}"), content.as_bytes()))
}

fn level(check: fn(Check, &ExaminedHost) -> CheckResult, fake: &Fake) -> Level {
    check(Check("it"), fake).expect("readable")[0].level
}

#[test]
fn the_smallest_limit_of_the_parents_counts() {
    assert_eq!(level(time, &v2(&[])), Level::Ok);
    assert_eq!(level(time, &v2(&[("a/b/cpu.max", "max 100000\n")])), Level::Ok);
    assert_eq!(level(time, &v2(&[("a/b/cpu.max", "800000 100000\n")])), Level::Ok);
    let above = v2(&[("a/b/cpu.max", "max 100000\n"), ("a/cpu.max", "150000 100000\n")]);
    let found = time(Check("it"), &above).unwrap();
    assert_eq!(found[0].level, Level::Warning);
    assert_eq!(found[0].what, "CPU time of 1.50 cores (/sys/fs/cgroup/a)");
}

#[test]
fn memory_counts_without_idle_files() {
    let used = |current, stat| {
        v2(&[("a/b/memory.max", "1000000\n"), ("a/b/memory.current", current), ("a/b/memory.stat", stat)])
    };
    assert_eq!(level(memory, &v2(&[("a/b/memory.max", "max\n")])), Level::Ok);
    assert_eq!(level(memory, &used("500000\n", "")), Level::Ok);
    assert_eq!(level(memory, &used("950000\n", "")), Level::Warning);
    assert_eq!(level(memory, &used("950000\n", "anon 1\ninactive_file 400000\n")), Level::Ok);
}

#[test]
fn threads_need_a_high_enough_limit() {
    let of = |most| v2(&[("a/b/pids.max", most), ("a/b/pids.current", "30\n")]);
    assert_eq!(level(threads, &of("max\n")), Level::Ok);
    assert_eq!(level(threads, &of("1024\n")), Level::Ok);
    assert_eq!(level(threads, &of("100\n")), Level::Warning);
    assert_eq!(level(threads, &of("10\n")), Level::Warning, "a limit below the running threads");
}

#[test]
fn the_first_version_has_other_files() {
    let fake = Fake::new(&[
        (MEMBERSHIP, "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/\n0::/\n"),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n"),
        ("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("/sys/fs/cgroup/pids/pids.max", "max\n"),
        ("/proc/self/status", "Cpus_allowed_list:\t0\n"),
    ]);
    assert_eq!(level(time, &fake), Level::Warning, "the container's own mount is the root");
    assert_eq!([level(memory, &fake), level(threads, &fake)], [Level::Ok; 2]);
    let unlimited = fake.with("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", b"-1\n");
    assert_eq!(level(time, &unlimited), Level::Ok);
}

#[test]
fn nothing_mounted_is_skipped_and_nonsense_is_named() {
    for check in [time, memory, threads] {
        assert_eq!(level(check, &Fake::new(&[])), Level::Skipped);
        assert_eq!(level(check, &Fake::new(&[(MEMBERSHIP, "0::/../x\n")])), Level::Skipped);
        let said = check(Check("it"), &Fake::new(&[(MEMBERSHIP, "nonsense\n")])).unwrap_err().to_string();
        assert!(said.contains(MEMBERSHIP), "{said}");
    }
    for (check, file) in [
        (time as fn(Check, &ExaminedHost) -> CheckResult, "cpu.max"),
        (memory, "memory.max"),
        (threads, "pids.max"),
    ] {
        for nonsense in ["lots", "", "10 0", "-3"] {
            let fake = v2(&[(&format!("a/b/{file}"), nonsense)]);
            let said = check(Check("it"), &fake).unwrap_err().to_string();
            assert!(said.contains(&format!("/sys/fs/cgroup/a/b/{file}")), "{said}");
        }
    }
}

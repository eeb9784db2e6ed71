//! Why the kernel keeps us out of a peer's memory, and what would let us in.
//!
//! It says EPERM to all; the evidence lies about in /proc, in what the target says of
//! itself, and in the same call on ourselves: nobody but a seccomp filter refuses that.

use std::path::Path;

use multirail_spi::{Error, ErrorKind};
use rustix::process::Pid;

use crate::foreign::Call;
use crate::wire::Hints;

/// What the user can do whatever the reason is.
const OTHERWISE: &str = "or else use memory that can be shared (Fabric::alloc, HostBuffer), or allow \
     staging in both processes (LoopbackConfig::staging, MULTIRAIL_LOOPBACK_STAGING=1)";

/// Why `call` on `pid` ended with `errno`, and what would mend it.
pub(crate) fn explain(pid: Pid, call: Call, errno: i32, target: &Hints) -> String {
    let own = call.try_on(rustix::process::getpid()).err();
    let users = crate::host::namespace("user");
    Evidence::gather(Path::new("/"), pid, call, errno, own, users, target).verdict()
}

/// What a refusal means that came after the import, where the peer is not known.
pub(crate) fn guess(errno: i32) -> String {
    let ourselves = rustix::process::getpid();
    let target = Hints { permitted: 0, dumpable: true, users: 0 };
    let seen = [Call::Write, Call::Read].map(|call| (call, call.try_on(ourselves).err()));
    let (call, own) = seen.into_iter().find(|(_, own)| own.is_some()).unwrap_or(seen[0]);
    let found = Evidence::gather(Path::new("/"), ourselves, call, errno, own, 0, &target);
    let reason = found.seccomp().unwrap_or_else(|| {
        let yama = found.yama.map_or_else(String::new, |scope| format!(", kernel.yama.ptrace_scope ({scope})"));
        format!("import it again to learn which setting forbids it: its user, PR_SET_DUMPABLE, PR_SET_PTRACER{yama}")
    });
    format!(
        "the kernel refuses process_vm_writev and process_vm_readv on memory of the peer now: {reason}; {OTHERWISE}"
    )
}

/// The error for that reason.
pub(crate) fn error(why: &str) -> Error {
    Error::new(ErrorKind::Permission, "import", format!("{why}; {OTHERWISE}"))
}

/// What is known about a refusal.
struct Evidence<'a> {
    call: Call,
    errno: i32,
    /// What the same call on ourselves ends with.
    own: Option<i32>,
    pid: i32,
    us: Option<Identity>,
    them: Option<Identity>,
    /// Our user namespace.
    users: u64,
    /// kernel.yama.ptrace_scope, where the kernel has Yama.
    yama: Option<u32>,
    target: &'a Hints,
}

/// Lines of /proc/PID/status.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    /// Real, effective, saved.
    uids: [u32; 3],
    gids: [u32; 3],
    /// Permitted capabilities.
    capabilities: u64,
    /// Whether a seccomp filter is installed.
    filtered: bool,
}

impl Identity {
    fn of(root: &Path, process: &str) -> Option<Self> {
        let text = std::fs::read_to_string(root.join("proc").join(process).join("status")).ok()?;
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let three = |name: &str| {
            let mut numbers = line(name)?.split_whitespace().map(|word| word.parse().ok());
            Some([numbers.next()??, numbers.next()??, numbers.next()??])
        };
        Some(Self {
            uids: three("Uid:")?,
            gids: three("Gid:")?,
            capabilities: u64::from_str_radix(line("CapPrm:")?.trim(), 16).ok()?,
            filtered: line("Seccomp:").is_some_and(|mode| mode.trim() == "2"),
        })
    }
}

impl<'a> Evidence<'a> {
    fn gather(
        root: &Path,
        pid: Pid,
        call: Call,
        errno: i32,
        own: Option<i32>,
        users: u64,
        target: &'a Hints,
    ) -> Self {
        let pid = pid.as_raw_nonzero().get();
        let yama = std::fs::read_to_string(root.join("proc/sys/kernel/yama/ptrace_scope"));
        Self {
            call,
            errno,
            own,
            pid,
            us: Identity::of(root, "thread-self"),
            them: Identity::of(root, &pid.to_string()),
            users,
            yama: yama.ok().and_then(|text| text.trim().parse().ok()),
            target,
        }
    }

    fn verdict(&self) -> String {
        let (call, pid) = (self.call.name(), self.pid);
        let answer = std::io::Error::from_raw_os_error(self.errno);
        let reason = self.seccomp().or_else(|| self.identity()).or_else(|| self.yama()).unwrap_or_else(|| {
            "no setting that we know forbids it, so a security module does (SELinux, AppArmor, Landlock): \
             its log (dmesg, ausearch -m avc) names the rule"
                .into()
        });
        format!("the kernel refuses {call} on the peer (process {pid}): {answer}: {reason}")
    }

    /// A call that we may not even make on ourselves.
    fn seccomp(&self) -> Option<String> {
        self.own?;
        let filtered = self.us.as_ref().is_none_or(|us| us.filtered);
        if self.errno == libc::ENOSYS && !filtered {
            return Some(
                "the kernel was built without CONFIG_CROSS_MEMORY_ATTACH: use one that has it".into(),
            );
        }
        Some(
            "a seccomp filter of this process forbids the call (a container's default profile, mostly): start the \
             container with --cap-add SYS_PTRACE, or with --security-opt seccomp=PROFILE where PROFILE \
             allows process_vm_readv and process_vm_writev"
                .into(),
        )
    }

    /// Who we are and who the target is.
    fn identity(&self) -> Option<String> {
        if !self.target.dumpable {
            let advice = "call prctl(PR_SET_DUMPABLE, 1) in the peer after it has changed its user, and give \
                          its program no setuid bit and no file capabilities";
            return Some(format!("the peer is not dumpable (PR_GET_DUMPABLE): {advice}"));
        }
        if self.target.users != self.users {
            return Some("the peer is in another user namespace: run both processes in one".into());
        }
        let (us, them) = (self.us.as_ref()?, self.them.as_ref()?);
        let differs = |ours: &[u32; 3], theirs: &[u32; 3]| theirs.iter().any(|id| *id != ours[0]);
        for (what, ours, theirs) in [("user", us.uids, them.uids), ("group", us.gids, them.gids)] {
            if differs(&ours, &theirs) {
                let advice = "run both processes with the same real, effective and saved ids";
                return Some(format!(
                    "our real {what} id is {}, the peer's are {theirs:?}: {advice}",
                    ours[0]
                ));
            }
        }
        let more = them.capabilities & !us.capabilities;
        (more != 0).then(|| {
            let advice = "give both the same (setcap, ambient sets, --cap-add)";
            format!("the peer has capabilities {more:#x} that this process lacks: {advice}")
        })
    }

    /// What Yama adds to the kernel's own rules.
    fn yama(&self) -> Option<String> {
        let (scope, pid) = (self.yama?, self.pid);
        let us = std::process::id();
        Some(match scope {
            0 => return None,
            1 if self.target.permitted != 0 => format!(
                "kernel.yama.ptrace_scope is 1, and the peer could not permit this process: its \
                 prctl(PR_SET_PTRACER) failed with {}; sysctl -w kernel.yama.ptrace_scope=0",
                std::io::Error::from_raw_os_error(self.target.permitted)
            ),
            1 => format!(
                "kernel.yama.ptrace_scope is 1: process {pid} must permit process {us} by \
                 prctl(PR_SET_PTRACER, {us}), as it did when it was asked for the region; its program must not \
                 call PR_SET_PTRACER itself after that; or sysctl -w kernel.yama.ptrace_scope=0"
            ),
            2 => "kernel.yama.ptrace_scope is 2, which lets in holders of CAP_SYS_PTRACE only: \
                  sysctl -w kernel.yama.ptrace_scope=1, or give this process the capability"
                .into(),
            _ => format!(
                "kernel.yama.ptrace_scope is {scope}, which lets nobody in until the next boot: boot with 1 \
                 (/etc/sysctl.d)"
            ),
        })
    }
}

#[cfg(test)]
mod tests;

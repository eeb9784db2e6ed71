//! Finds out why the kernel refuses calls on a peer's memory, and how the user can fix that.
//!
//! The kernel's errno is EPERM for every reason. The diagnosis looks into /proc, into the target's hints about
//! itself, and tries the same call on this process itself, which only a seccomp filter refuses.

use std::path::Path;

use multirail_spi::{Error, ErrorKind};
use rustix::process::Pid;

use super::ptrace_permission::PtraceHints;
use super::vm_call::VmCall;

/// What the user can do for every reason.
const ALTERNATIVES: &str = "or else use memory that can be shared (Fabric::alloc, HostBuffer), or allow \
     staging in both processes (LoopbackConfig::staging, MULTIRAIL_LOOPBACK_STAGING=1)";

/// The reason why `call` on `pid` ended with `errno`, and how the user can fix it.
pub(crate) fn explain(pid: Pid, call: VmCall, errno: i32, target: &PtraceHints) -> String {
    let own = call.try_on(rustix::process::getpid()).err();
    let user_namespace = crate::host::namespace("user");
    PtraceDiagnosis::gather(Path::new("/"), pid, call, errno, own, user_namespace, target).text()
}

/// The likely reason of a refusal after the import, where the peer is not known.
pub(crate) fn guess(errno: i32) -> String {
    let this_process = rustix::process::getpid();
    let target = PtraceHints { permit_errno: 0, dumpable: true, user_namespace: 0 };
    let tried = [VmCall::Write, VmCall::Read].map(|call| (call, call.try_on(this_process).err()));
    let (call, own) = tried.into_iter().find(|(_, own)| own.is_some()).unwrap_or(tried[0]);
    let found = PtraceDiagnosis::gather(Path::new("/"), this_process, call, errno, own, 0, &target);
    let reason = found.seccomp().unwrap_or_else(|| {
        let yama =
            found.yama.map_or_else(String::new, |scope| format!(", kernel.yama.ptrace_scope ({scope})"));
        format!(
            "import the region again to learn which setting forbids it: the peer's user, PR_SET_DUMPABLE, \
             PR_SET_PTRACER{yama}"
        )
    });
    format!(
        "the kernel now refuses process_vm_writev and process_vm_readv on the peer's memory: {reason}; {ALTERNATIVES}"
    )
}

/// The error of an import that the kernel refuses for the reason `why`.
pub(crate) fn error(why: &str) -> Error {
    Error::new(ErrorKind::Permission, "import", format!("{why}; {ALTERNATIVES}"))
}

/// A refusal, and what this process found out about both processes.
struct PtraceDiagnosis<'a> {
    call: VmCall,
    errno: i32,
    /// The errno of the same call on this process itself.
    own: Option<i32>,
    pid: i32,
    own_identity: Option<ProcessIdentity>,
    target_identity: Option<ProcessIdentity>,
    /// The user namespace of this process.
    user_namespace: u64,
    /// kernel.yama.ptrace_scope, if the kernel has Yama.
    yama: Option<u32>,
    target: &'a PtraceHints,
}

/// The fields of /proc/PID/status that decide about ptrace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ProcessIdentity {
    /// Real, effective, saved.
    uids: [u32; 3],
    gids: [u32; 3],
    /// Permitted capabilities.
    capabilities: u64,
    /// True if a seccomp filter is installed.
    filtered: bool,
}

impl ProcessIdentity {
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

impl<'a> PtraceDiagnosis<'a> {
    fn gather(
        root: &Path,
        pid: Pid,
        call: VmCall,
        errno: i32,
        own: Option<i32>,
        user_namespace: u64,
        target: &'a PtraceHints,
    ) -> Self {
        let pid = pid.as_raw_nonzero().get();
        let yama = std::fs::read_to_string(root.join("proc/sys/kernel/yama/ptrace_scope"));
        Self {
            call,
            errno,
            own,
            pid,
            own_identity: ProcessIdentity::of(root, "thread-self"),
            target_identity: ProcessIdentity::of(root, &pid.to_string()),
            user_namespace,
            yama: yama.ok().and_then(|text| text.trim().parse().ok()),
            target,
        }
    }

    /// The refusal and its reason.
    fn text(&self) -> String {
        let (call, pid) = (self.call.name(), self.pid);
        let answer = std::io::Error::from_raw_os_error(self.errno);
        let reason = self.seccomp().or_else(|| self.identity()).or_else(|| self.yama()).unwrap_or_else(|| {
            "none of the settings that multirail checks forbids it, so a security module does (SELinux, AppArmor, \
             Landlock): its log (dmesg, ausearch -m avc) names the rule"
                .into()
        });
        format!("the kernel refuses {call} on the peer (process {pid}): {answer}: {reason}")
    }

    /// The reason, if this process may not even make the call on itself.
    fn seccomp(&self) -> Option<String> {
        self.own?;
        let filtered = self.own_identity.as_ref().is_none_or(|own| own.filtered);
        if self.errno == libc::ENOSYS && !filtered {
            return Some(
                "the kernel was built without CONFIG_CROSS_MEMORY_ATTACH: use one that has it".into(),
            );
        }
        Some(
            "a seccomp filter of this process forbids the call (usually a container's default profile): start the \
             container with --cap-add SYS_PTRACE, or with --security-opt seccomp=PROFILE where PROFILE \
             allows process_vm_readv and process_vm_writev"
                .into(),
        )
    }

    /// The reason, if the users, groups, capabilities or namespaces of both processes differ.
    fn identity(&self) -> Option<String> {
        if !self.target.dumpable {
            let advice = "call prctl(PR_SET_DUMPABLE, 1) in the peer after it has changed its user, and give \
                          its program no setuid bit and no file capabilities";
            return Some(format!("the peer is not dumpable (PR_GET_DUMPABLE): {advice}"));
        }
        if self.target.user_namespace != self.user_namespace {
            return Some("the peer is in another user namespace: run both processes in one".into());
        }
        let (own, target) = (self.own_identity.as_ref()?, self.target_identity.as_ref()?);
        let differs = |own: &[u32; 3], target: &[u32; 3]| target.iter().any(|id| *id != own[0]);
        for (what, own, target) in [("user", own.uids, target.uids), ("group", own.gids, target.gids)] {
            if differs(&own, &target) {
                let advice = "run both processes with the same real, effective and saved ids";
                return Some(format!(
                    "the real {what} id of this process is {}, those of the peer are {target:?}: {advice}",
                    own[0]
                ));
            }
        }
        let more = target.capabilities & !own.capabilities;
        (more != 0).then(|| {
            let advice = "give both the same (setcap, ambient sets, --cap-add)";
            format!("the peer has capabilities {more:#x} that this process lacks: {advice}")
        })
    }

    /// The reason, if Yama's rule forbids the call.
    fn yama(&self) -> Option<String> {
        let (scope, pid) = (self.yama?, self.pid);
        let own_pid = std::process::id();
        Some(match scope {
            0 => return None,
            1 if self.target.permit_errno != 0 => format!(
                "kernel.yama.ptrace_scope is 1, and the peer could not permit this process: its \
                 prctl(PR_SET_PTRACER) failed with {}; sysctl -w kernel.yama.ptrace_scope=0",
                std::io::Error::from_raw_os_error(self.target.permit_errno)
            ),
            1 => format!(
                "kernel.yama.ptrace_scope is 1: process {pid} must permit process {own_pid} by \
                 prctl(PR_SET_PTRACER, {own_pid}), as it did when it was asked for the region; its program must not \
                 call PR_SET_PTRACER itself after that; or sysctl -w kernel.yama.ptrace_scope=0"
            ),
            2 => "kernel.yama.ptrace_scope is 2, which permits only processes with CAP_SYS_PTRACE: \
                  sysctl -w kernel.yama.ptrace_scope=1, or give this process the capability"
                .into(),
            _ => format!(
                "kernel.yama.ptrace_scope is {scope}, which permits no process until the next boot: boot with 1 \
                 (/etc/sysctl.d)"
            ),
        })
    }
}

#[cfg(test)]
mod tests;

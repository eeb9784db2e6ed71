//! Which processes may use this process's memory by the rules of ptrace.

use std::sync::Mutex;

use rustix::process::{PTracer, Pid};
use serde::{Deserialize, Serialize};

/// Facts that a target reports about itself, and that decide which processes may use its memory. Peers use them for
/// error messages alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PtraceHints {
    /// The errno of its own PR_SET_PTRACER. 0 if that succeeded.
    pub(crate) permit_errno: i32,
    /// True if PR_GET_DUMPABLE returns 1.
    pub(crate) dumpable: bool,
    /// The inode of its user namespace.
    pub(crate) user_namespace: u64,
}

/// Asks Yama, where the kernel has it, to let process `pid` use this process's memory.
///
/// The kernel keeps one tracer. With several peers, any process of this user is permitted, as on systems without
/// Yama. Returns the errno of a refusal, or 0.
pub(crate) fn permit(pid: Pid) -> i32 {
    static PERMITTED: Mutex<PermittedTracers> = Mutex::new(PermittedTracers::None);
    let mut permitted = PERMITTED.lock().expect("permitted tracer");
    *permitted = permitted.with(pid);
    // Without Yama the kernel refuses this call, and no permission is needed.
    let permitted = rustix::process::set_ptracer(permitted.tracer());
    permitted.map_or_else(|error| error.raw_os_error(), |()| 0)
}

/// The hints about this process. `permit_errno` is the result of [`permit`].
pub(crate) fn hints(permit_errno: i32) -> PtraceHints {
    let dumpable = rustix::process::dumpable_behavior();
    PtraceHints {
        permit_errno,
        dumpable: dumpable.is_ok_and(|it| it == rustix::process::DumpableBehavior::Dumpable),
        user_namespace: crate::host::namespace("user"),
    }
}

/// The processes that may use this process's memory. The set only grows, since a permitted process may be copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PermittedTracers {
    None,
    One(Pid),
    Any,
}

impl PermittedTracers {
    /// The same set with `pid`.
    fn with(self, pid: Pid) -> Self {
        match self {
            Self::None => Self::One(pid),
            Self::One(known) if known == pid => self,
            Self::One(_) | Self::Any => Self::Any,
        }
    }

    fn tracer(self) -> PTracer {
        match self {
            Self::None => PTracer::None,
            Self::One(pid) => PTracer::ProcessID(pid),
            Self::Any => PTracer::Any,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permitted_process_stays_permitted() {
        let [a, b] = [1, 2].map(|pid| Pid::from_raw(pid).unwrap());
        let one = PermittedTracers::None.with(a);
        assert_eq!((one, one.with(a)), (PermittedTracers::One(a), PermittedTracers::One(a)));
        assert_eq!((one.with(b), one.with(b).with(b)), (PermittedTracers::Any, PermittedTracers::Any));
    }
}

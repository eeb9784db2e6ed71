//! The address of a card, by which others find the process that it is of.

use std::fs;

/// A process, and which of those that had its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// When it started, in the kernel's ticks (proc(5), `stat`).
    started: u64,
}

impl ProcessId {
    /// The process with this number now, if there is one that has not ended.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let (process, state) = Self::look(pid)?;
        (!matches!(state, 'Z' | 'X' | 'x')).then_some(process)
    }

    /// The process with this number, and its state.
    fn look(pid: u32) -> Option<(Self, char)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let started = fields.nth(18)?.parse().ok()?;
        Some((Self { pid, started }, state))
    }

    /// Whether it stands still, by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        Self::look(self.pid).is_some_and(|(process, state)| process == *self && matches!(state, 'T' | 't'))
    }

    /// Whether it is still there.
    pub(crate) fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// The name of its folder.
    pub(crate) fn folder(&self) -> String {
        format!("{}-{}", self.pid, self.started)
    }

    /// The process of a folder.
    pub(crate) fn of_folder(name: &str) -> Option<Self> {
        let (pid, started) = name.split_once('-')?;
        Some(Self { pid: pid.parse().ok()?, started: started.parse().ok()? })
    }

    /// The GID of its card `card`: link-local as an EFA card's, and another one for every process,
    /// so that each is a host of its own.
    pub(crate) fn gid(&self, card: usize) -> [u8; 16] {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[3] = card as u8;
        gid[4..8].copy_from_slice(&self.pid.to_be_bytes());
        gid[8..].copy_from_slice(&self.started.to_be_bytes());
        gid
    }

    /// The process and card of a GID.
    pub(crate) fn of_gid(gid: &[u8; 16]) -> Option<(Self, usize)> {
        let [a, b, c, d, e, f, g, h] = gid[8..].try_into().ok()?;
        let started = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let pid = u32::from_be_bytes([gid[4], gid[5], gid[6], gid[7]]);
        let card = usize::from(gid[3]);
        (gid[..3] == [0xfe, 0x80, 0] && card < crate::p5::CARDS).then_some((Self { pid, started }, card))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_gid_and_folder() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert_eq!(ProcessId::of_gid(&me.gid(31)), Some((me, 31)));
        assert_eq!(ProcessId::of_folder(&me.folder()), Some(me));
        assert!(!me.is_stopped());
        assert!(me.is_alive() && !ProcessId { started: me.started + 1, ..me }.is_alive());
        assert_eq!(ProcessId::of_gid(&[0xff; 16]), None);
    }
}

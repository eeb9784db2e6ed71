//! The identity of a process, and the GID of a card, by which other processes find the process of the card.

use std::fs;

/// The identity of a process. The start time distinguishes it from other processes with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// The start time in ticks of the kernel (proc(5), `stat`).
    started: u64,
}

impl ProcessId {
    /// The process with this number now, if there is one that has not ended.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let (process, state) = Self::read(pid)?;
        (!matches!(state, 'Z' | 'X' | 'x')).then_some(process)
    }

    /// The process with this number, and its state.
    fn read(pid: u32) -> Option<(Self, char)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain any character.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let started = fields.nth(18)?.parse().ok()?;
        Some((Self { pid, started }, state))
    }

    /// Whether the process is stopped, by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        Self::read(self.pid).is_some_and(|(process, state)| process == *self && matches!(state, 'T' | 't'))
    }

    /// Whether the process still exists.
    pub(crate) fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// The name of the process's folder.
    pub(crate) fn folder(&self) -> String {
        format!("{}-{}", self.pid, self.started)
    }

    /// The process of a folder with this name.
    pub(crate) fn of_folder(name: &str) -> Option<Self> {
        let (pid, started) = name.split_once('-')?;
        Some(Self { pid: pid.parse().ok()?, started: started.parse().ok()? })
    }

    /// The GID of card `card` of the process. It is link-local, as an EFA card's, and differs for every process, so
    /// that each process is a host of its own.
    pub(crate) fn gid(&self, card: usize) -> [u8; 16] {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[3] = card as u8;
        gid[4..8].copy_from_slice(&self.pid.to_be_bytes());
        gid[8..].copy_from_slice(&self.started.to_be_bytes());
        gid
    }

    /// The process and the card of a GID.
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

//! What a process holds and uses.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Threads, file descriptors, processor time used so far, and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Census {
    pub threads: usize,
    pub files: usize,
    pub busy: Duration,
    /// Bytes of memory that are resident.
    pub resident: u64,
}

impl Census {
    /// Of this process.
    pub(crate) fn take() -> std::io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        // Reading the directory takes a descriptor itself.
        let files = std::fs::read_dir("/proc/self/fd")?.count() - 1;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let busy = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        Ok(Self { threads, files, busy, resident: resident()? })
    }
}

/// From `VmRSS`, in kB, of `/proc/self/status`.
fn resident() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.unwrap_or(0) * 1024)
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.threads, self.files, self.busy.as_nanos(), self.resident)
    }
}

impl FromStr for Census {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u64>, _> = text.split(' ').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[threads, files, nanos, resident]) => Ok(Self {
                threads: threads as usize,
                files: files as usize,
                busy: Duration::from_nanos(nanos),
                resident,
            }),
            _ => Err(format!("{text:?} is no census")),
        }
    }
}

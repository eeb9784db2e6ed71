//! The resources that a process holds and uses.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Threads, file descriptors, CPU time so far, and memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResourceUsage {
    pub threads: usize,
    pub files: usize,
    pub cpu_time: Duration,
    /// Resident memory in bytes.
    pub resident: u64,
}

impl ResourceUsage {
    /// Reads the usage of this process.
    pub(crate) fn of_this_process() -> std::io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        // Reading the directory uses one descriptor.
        let files = std::fs::read_dir("/proc/self/fd")?.count() - 1;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let cpu_time = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        Ok(Self { threads, files, cpu_time, resident: resident()? })
    }
}

/// Resident memory in bytes, from `VmRSS` of `/proc/self/status`, which is in kB.
fn resident() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.unwrap_or(0) * 1024)
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.threads, self.files, self.cpu_time.as_nanos(), self.resident)
    }
}

impl FromStr for ResourceUsage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u64>, _> = text.split(' ').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[threads, files, nanos, resident]) => Ok(Self {
                threads: threads as usize,
                files: files as usize,
                cpu_time: Duration::from_nanos(nanos),
                resident,
            }),
            _ => Err(format!("{text:?} is no resource usage")),
        }
    }
}

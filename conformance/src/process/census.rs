//! What a process holds and uses.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Threads, file descriptors, and processor time used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Census {
    pub threads: usize,
    pub files: usize,
    pub busy: Duration,
}

impl Census {
    /// Of this process.
    pub(crate) fn take() -> std::io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        // Reading the directory takes a descriptor itself.
        let files = std::fs::read_dir("/proc/self/fd")?.count() - 1;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Ok(Self { threads, files, busy: Duration::new(time.tv_sec as u64, time.tv_nsec as u32) })
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.threads, self.files, self.busy.as_nanos())
    }
}

impl FromStr for Census {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Result<Vec<u64>, _> = text.split(' ').map(str::parse).collect();
        match numbers.as_deref() {
            Ok([threads, files, nanos]) => Ok(Self {
                threads: *threads as usize,
                files: *files as usize,
                busy: Duration::from_nanos(*nanos),
            }),
            _ => Err(format!("{text:?} is no census")),
        }
    }
}

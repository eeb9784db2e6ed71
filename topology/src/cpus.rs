//! Sets of CPUs, in the kernel's notation.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A set of CPUs by number, for example `0-3,8,10-11`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cpus(pub BTreeSet<u32>);

/// All CPU numbers are below this. Kernels are built for fewer CPUs (`NR_CPUS`).
pub(crate) const MAX_CPUS: u32 = 1 << 16;

impl Cpus {
    /// The CPUs that are in both sets.
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Whether the set contains `cpu`.
    pub fn has(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// The CPUs on which the calling thread may run: its affinity, within the cgroup's cpuset. `None` if the system
    /// does not tell.
    pub fn of_this_thread() -> Option<Self> {
        #[cfg(target_os = "linux")]
        {
            let set = rustix::thread::sched_getaffinity(None).ok()?;
            let is_set = |cpu: &u32| set.is_set(*cpu as usize);
            Some((0..rustix::thread::CpuSet::MAX_CPU as u32).filter(is_set).collect())
        }
        #[cfg(not(target_os = "linux"))]
        None
    }
}

impl FromIterator<u32> for Cpus {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(list: &str) -> Result<Self, String> {
        let wrong = || format!("{list:?} is not a list of CPUs; an example is 0-3,8,10-11");
        let mut cpus = BTreeSet::new();
        for range in list.trim().split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u32, u32) = first.parse().ok().zip(last.parse().ok()).ok_or_else(wrong)?;
            if first > last || last >= MAX_CPUS {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<u32> = self.0.iter().copied().collect();
        for (number, run) in cpus.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if number > 0 { "," } else { "" };
            match run {
                [only] => write!(out, "{comma}{only}")?,
                _ => write!(out, "{comma}{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

impl serde::Serialize for Cpus {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_as_the_kernel_prints_them() {
        let cpus: Cpus = "0-3,8,10-11\n".parse().unwrap();
        assert_eq!(cpus.0.iter().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(cpus.to_string(), "0-3,8,10-11");
        assert_eq!("".parse::<Cpus>().unwrap().to_string(), "");
        for wrong in ["x", "3-1", "0-99999999", "1-", "-1"] {
            assert!(wrong.parse::<Cpus>().unwrap_err().contains(wrong), "{wrong}");
        }
    }
}

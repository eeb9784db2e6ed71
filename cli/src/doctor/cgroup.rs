//! Control groups: the CPU time, memory and threads that this process may use.

use crate::units::Size;

use super::cores::allowed;
use super::finding::{Check, CheckResult};
use super::host::{ExaminedHost, Unreadable};

const MEMBERSHIP: &str = "/proc/self/cgroup";
const MOUNT: &str = "/sys/fs/cgroup";
/// In version 1 a number of this size means no limit.
const NO_LIMIT: u64 = 1 << 60;
/// The threads of a fabric: one worker per rail, with at most 64 rails, one control thread, and the program's own.
const THREADS: u64 = 128;

/// The directories of this process's group, from its own directory up to the mount.
struct Cgroup {
    /// True for control groups of version 1.
    is_v1: bool,
    directories: Vec<String>,
}

impl Cgroup {
    /// The group of this process for `controller`, or `None` if the controller is not mounted.
    fn of(host: &ExaminedHost, controller: &str) -> Result<Option<Self>, Unreadable> {
        let text = host.text(MEMBERSHIP)?.unwrap_or_default();
        let (mut v1, mut v2) = (None, None);
        for line in text.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                return Err(Unreadable::malformed(MEMBERSHIP, line));
            };
            match controllers {
                "" => v2 = Some(path),
                list if list.split(',').any(|name| name == controller) => v1 = Some(path),
                _ => {}
            }
        }
        let own = format!("{MOUNT}/{controller}");
        let (is_v1, base, path) = match (v1, v2) {
            (Some(path), _) if host.has(&own) => (true, own.as_str(), path),
            (None, Some(path)) if host.has(&format!("{MOUNT}/cgroup.controllers")) => (false, MOUNT, path),
            _ => return Ok(None),
        };
        // In another namespace the path is not below the mount.
        let mut path = if path.contains("/..") { "" } else { path.trim_end_matches('/') };
        let mut directories = Vec::new();
        loop {
            directories.push(format!("{base}{path}"));
            let Some((parent, _)) = path.rsplit_once('/') else { break };
            path = parent;
        }
        directories.retain(|directory| host.has(directory));
        Ok(Some(Self { is_v1, directories }))
    }
}

/// Checks the smallest CPU limit of the group and its parents.
pub fn time(check: Check, host: &ExaminedHost) -> CheckResult {
    let Some(group) = Cgroup::of(host, "cpu")? else { return Ok(vec![absent(check, "cpu")]) };
    let mut least = None::<(f64, &str)>;
    for directory in &group.directories {
        let share = match group.is_v1 {
            true => {
                let quota =
                    host.parsed(&format!("{directory}/cpu.cfs_quota_us"), |text| text.parse::<i64>().ok())?;
                let period = host.number(&format!("{directory}/cpu.cfs_period_us"))?;
                quota
                    .zip(period)
                    .filter(|(quota, period)| *quota > 0 && *period > 0)
                    .map(|(quota, period)| quota as f64 / period as f64)
            }
            false => host.parsed(&format!("{directory}/cpu.max"), share)?.flatten(),
        };
        let Some(share) = share else { continue };
        if least.is_none_or(|(other, _)| share < other) {
            least = Some((share, directory));
        }
    }
    let Some((share, directory)) = least else { return Ok(vec![check.ok("no limit")]) };
    let value = format!("CPU time of {share:.2} cores ({directory})");
    if allowed(host)?.is_some_and(|allowed| share >= allowed.0.len() as f64) {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "busy workers poll and use up the CPU time; then all threads stop until the next period";
    let remedy = "use docker run --cpuset-cpus instead of --cpus, whole cores in Kubernetes (static CPU policy), or a \
                  higher cpu.max";
    Ok(vec![check.warning(value, cost, remedy)])
}

/// Parses `cpu.max`: microseconds or `max`, and the period in microseconds.
fn share(text: &str) -> Option<Option<f64>> {
    let (quota, period) = text.split_once(' ')?;
    if quota == "max" {
        return Some(None);
    }
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    (period > 0).then(|| Some(quota as f64 / period as f64))
}

/// Checks how close the group is to its memory limit.
pub fn memory(check: Check, host: &ExaminedHost) -> CheckResult {
    let Some(group) = Cgroup::of(host, "memory")? else { return Ok(vec![absent(check, "memory")]) };
    let (limit, used, idle) = match group.is_v1 {
        true => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        false => ("memory.max", "memory.current", "inactive_file"),
    };
    let mut nearest = None::<(u64, u64, &str)>;
    for directory in &group.directories {
        let Some(limit) = host.parsed(&format!("{directory}/{limit}"), most)?.flatten() else { continue };
        let used = host.number(&format!("{directory}/{used}"))?.unwrap_or(0);
        // The kernel frees unused cached files first.
        let stat = host.text(&format!("{directory}/memory.stat"))?.unwrap_or_default();
        let of = |line: &str| line.strip_prefix(idle)?.trim().parse::<u64>().ok();
        let used = used.saturating_sub(stat.lines().find_map(of).unwrap_or(0));
        if nearest.is_none_or(|(other, of, _)| limit.saturating_sub(used) < other.saturating_sub(of)) {
            nearest = Some((limit, used, directory));
        }
    }
    let Some((limit, used, directory)) = nearest else { return Ok(vec![check.ok("no limit")]) };
    let value = format!("{} used of {} ({directory})", Size(used), Size(limit));
    if used < limit / 10 * 9 {
        return Ok(vec![check.ok(value)]);
    }
    let cost =
        "regions and libfabric's shared memory count: the kernel kills a process of the group at the limit";
    Ok(vec![check.warning(
        value,
        cost,
        "raise the limit (docker run --memory, memory.max), or use smaller regions",
    )])
}

/// Checks how many more threads the group may start.
pub fn threads(check: Check, host: &ExaminedHost) -> CheckResult {
    let Some(group) = Cgroup::of(host, "pids")? else { return Ok(vec![absent(check, "pids")]) };
    let mut nearest = None::<(u64, u64, &str)>;
    for directory in &group.directories {
        let Some(limit) = host.parsed(&format!("{directory}/pids.max"), most)?.flatten() else { continue };
        let used = host.number(&format!("{directory}/pids.current"))?.unwrap_or(0);
        if nearest.is_none_or(|(other, of, _)| limit.saturating_sub(used) < other.saturating_sub(of)) {
            nearest = Some((limit, used, directory));
        }
    }
    let Some((limit, used, directory)) = nearest else { return Ok(vec![check.ok("no limit")]) };
    let value = format!("{used} threads of {limit} ({directory})");
    if limit.saturating_sub(used) >= THREADS {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "a fabric needs one thread per rail and one more: opening it fails if the limit is reached";
    Ok(vec![check.warning(
        value,
        cost,
        "raise the limit (docker run --pids-limit, TasksMax in a systemd unit)",
    )])
}

/// Parses a limit; `Some(None)` means no limit.
fn most(text: &str) -> Option<Option<u64>> {
    match text {
        "max" => Some(None),
        number => Some(Some(number.parse::<u64>().ok()?).filter(|limit| *limit < NO_LIMIT)),
    }
}

fn absent(check: Check, controller: &str) -> super::finding::Finding {
    check.skipped(format!("no control group with the controller {controller} is mounted at {MOUNT}"))
}

#[cfg(test)]
mod tests;

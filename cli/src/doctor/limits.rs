//! Limits of this process: locked memory, open files, and space in /dev/shm.

use rustix::process::{Resource, getrlimit};

use crate::units::Size;

use super::finding::{Check, CheckResult, Level};
use super::host::{CAP_IPC_LOCK, ExaminedHost};

/// Below this limit of locked memory, the queues of some cards and one useful buffer do not fit.
const LITTLE: u64 = 64 << 20;
/// Docker's default size of /dev/shm.
const SMALL: u64 = 64 << 20;
/// The number of open files that most systems allow.
const FEW: u64 = 1024;
/// The same on a host with cards: each card and each peer needs some files.
const FEW_BESIDE_CARDS: u64 = 4096;

/// The kernel's limits of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// RLIMIT_MEMLOCK, in bytes.
    pub memlock: ResourceLimit,
    /// RLIMIT_NOFILE.
    pub files: ResourceLimit,
    /// /dev/shm, if it exists.
    pub shm: Option<Space>,
}

/// A limit; `None` means no limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct ResourceLimit {
    pub soft: Option<u64>,
    pub hard: Option<u64>,
}

/// The size and free space of a file system, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    pub size: u64,
    pub free: u64,
}

impl Limits {
    /// Reads the limits of this process.
    pub fn of_this_process() -> Self {
        let limit = |resource| {
            let limit = getrlimit(resource);
            ResourceLimit { soft: limit.current, hard: limit.maximum }
        };
        let shm = rustix::fs::statvfs("/dev/shm").ok().map(|space| Space {
            size: space.f_blocks.saturating_mul(space.f_frsize),
            free: space.f_bavail.saturating_mul(space.f_frsize),
        });
        Self { memlock: limit(Resource::Memlock), files: limit(Resource::Nofile), shm }
    }
}

/// Checks how much memory can be registered with a card.
pub fn memlock(check: Check, host: &ExaminedHost) -> CheckResult {
    let ResourceLimit { soft, hard } = host.limits.memlock;
    let Some(soft) = soft else { return Ok(vec![check.ok("unlimited")]) };
    let hard_words = hard.map_or("unlimited".to_owned(), |bytes| Size(bytes).to_string());
    let value = format!("soft {}, hard {hard_words}", Size(soft));
    // The kernel checks the capability in the initial user namespace (ib_umem_get).
    if host.has_capability(CAP_IPC_LOCK)? && host.is_first_namespace()? {
        return Ok(vec![check.ok(format!("{value}; this process has CAP_IPC_LOCK, which lifts the limit"))]);
    }
    let (level, cost) = match (host.has_cards(), soft < LITTLE) {
        (true, true) => {
            (Level::Problem, "registered memory is pinned: a card cannot register more than this")
        }
        (true, false) => {
            (Level::Warning, "registered memory is pinned: a card cannot register more than this")
        }
        (false, true) => {
            (Level::Warning, "loopback is not affected; a card could not register more than this")
        }
        (false, false) => return Ok(vec![check.ok(value)]),
    };
    let remedy = match hard {
        None => "run ulimit -l unlimited in the shell that starts the program",
        Some(_) => {
            "set memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, or docker run \
             --ulimit memlock=-1:-1"
        }
    };
    Ok(vec![check.found(level, value, cost, remedy)])
}

/// Checks how many files may be open.
pub fn files(check: Check, host: &ExaminedHost) -> CheckResult {
    let ResourceLimit { soft, hard } = host.limits.files;
    let Some(soft) = soft else { return Ok(vec![check.ok("unlimited")]) };
    let hard_words = hard.map_or("unlimited".to_owned(), |files| files.to_string());
    let value = format!("soft {soft}, hard {hard_words}");
    let enough = if host.has_cards() { FEW_BESIDE_CARDS } else { FEW };
    if soft >= enough {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "a peer takes a socket, a card and a worker abbreviated files, a region shared on this host one: then \
                connecting or registering is refused";
    let remedy = match hard {
        Some(hard) if hard < enough => {
            "set nofile in /etc/security/limits.conf, LimitNOFILE in a systemd unit, or docker run --ulimit nofile"
                .to_owned()
        }
        _ => format!("run ulimit -n {} in the shell that starts the program", hard.unwrap_or(65536).min(65536)),
    };
    Ok(vec![check.warning(value, cost, remedy)])
}

/// Checks the free space of /dev/shm.
pub fn shm(check: Check, host: &ExaminedHost) -> CheckResult {
    let cost = "libfabric shares memory between processes there, so its provider shm fails; loopback does not need it";
    let Some(space) = host.limits.shm else {
        return Ok(vec![check.warning("/dev/shm is missing", cost, "mount a tmpfs there")]);
    };
    let value = format!("{} free of {}", Size(space.free), Size(space.size));
    if space.free > SMALL {
        return Ok(vec![check.ok(value)]);
    }
    let remedy = "use docker run --shm-size 8g, an emptyDir of medium Memory in Kubernetes, or mount -o remount,size=8g \
                  /dev/shm; or delete files there";
    Ok(vec![check.warning(value, cost, remedy)])
}

#[cfg(test)]
mod tests {
    use super::super::host::fake::Fake;
    use super::*;

    const KIB: u64 = 1 << 10;

    fn level(fake: &mut Fake, limits: Limits, check: fn(Check, &ExaminedHost) -> CheckResult) -> Level {
        fake.limits = limits;
        check(Check("it"), fake).expect("readable")[0].level
    }

    fn memlocked(soft: u64) -> Limits {
        Limits { memlock: ResourceLimit { soft: Some(soft), hard: Some(soft) }, ..Limits::default() }
    }

    #[test]
    fn locked_memory_matters_most_beside_cards() {
        let mut bare = Fake::new(&[]);
        let mut carded = Fake::new(&[]).card("mlx5_0");
        for (soft, without, with) in [
            (64 * KIB, Level::Warning, Level::Problem),
            (LITTLE - 1, Level::Warning, Level::Problem),
            (LITTLE, Level::Ok, Level::Warning),
        ] {
            assert_eq!(level(&mut bare, memlocked(soft), memlock), without, "{soft}");
            assert_eq!(level(&mut carded, memlocked(soft), memlock), with, "{soft}");
        }
        assert_eq!(level(&mut carded, Limits::default(), memlock), Level::Ok);
    }

    #[test]
    fn the_capability_lifts_it_in_the_first_namespace_only() {
        let status = ("/proc/self/status", "CapEff:\t0000000000004000\n");
        let map = |ids| ("/proc/self/uid_map", ids);
        let mut first = Fake::new(&[status, map("         0          0 4294967295\n")]).card("mlx5_0");
        assert_eq!(level(&mut first, memlocked(64 * KIB), memlock), Level::Ok);
        let mut other = Fake::new(&[status, map("0 100000 65536\n")]).card("mlx5_0");
        assert_eq!(level(&mut other, memlocked(64 * KIB), memlock), Level::Problem);
    }

    #[test]
    fn the_remedy_is_one_that_the_hard_limit_allows() {
        let mut host = Fake::new(&[]).card("mlx5_0");
        let mut remedy = |hard| {
            host.limits.memlock = ResourceLimit { soft: Some(64 * KIB), hard };
            memlock(Check("memlock"), &host).unwrap().remove(0).remedy.unwrap()
        };
        assert!(remedy(None).contains("ulimit -l unlimited"));
        assert!(remedy(Some(64 * KIB)).contains("limits.conf"));
    }

    #[test]
    fn files_and_shared_memory() {
        let (mut bare, mut carded) = (Fake::new(&[]), Fake::new(&[]).card("mlx5_0"));
        let open = |soft| Limits {
            files: ResourceLimit { soft: Some(soft), hard: Some(1 << 20) },
            ..Limits::default()
        };
        assert_eq!(level(&mut bare, open(1023), files), Level::Warning);
        assert_eq!(level(&mut bare, open(1024), files), Level::Ok);
        assert_eq!(level(&mut carded, open(1024), files), Level::Warning);
        let room = |free| Limits { shm: Some(Space { size: free, free }), ..Limits::default() };
        assert_eq!(level(&mut bare, room(SMALL), shm), Level::Warning);
        assert_eq!(level(&mut bare, room(8 << 30), shm), Level::Ok);
        assert_eq!(level(&mut bare, Limits::default(), shm), Level::Warning);
    }
}

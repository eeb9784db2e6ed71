//! Finding the way to a peer's region: this side asks the peer what a key names, and maps the region, reaches it
//! through the kernel, or stages it.

use std::time::Duration;

use multirail_spi::{Error, ErrorKind, MemoryKind, Result, StagingPolicy};

use super::{RegionLocation, ResolvedRegion};
use crate::error_text::describe;
use crate::inbound::Inbound;
use crate::outbound::{Outbound, PeerLocation};
use crate::regions::Regions;
use crate::segment::lease_table::RegionKey;
use crate::status::status;

/// Asks the target for the region of `key`, and finds the way to it.
pub(crate) fn resolve(
    target: &Outbound,
    key: u64,
    limit: Duration,
    staging: StagingPolicy,
) -> Result<ResolvedRegion> {
    match &target.location {
        PeerLocation::ThisProcess { inbound, regions, staging: target_staging } => {
            // The answer takes no time.
            let _ = limit;
            let regions = regions.upgrade().ok_or_else(domain_closed)?;
            in_this_process(inbound, &regions, *target_staging, key, staging)
        }
        #[cfg(target_os = "linux")]
        PeerLocation::OtherProcess(connection) => other_process::resolve(connection, key, limit, staging),
    }
}

fn in_this_process(
    inbound: &Inbound,
    regions: &Regions,
    target_staging: StagingPolicy,
    key: u64,
    staging: StagingPolicy,
) -> Result<ResolvedRegion> {
    let found = regions.find(key).map_err(refused)?;
    let first = std::ptr::NonNull::new(found.memory.as_ptr()).ok_or_else(domain_closed)?;
    let mut location = match found.memory.kind() {
        MemoryKind::Cuda { device } => RegionLocation::Gpu { base: first.as_ptr() as u64, ordinal: device },
        _ => RegionLocation::Mapped(first),
    };
    if staging == StagingPolicy::Always && matches!(location, RegionLocation::Mapped(_)) {
        if target_staging == StagingPolicy::Never {
            return Err(staging_refused("this side was configured with `StagingPolicy::Always`"));
        }
        inbound.open_staging_buffer()?;
        location = RegionLocation::Staged;
    }
    Ok(ResolvedRegion {
        key: RegionKey::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?,
        len: found.memory.len() as u64,
        access: found.access,
        location,
        #[cfg(target_os = "linux")]
        mapping: None,
        gpu_memory: None,
        lock: None,
    })
}

fn domain_closed() -> Error {
    Error::new(ErrorKind::PeerDied, "import", "the peer's domain is closed: connect again")
}

/// The error for a key that the target refused.
fn refused(kind: ErrorKind) -> Error {
    Error::new(kind, "import", describe(status(kind)))
}

/// The error for a peer that does not allow staging, although this side needs it. `why` says why.
fn staging_refused(why: &str) -> Error {
    let context = format!(
        "{why}, and the peer does not allow staging: allow it in both processes \
         (LoopbackConfig::staging, MULTIRAIL_LOOPBACK_STAGING=1)"
    );
    Error::new(ErrorKind::Permission, "import", context)
}

/// Regions of a peer in another process.
#[cfg(target_os = "linux")]
mod other_process {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::{Duration, Instant};

    use multirail_spi::{Access, Error, ErrorKind, Result, StagingPolicy};

    use super::{RegionKey, RegionLocation, ResolvedRegion, refused, staging_refused};
    use crate::other_process::protocol::{Refusal, Reply, Request};
    use crate::other_process::vm_call::probe;
    use crate::other_process::{TargetConnection, gpu_memory, ptrace_diagnosis, short_of_memory};
    use crate::segment::{Segment, mapping};

    /// The longest limit of an import. A longer one could overflow the system's clocks.
    const MAX_LIMIT: Duration = Duration::from_secs(24 * 3600);

    /// Asks the target for the region of `key`. Maps the region, or reaches it through the kernel, or stages it if
    /// the kernel refuses and both sides allow staging. Takes no longer than `limit`, the wait for other callers
    /// included.
    pub(super) fn resolve(
        connection: &TargetConnection,
        key: u64,
        limit: Duration,
        staging: StagingPolicy,
    ) -> Result<ResolvedRegion> {
        let deadline = Instant::now() + limit.min(MAX_LIMIT);
        let (reply, files) = query(connection, deadline, |number| Request::Region { number, key })?;
        let region = match reply {
            Reply::Shared { len, access, locked, .. } => {
                let access = Access::from_bits_truncate(access);
                if staging == StagingPolicy::Always {
                    region_at(key, len, access, RegionLocation::Staged)?
                } else {
                    return map(key, len, access, &files, locked);
                }
            }
            Reply::Foreign { len, access, address, guard, target, .. } => {
                let access = Access::from_bits_truncate(access);
                let foreign = region_at(key, len, access, RegionLocation::Foreign { base: address, guard })?;
                if staging == StagingPolicy::Always {
                    ResolvedRegion { location: RegionLocation::Staged, ..foreign }
                } else if let Err((call, errno)) = probe(connection.process.pid(), access) {
                    if !connection.process.is_alive() {
                        return Err(refused(ErrorKind::PeerDied));
                    }
                    let why = ptrace_diagnosis::explain(connection.process.pid(), call, errno, &target);
                    if staging == StagingPolicy::Never {
                        return Err(ptrace_diagnosis::error(&why));
                    }
                    tracing::info!(peer = %connection.process.pid().as_raw_nonzero(), %why,
                        "loopback: a region of the peer is staged through shared memory");
                    ResolvedRegion { location: RegionLocation::Staged, ..foreign }
                } else {
                    return Ok(foreign);
                }
            }
            Reply::Gpu { len, access, gpu, size, offset, handle, .. } => {
                let shared = gpu_memory::open(files, gpu, size, offset, handle, len)?;
                let location =
                    RegionLocation::Gpu { base: shared.address(), ordinal: shared.device().ordinal() };
                let region = region_at(key, len, Access::from_bits_truncate(access), location)?;
                return Ok(ResolvedRegion { gpu_memory: Some(shared), ..region });
            }
            _ => return Err(wrong_answer()),
        };
        open_staging_buffer(connection, deadline)?;
        Ok(region)
    }

    /// Maps the peer's staging buffer, unless it is mapped.
    fn open_staging_buffer(connection: &TargetConnection, deadline: Instant) -> Result<()> {
        if connection.staging_buffer.get().is_some() {
            return Ok(());
        }
        let (reply, files) = query(connection, deadline, |number| Request::StagingBuffer { number })?;
        let (Reply::StagingBuffer { .. }, [file]) = (reply, &files[..]) else { return Err(wrong_answer()) };
        let buffer = Segment::map(file.as_fd())?;
        // If another thread was first, it has mapped the same file.
        let _ = connection.staging_buffer.set(buffer);
        Ok(())
    }

    /// Asks a question. An answer that refuses is an error.
    fn query(
        connection: &TargetConnection,
        deadline: Instant,
        question: impl Fn(u64) -> Request,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        let (reply, files) = connection.query(deadline, question)?.ok_or_else(wrong_answer)?;
        let Reply::Refused { why, .. } = reply else { return Ok((reply, files)) };
        Err(match why {
            Refusal::StagingPolicy => staging_refused("only staging reaches a region of the peer"),
            Refusal::Revoked => refused(ErrorKind::Revoked),
            Refusal::Gpu => gpu_memory::not_shared(),
            Refusal::Memory => short_of_memory("import"),
            _ => refused(ErrorKind::RemoteAccess),
        })
    }

    fn wrong_answer() -> Error {
        let context = "the peer's answers do not match this side's questions: connect again";
        Error::new(ErrorKind::Protocol, "import", context)
    }

    /// Maps a region whose file the peer has handed over.
    fn map(key: u64, len: u64, access: Access, files: &[OwnedFd], locked: bool) -> Result<ResolvedRegion> {
        let ([file], Ok(size)) = (files, usize::try_from(len)) else {
            let context = "the peer did not hand over the region's file: do not trust this peer";
            return Err(Error::new(ErrorKind::Protocol, "import", context));
        };
        let mapping = mapping::map("import", file.as_fd(), size, access.contains(Access::REMOTE_WRITE))?;
        // The owner has page-locked the region, so that GPUs copy it fast. This side does too, if it uses a GPU.
        let lock = if locked { gpu_memory::lock(mapping.start(), size) } else { None };
        let region = region_at(key, len, access, RegionLocation::Mapped(mapping.start()))?;
        Ok(ResolvedRegion { mapping: Some(mapping), lock, ..region })
    }

    fn region_at(key: u64, len: u64, access: Access, location: RegionLocation) -> Result<ResolvedRegion> {
        let key = RegionKey::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?;
        Ok(ResolvedRegion { key, len, access, location, mapping: None, gpu_memory: None, lock: None })
    }
}

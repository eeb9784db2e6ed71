//! Resolves the key of a peer's region: asks the peer which region has the key, and then maps that region, reaches it
//! through the kernel, or stages it.

use std::time::Duration;

use multirail_spi::{Error, ErrorKind, MemoryKind, Result, StagingPolicy};

use super::{RegionLocation, ResolvedRegion};
use crate::inbound::Inbound;
use crate::outbound::{Outbound, PeerLocation};
use crate::regions::Regions;
use crate::segment::lease_table::RegionKey;
use crate::status::{describe, status};

/// Asks the target for the region of `key`, and finds out how this side reaches it.
pub(crate) fn resolve(
    target: &Outbound,
    key: u64,
    limit: Duration,
    staging: StagingPolicy,
) -> Result<ResolvedRegion> {
    match &target.location {
        PeerLocation::ThisProcess { inbound, regions, staging: target_staging } => {
            // No other process is asked, so there is nothing to wait for.
            let _ = limit;
            let regions = regions.upgrade().ok_or_else(domain_closed)?;
            in_this_process(inbound, &regions, *target_staging, key, staging)
        }
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
    regions.open(inbound, key)?;
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
mod other_process {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::{Duration, Instant};

    use multirail_spi::{Access, Error, ErrorKind, Result, StagingPolicy};

    use super::{RegionKey, RegionLocation, ResolvedRegion, refused, staging_refused};
    use crate::other_process::protocol::{RefusalReason, ServerReply, ServerRequest};
    use crate::other_process::{TargetConnection, gpu_memory, short_of_memory};
    #[cfg(target_os = "linux")]
    use crate::other_process::{ptrace_diagnosis, vm_call::probe};
    use crate::segment::mapping::{self, FilePart};
    use crate::segment::{Segment, commit_pages};

    /// The longest limit of an import. A longer one could overflow the system's clocks.
    const MAX_LIMIT: Duration = Duration::from_secs(24 * 3600);

    /// The refusal of a region that only staging reaches, where staging was forbidden.
    const OWNER_ONLY: &str = "the region was not allocated as memory that processes share, and on the portable path only \
         staging reaches such memory, which this process forbids: allocate it by Fabric::alloc or HostBuffer, or allow \
         staging in both processes (LoopbackConfig::staging, MULTIRAIL_LOOPBACK_STAGING=1)";

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
        let (reply, files) = query(connection, deadline, |number| ServerRequest::Region { number, key })?;
        if let Some(key) = RegionKey::from_wire(key) {
            // The target has committed the lease already, if it keeps to the rules.
            commit_pages(std::slice::from_ref(&connection.segment.content().leases[key.slot as usize]))?;
        }
        let region = match reply {
            ServerReply::Shared { len, access, locked, offset, file_len, .. } => {
                let access = Access::from_bits_truncate(access);
                if staging == StagingPolicy::Always {
                    region_at(key, len, access, RegionLocation::Staged)?
                } else {
                    return map(key, len, access, (&files, offset, file_len), locked);
                }
            }
            ServerReply::OwnerOnly { .. } if staging == StagingPolicy::Never => {
                return Err(Error::new(ErrorKind::Permission, "import", OWNER_ONLY));
            }
            ServerReply::OwnerOnly { len, access, .. } => {
                region_at(key, len, Access::from_bits_truncate(access), RegionLocation::Staged)?
            }
            #[cfg(target_os = "linux")]
            ServerReply::Foreign { len, access, address, guard, target, .. } => {
                let pid = connection.process.pid().ok_or_else(wrong_reply)?;
                let access = Access::from_bits_truncate(access);
                let foreign = region_at(key, len, access, RegionLocation::Foreign { base: address, guard })?;
                if staging == StagingPolicy::Always {
                    ResolvedRegion { location: RegionLocation::Staged, ..foreign }
                } else if let Err((call, errno)) = probe(pid, access) {
                    if !connection.process.is_alive() {
                        return Err(refused(ErrorKind::PeerDied));
                    }
                    let why = ptrace_diagnosis::explain(pid, call, errno, &target);
                    if staging == StagingPolicy::Never {
                        return Err(ptrace_diagnosis::error(&why));
                    }
                    tracing::info!(peer = %pid.as_raw_nonzero(), %why,
                        "loopback: a region of the peer is staged through shared memory");
                    ResolvedRegion { location: RegionLocation::Staged, ..foreign }
                } else {
                    return Ok(foreign);
                }
            }
            ServerReply::Gpu { len, access, gpu, size, offset, handle, .. } => {
                let shared = gpu_memory::open(files, gpu, size, offset, handle, len)?;
                let location =
                    RegionLocation::Gpu { base: shared.address(), ordinal: shared.device().ordinal() };
                let region = region_at(key, len, Access::from_bits_truncate(access), location)?;
                return Ok(ResolvedRegion { gpu_memory: Some(shared), ..region });
            }
            _ => return Err(wrong_reply()),
        };
        open_staging_buffer(connection, deadline)?;
        Ok(region)
    }

    /// Maps the peer's staging buffer, unless it is mapped.
    fn open_staging_buffer(connection: &TargetConnection, deadline: Instant) -> Result<()> {
        if connection.staging_buffer.get().is_some() {
            return Ok(());
        }
        let (reply, files) = query(connection, deadline, |number| ServerRequest::StagingBuffer { number })?;
        let (ServerReply::StagingBuffer { .. }, [file]) = (reply, &files[..]) else {
            return Err(wrong_reply());
        };
        let buffer = Segment::map(file.as_fd())?;
        // If another thread was first, it has mapped the same file.
        let _ = connection.staging_buffer.set(buffer);
        Ok(())
    }

    /// Sends a request to the server. A refusal is an error.
    fn query(
        connection: &TargetConnection,
        deadline: Instant,
        request: impl Fn(u64) -> ServerRequest,
    ) -> Result<(ServerReply, Vec<OwnedFd>)> {
        let (reply, files) = connection.query(deadline, request)?.ok_or_else(wrong_reply)?;
        let ServerReply::Refused { why, .. } = reply else { return Ok((reply, files)) };
        Err(match why {
            RefusalReason::Staging => staging_refused("only staging reaches a region of the peer"),
            RefusalReason::Revoked => refused(ErrorKind::Revoked),
            RefusalReason::Gpu => gpu_memory::not_shared(),
            RefusalReason::Memory => short_of_memory("import"),
            _ => refused(ErrorKind::RemoteAccess),
        })
    }

    fn wrong_reply() -> Error {
        let context = "the peer's replies do not match this side's requests: connect again";
        Error::new(ErrorKind::Protocol, "import", context)
    }

    /// Maps a region from the file that the peer has sent.
    fn map(
        key: u64,
        len: u64,
        access: Access,
        (files, offset, file_len): (&[OwnedFd], u64, u64),
        locked: bool,
    ) -> Result<ResolvedRegion> {
        let ([file], Ok(size)) = (files, usize::try_from(len)) else {
            let context =
                "the peer did not hand over the region's file: the peer breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "import", context));
        };
        let writable = access.contains(Access::REMOTE_WRITE);
        let part = FilePart { offset, len: size, file_len, committed: size };
        let mapping = mapping::map("import", file.as_fd(), part, writable)?;
        // The owner has page-locked the region, which makes copies of GPUs faster. If this process uses a GPU, it also
        // page-locks the region.
        let lock = if locked { gpu_memory::lock(mapping.start(), size) } else { None };
        let region = region_at(key, len, access, RegionLocation::Mapped(mapping.start()))?;
        Ok(ResolvedRegion { mapping: Some(mapping), lock, ..region })
    }

    fn region_at(key: u64, len: u64, access: Access, location: RegionLocation) -> Result<ResolvedRegion> {
        let key = RegionKey::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?;
        Ok(ResolvedRegion { key, len, access, location, mapping: None, gpu_memory: None, lock: None })
    }
}

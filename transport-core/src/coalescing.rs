//! Whether the pages of an operation are coalesced: by the policies, by what both sides allow, and for
//! [`CoalescePolicy::Auto`] by the cost model of [`plan::way`](crate::engine::plan::way).

use crate::engine::Work;
use crate::engine::memory::RemoteInner;
use crate::engine::peer::Link;
use crate::engine::plan::way::{CoalescingCosts, CopyCosts, PageLoad, SlotCosts, Way, WayCosts};
use crate::options::WriteOptions;
use crate::spi::{Capabilities, WorkKind};
use crate::{CoalescePolicy, Error, ErrorKind, Paths, Peer, Result};

/// Bytes of the pages of a slot, the most pages of a slot, slots of a rail, and bytes of an entry of the page table: those of
/// `backend-staging`.
const SLOT_BYTES: u64 = 256 << 10;
const SLOT_PAGES: u32 = 256;
const SLOTS: u32 = 16;
const ENTRY_BYTES: u64 = 24;

/// The engine's and the provider's time for a work request: 690 instructions over efa-direct at 4.5 a nanosecond
/// (benches/README.md, docs/performance.md).
const REQUEST_NS: f64 = 180.0;
/// The same over the kernel's sockets, for a write and for a read: half of what both processes spent on a page of 4 KiB over
/// libfabric's tcp, without the time of its bytes (benches/small_pages.py).
const SOCKET_WRITE_NS: f64 = 4000.0;
const SOCKET_READ_NS: f64 = 1500.0;
/// What a byte costs each side over sockets: half of what both processes spent on a byte of a page of 64 KiB, without the
/// request.
const SOCKET_BYTE_NS: f64 = 0.37;
/// What a slot costs a side, as `multirail simulate` takes it: the work of one operation.
const SLOT_NS: f64 = 800.0;
/// What a page costs a side beside its copy.
const PAGE_NS: f64 = 50.0;
/// Copies of pages of the host that are in no cache: per page and per byte (Zen 4).
const HOST_COPY: CopyCosts = CopyCosts { start_ns: 0.0, page_ns: 165.0, byte_ns: 0.0628, on_processor: true };
/// Copies of pages by a GPU, and the launch of its kernel (H200).
const GPU_COPY: CopyCosts =
    CopyCosts { start_ns: 8400.0, page_ns: 12.0, byte_ns: 0.0028, on_processor: false };
const GPU_LAUNCH_NS: f64 = 2900.0;

/// Decides whether the pages of an operation of `link` are coalesced.
///
/// # Errors
/// `Unsupported` if the options ask for coalescing and one of the two sides does not coalesce; `Unreachable` if the path
/// policy does not allow it.
#[cold]
pub(crate) fn coalesces(
    peer: &Peer,
    work: &Work,
    remote: &RemoteInner,
    options: &WriteOptions,
) -> Result<bool> {
    let (operation, must) = (work.operation_name(), options.coalesce == Some(CoalescePolicy::Always));
    let policy = options.coalesce.unwrap_or(remote.coalesce);
    if policy == CoalescePolicy::Never {
        return Ok(false);
    }
    if remote.max_coalesced == 0 {
        let why = "the operation has to coalesce its pages, and one of the two sides does not allow that over this \
                   transport: set MULTIRAIL_COALESCE in both processes";
        return if must { Err(Error::new(ErrorKind::Unsupported, operation, why)) } else { Ok(false) };
    }
    let link = &peer.0.links[remote.first_group];
    let paths = peer.path_policy().and(options.path_policy);
    if !paths.allows(Paths::COALESCED) {
        return if must {
            paths.check(Paths::COALESCED, &link.label, operation).map(|()| false)
        } else {
            Ok(false)
        };
    }
    let (pieces, page) = pieces_of(work);
    if page > remote.max_coalesced {
        return Ok(false);
    }
    let is_chosen = || {
        let load = PageLoad::scattered(pieces, page);
        costs(link, work).is_some_and(|costs| costs.choose(&load).way == Way::Coalesced)
    };
    Ok(policy == CoalescePolicy::Always || is_chosen())
}

/// The pieces of an operation, and the bytes of one, on average. Neighbours in both memories are one piece already.
pub(crate) fn pieces_of(work: &Work) -> (u64, u64) {
    let pieces = u64::from(work.shape.piece_count()).max(1);
    (pieces, work.shape.bytes().div_ceil(pieces))
}

/// What the ways cost over the rails of a link. `None` if the link has none.
fn costs(link: &Link, work: &Work) -> Option<WayCosts> {
    let capabilities = link.capabilities()?;
    let rails = link.rails.iter().flatten().count() as u32;
    Some(costs_of(capabilities, rails.max(1), work.kind, work.device_memory))
}

fn costs_of(capabilities: &Capabilities, rails: u32, kind: WorkKind, on_gpu: bool) -> WayCosts {
    let all = |rate: Option<u64>| rate.unwrap_or(0) as f64 * f64::from(rails);
    let line = all(capabilities.link_bits_per_s) / 8.0;
    let of_side = |copy, launch| SlotCosts { slot_ns: SLOT_NS + launch, page_ns: PAGE_NS, copy };
    let side = if on_gpu { of_side(GPU_COPY, GPU_LAUNCH_NS) } else { of_side(HOST_COPY, 0.0) };
    let (request_ns, byte_ns) = match (capabilities.path.contains(Paths::SOCKETS), kind) {
        (false, _) => (REQUEST_NS, 0.0),
        (true, WorkKind::Read) => (SOCKET_READ_NS, SOCKET_BYTE_NS),
        (true, _) => (SOCKET_WRITE_NS, SOCKET_BYTE_NS),
    };
    WayCosts {
        line_bytes_per_s: line,
        requests_per_s: all(capabilities.requests_per_s),
        // The model itself counts what slots add.
        latency_ns: capabilities.round_trip.saturating_sub(capabilities.staging_delay).as_nanos() as f64,
        request_ns,
        byte_ns,
        gather_entries: 1,
        entry_ns: 0.0,
        max_request: capabilities.max_write,
        coalescing: Some(CoalescingCosts {
            slot_bytes: SLOT_BYTES,
            slot_pages: SLOT_PAGES,
            slots: SLOTS * rails,
            slot_line_ns: if line > 0.0 { SLOT_BYTES as f64 / line * f64::from(rails) * 1e9 } else { 0.0 },
            page_entry_bytes: ENTRY_BYTES,
            slot_requests: 1,
            source: side,
            target: side,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn small_pages_of_a_card_are_coalesced_if_there_are_many() {
        let mut card = Capabilities::minimal();
        (card.link_bits_per_s, card.requests_per_s) = (Some(97_433_000_000), Some(810_000));
        card.round_trip = Duration::from_micros(17);
        let way = |pages, page, on_gpu| {
            costs_of(&card, 1, WorkKind::Write, on_gpu).choose(&PageLoad::scattered(pages, page)).way
        };
        for on_gpu in [false, true] {
            assert_eq!(
                (way(4096, 4096, on_gpu), way(16_384, 1024, on_gpu)),
                (Way::Coalesced, Way::Coalesced)
            );
            assert_eq!((way(1024, 65_536, on_gpu), way(1, 4096, on_gpu)), (Way::Direct, Way::Direct));
        }
    }

    #[test]
    fn sockets_spend_more_on_a_request_than_on_its_copies() {
        let mut tcp = Capabilities::minimal();
        (tcp.path, tcp.round_trip) = (Paths::SOCKETS, Duration::from_micros(50));
        let way = |kind, page| {
            let load = PageLoad::scattered((4 << 20) / page, page);
            costs_of(&tcp, 1, kind, false).choose(&load).way
        };
        // As measured (benches/README.md): pages of 16 KiB gain over direct writes, but not over direct reads, whose
        // requests cost less.
        for (page, write, read) in [
            (1 << 10, Way::Coalesced, Way::Coalesced),
            (4 << 10, Way::Coalesced, Way::Coalesced),
            (16 << 10, Way::Coalesced, Way::Direct),
            (64 << 10, Way::Direct, Way::Direct),
        ] {
            assert_eq!((way(WorkKind::Write, page), way(WorkKind::Read, page)), (write, read), "{page}");
        }
        let one = costs_of(&tcp, 1, WorkKind::Write, false).choose(&PageLoad::scattered(1, 1024)).way;
        assert_eq!(one, Way::Direct);
    }
}

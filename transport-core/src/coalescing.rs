//! Whether the pages of an operation are coalesced: by the policies, by what both sides allow, and for
//! [`CoalescePolicy::Auto`] by the cost model of [`plan::way`](crate::engine::plan::way).

use crate::engine::Work;
use crate::engine::memory::RemoteInner;
use crate::engine::peer::Link;
use crate::engine::plan::way::{CoalescingCosts, CopyCosts, PageLoad, SlotCosts, Way, WayCosts};
use crate::options::WriteOptions;
use crate::spi::{Capabilities, Operations, WorkKind};
use crate::{CoalescePolicy, Error, ErrorKind, Paths, Peer, Result};

/// Bytes of the pages of a slot and the most pages of a slot, which the processor and a GPU fill; slots of a rail; and
/// bytes of a page's entry in the page table: those of `backend-staging`. The entry is a word, and a share of its run's
/// header.
const HOST_SLOT: (u64, u32) = (256 << 10, 256);
const GPU_SLOT: (u64, u32) = (512 << 10, 512);
const SLOTS: u32 = 8;
const ENTRY_BYTES: u64 = 9;

/// What requests cost over one kind of path: engine, provider and kernel.
#[derive(Debug, Clone, Copy)]
struct RequestCosts {
    write_ns: f64,
    read_ns: f64,
    /// The response to a slot, which has few bytes.
    response_ns: f64,
    /// Each side's time for a byte.
    byte_ns: f64,
    /// The time until a message has arrived, as a part of the device's round trip.
    arrival: f64,
    /// Each side's time for a byte of a copy between slots and pages of the host.
    copy_byte_ns: f64,
}

/// A card: 878 instructions for a write over efa-direct, at 4.5 a nanosecond (docs/performance.md). Copies of pages
/// that are in no cache (Zen 4).
const CARD: RequestCosts = RequestCosts {
    write_ns: 195.0,
    read_ns: 195.0,
    response_ns: 195.0,
    byte_ns: 0.0,
    arrival: 1.0,
    copy_byte_ns: 0.0628,
};
/// The kernel's sockets. These figures, and those of [`PROCESSES`], are a fit to `measured.txt`: lone operations of 1
/// to 4096 pages. The time of a request covers that of its way.
const SOCKETS: RequestCosts = RequestCosts {
    write_ns: 11_700.0,
    read_ns: 9600.0,
    response_ns: 6000.0,
    byte_ns: 0.08,
    arrival: 0.0,
    copy_byte_ns: 0.0628,
};
/// Processes of one host between which the kernel copies: libfabric's shm. Its copies and ours share the memory.
const PROCESSES: RequestCosts = RequestCosts {
    write_ns: 2300.0,
    read_ns: 1400.0,
    response_ns: 1000.0,
    byte_ns: 0.2,
    arrival: 0.0,
    copy_byte_ns: 0.098,
};

/// What a side spends on a slot and on a page: instructions of engine, staging and provider at 4.5 a nanosecond,
/// without the copies and without the slot's work request (docs/performance.md). A GPU's copy takes the place of some
/// of a page's.
struct SideCosts {
    slot_ns: f64,
    page_ns: f64,
    gpu_page_ns: f64,
}
const SOURCE: SideCosts = SideCosts { slot_ns: 1170.0, page_ns: 23.0, gpu_page_ns: 24.0 };
const TARGET: SideCosts = SideCosts { slot_ns: 810.0, page_ns: 5.6, gpu_page_ns: 20.6 };
/// What a copy of a page of the host takes beside its bytes, in no cache (Zen 4).
const HOST_COPY_NS: f64 = 165.0;
/// Copies of pages by a GPU, and the launch of its kernel (H200; docs/performance.md).
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
    let request = match capabilities.path {
        path if path.contains(Paths::SOCKETS) => SOCKETS,
        path if path.contains(Paths::MEMORY_COPY) && line == 0.0 => PROCESSES,
        _ => CARD,
    };
    let side = |SideCosts { slot_ns, page_ns, gpu_page_ns }| match on_gpu {
        true => SlotCosts { slot_ns: slot_ns + GPU_LAUNCH_NS, page_ns: gpu_page_ns, copy: GPU_COPY },
        false => {
            let byte_ns = request.copy_byte_ns;
            let copy = CopyCosts { start_ns: 0.0, page_ns: HOST_COPY_NS, byte_ns, on_processor: true };
            SlotCosts { slot_ns, page_ns, copy }
        }
    };
    let (slot_bytes, slot_pages) = if on_gpu { GPU_SLOT } else { HOST_SLOT };
    let round_trip = capabilities.round_trip.saturating_sub(capabilities.staging_delay);
    WayCosts {
        line_bytes_per_s: line,
        requests_per_s: all(capabilities.requests_per_s),
        // The model itself counts what slots add.
        latency_ns: round_trip.as_nanos() as f64 * request.arrival,
        request_ns: if kind == WorkKind::Read { request.read_ns } else { request.write_ns },
        byte_ns: request.byte_ns,
        gather_entries: 1,
        entry_ns: 0.0,
        max_request: capabilities.max_write,
        coalescing: Some(CoalescingCosts {
            slot_bytes,
            slot_pages,
            slots: SLOTS * rails,
            slot_line_ns: if line > 0.0 { slot_bytes as f64 / line * f64::from(rails) * 1e9 } else { 0.0 },
            page_entry_bytes: ENTRY_BYTES,
            // An imm announces the bytes of the message that carries it. Without imms, a second message does that.
            slot_requests: if capabilities.operations.contains(Operations::WRITE_IMM) { 1 } else { 2 },
            response_ns: request.response_ns,
            source: side(SOURCE),
            target: side(TARGET),
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

    /// The fields of the rows of `measured.txt`: lone operations over libfabric's tcp and shm between two processes of
    /// one host, pages that have no neighbour, medians of 3 rounds of `multirail bench` (16 cores, libfabric 1.17,
    /// 29 November 2026).
    fn measured() -> impl Iterator<Item = (Capabilities, WorkKind, PageLoad, [f64; 2])> {
        let rows = include_str!("coalescing/measured.txt").lines().skip(1);
        rows.map(|row| {
            let fields: Vec<_> = row.split(' ').collect();
            let number = |at: usize| fields[at].parse::<f64>().unwrap_or_else(|why| panic!("{row}: {why}"));
            let mut device = Capabilities::minimal();
            device.operations |= Operations::WRITE_IMM;
            device.path = if fields[0] == "tcp" { Paths::SOCKETS } else { Paths::MEMORY_COPY };
            let kind = if fields[1] == "read" { WorkKind::Read } else { WorkKind::Write };
            (device, kind, PageLoad::scattered(number(3) as u64, number(2) as u64), [number(4), number(5)])
        })
    }

    #[test]
    fn auto_is_as_fast_as_the_better_way_was() {
        let (mut rows, mut slower) = (0, 0);
        for (device, kind, load, [direct, coalesced]) in measured() {
            let way = costs_of(&device, 1, kind, false).choose(&load).way;
            let chosen = if way == Way::Coalesced { coalesced } else { direct };
            let share = direct.min(coalesced) / chosen;
            assert!(share >= 0.8, "{:?} {kind:?} {load:?}: {way:?}, {direct} or {coalesced} us", device.path);
            rows += 1;
            slower += u32::from(share < 0.95);
        }
        assert_eq!(rows, 192);
        // Where the two ways meet, the model takes the simpler one up to 5 % too long. The worst rows are of 128 MiB over shm,
        // which leave the caches.
        assert!(slower <= rows / 20, "{slower} of {rows} rows are slower than 0.95 of the better way");
    }

    #[test]
    fn staging_does_not_add_to_the_latency_of_a_device() {
        let mut card = Capabilities::minimal();
        card.round_trip = Duration::from_micros(17);
        let of = |card: &Capabilities| costs_of(card, 1, WorkKind::Write, false).latency_ns;
        let latency = of(&card);
        card.round_trip += Duration::from_micros(200);
        card.staging_delay = Duration::from_micros(200);
        assert_eq!(of(&card), latency);
    }
}

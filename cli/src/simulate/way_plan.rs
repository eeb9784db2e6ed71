//! How pages of one size travel in a simulation: the way, its requests, and their costs.

use multirail::way::{CoalescingCosts, PageLoad, SlotCosts, Way, WayCosts};

use super::costs::{MemoryKind, ProcessorCosts, SlotSide};
use super::profile::Profile;

/// The bytes of the transfer for which the way is chosen.
const TRANSFER: u64 = 1 << 30;
/// The bytes of a page's entry in a slot's page table: its offset, and its share of a header of 24 bytes for each run
/// of 32 pages, as in `backend-staging`.
const ENTRY: u64 = 9;
/// A slot has no more pages than it has of this size, as in `backend-staging`.
const LEAST_PAGE: u64 = 1 << 10;
/// The bytes of the request to empty a slot, and those of the response.
const SLOT_REQUEST: u64 = 64;
const RESPONSE: u64 = 8;
/// The default memory of a rail pair's slots, on each side, for each 100 Gbps of the line. `backend-staging` has as
/// much for each rail pair.
const RING: u64 = 4 << 20;

/// Whether pages are coalesced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Coalesce {
    /// If it is faster, by the cost model of `multirail::way`
    Auto,
    /// Never
    Never,
    /// Always
    Always,
}

/// What pages are like, and how they may travel.
#[derive(Debug, Clone, Copy)]
pub struct PageOptions {
    pub memory: MemoryKind,
    pub coalesce: Coalesce,
    pub slot_bytes: u64,
    /// The memory of a rail pair's slots, on each side.
    pub ring_bytes: u64,
    /// How many pages follow each other in both memories.
    pub run: u64,
    /// How many pages follow each other at the target.
    pub target_run: u64,
}

/// How pages of one size travel.
#[derive(Debug, Clone, Copy)]
pub struct WayPlan {
    pub way: Way,
    /// The bytes of pages in a work request, or in a slot.
    pub payload: u64,
    /// The nanoseconds of a work request, with what its pages cost before it.
    pub request_ns: f64,
    /// For coalesced pages.
    pub slots: Option<SlotPlan>,
}

/// How coalesced pages fill slots.
#[derive(Debug, Clone, Copy)]
pub struct SlotPlan {
    pub costs: CoalescingCosts,
    /// The pages of a slot. A page that is larger than a slot counts as one for each slot.
    pub pages: u64,
    /// The bytes of a page, or of its part in a slot.
    pub page: u64,
    /// The slots of a rail pair.
    pub slots: usize,
    /// The nanoseconds of the target's work request that responds.
    pub response_ns: f64,
}

impl SlotPlan {
    /// The bytes that a slot has on the line.
    pub fn wire(&self) -> u64 {
        SLOT_REQUEST + self.pages * (self.page + self.costs.page_entry_bytes)
    }
}

impl WayPlan {
    /// The plan of pages of `page` bytes on a host whose rail groups share `cores` cores.
    pub fn new(
        profile: &Profile,
        costs: &ProcessorCosts,
        options: &PageOptions,
        page: u64,
        cores: u32,
    ) -> Self {
        let pages = (TRANSFER / page).max(1) / options.run * options.run;
        let pages = pages.max(options.run);
        let load = PageLoad {
            bytes: pages * page,
            pages,
            runs: pages.div_ceil(options.run),
            target_runs: pages.div_ceil(options.run.max(options.target_run)),
        };
        let [source, target] =
            [SlotSide::Source, SlotSide::Target].map(|side| costs.slot(side, options.memory, page));
        let slots = (options.ring_bytes / options.slot_bytes).max(2) as u32;
        let rate = profile.card.bits_per_s.unwrap_or(0).max(1) as f64 / 8.0;
        let slot = CoalescingCosts {
            slot_bytes: options.slot_bytes,
            slot_pages: (options.slot_bytes / LEAST_PAGE) as u32,
            slots: slots * profile.cards,
            slot_line_ns: options.slot_bytes as f64 * 1e9 / rate,
            page_entry_bytes: ENTRY,
            // One message carries the request to empty the slot, the page table and the pages.
            slot_requests: 1,
            response_ns: costs.request_ns(RESPONSE),
            source,
            target,
        };
        // Groups that share a core wait for each other.
        let sharing = f64::from(profile.groups) / f64::from(cores);
        let ways = Self::way_costs(profile, costs, page, sharing);
        let coalescing = CoalescingCosts {
            source: Self::shared(source, sharing),
            target: Self::shared(target, sharing),
            response_ns: slot.response_ns * sharing,
            ..slot
        };
        let way = match options.coalesce {
            Coalesce::Never => ways.choose(&load).way,
            Coalesce::Auto => WayCosts { coalescing: Some(coalescing), ..ways }.choose(&load).way,
            Coalesce::Always => Way::Coalesced,
        };
        // Pages that share a request were found in a list.
        let listed = |pages: u64| if pages > 1 { pages as f64 * costs.entry_ns() } else { 0.0 };
        let requests = |pages: u64| Self {
            payload: pages * page,
            request_ns: costs.request_ns(pages * page) + listed(pages),
            ..Self { way, ..Self::direct(page) }
        };
        match way {
            Way::Direct => requests(1),
            Way::Merged => requests(options.run),
            Way::Gathered => {
                let entries = u64::from(profile.gather_entries).saturating_mul(options.run);
                requests(options.target_run.min(entries).max(1))
            }
            Way::Coalesced => {
                let plan = SlotPlan {
                    costs: slot,
                    pages: slot.pages_per_slot(page),
                    page: page.min(options.slot_bytes),
                    slots: slots as usize,
                    response_ns: slot.response_ns,
                };
                Self {
                    way,
                    payload: plan.pages * plan.page,
                    request_ns: costs.request_ns(plan.wire()),
                    slots: Some(plan),
                }
            }
        }
    }

    /// One page of `payload` bytes per work request, which costs the processor nothing.
    pub fn direct(payload: u64) -> Self {
        Self { way: Way::Direct, payload, request_ns: 0.0, slots: None }
    }

    /// The costs of a rail group's ways, without coalescing.
    fn way_costs(profile: &Profile, costs: &ProcessorCosts, page: u64, sharing: f64) -> WayCosts {
        let cards = f64::from(profile.cards);
        WayCosts {
            line_bytes_per_s: cards * profile.card.bits_per_s.unwrap_or(0) as f64 / 8.0,
            requests_per_s: cards * profile.card.ops_per_s.unwrap_or(0) as f64,
            latency_ns: Self::latency_ns(profile),
            request_ns: costs.request_ns(page) * sharing,
            byte_ns: 0.0,
            gather_entries: profile.gather_entries,
            entry_ns: costs.entry_ns() * sharing,
            max_request: 0,
            coalescing: None,
        }
    }

    fn latency_ns(profile: &Profile) -> f64 {
        (profile.card.latency + profile.card.jitter).as_nanos() as f64
    }

    /// The default of [`PageOptions::ring_bytes`].
    pub fn ring_bytes(profile: &Profile) -> u64 {
        profile.card.bits_per_s.unwrap_or(0).div_ceil(100_000_000_000).max(1) * RING
    }

    fn shared(side: SlotCosts, sharing: f64) -> SlotCosts {
        let mut copy = side.copy;
        if copy.on_processor {
            (copy.page_ns, copy.byte_ns) = (copy.page_ns * sharing, copy.byte_ns * sharing);
        }
        SlotCosts { slot_ns: side.slot_ns * sharing, page_ns: side.page_ns * sharing, copy }
    }
}

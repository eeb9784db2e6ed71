//! Which way carries the pages of a transfer in the least time: a cost model without I/O and without allocation.
//!
//! Pages have four ways from one host to another:
//!
//! | way | a work request carries | it pays if |
//! |---|---|---|
//! | [`Way::Direct`] | one page | pages are large: the line is slower than the devices' rate of requests |
//! | [`Way::Merged`] | pages that follow each other in both memories | there are such pages |
//! | [`Way::Gathered`] | pages that follow each other at the target, by the device's gather list | the device has gather lists, and the target's pages are in order |
//! | [`Way::Coalesced`] | a slot full of pages | pages are small and scattered on both sides |
//!
//! For a coalesced transfer the source copies pages into a slot, a work request carries the slot, and the target copies
//! the pages to their places. This costs two copies, processor time at the target, and a table of the pages on the
//! line.
//!
//! # The model
//!
//! A transfer keeps its *stages* busy: the line, the devices' request engines, the processors, the copies and the
//! slots. [`WayCosts::stages`] computes for how long. The stages of a transfer work at the same time on different
//! requests, so the slowest stage sets the pace. The other stages add the time that they take before the first byte is
//! on the line and after the last one: [`StageTimes::fill_ns`].
//!
//! Costs are those of one rail group: one engine thread at each side, and the rails of the group. All times are in
//! nanoseconds, as `f64`: a cost per page is a fraction of one.
//!
//! ```
//! use multirail_engine::plan::way::{CoalescingCosts, CopyCosts, PageLoad, SlotCosts, Way, WayCosts};
//!
//! // A page table entry and a GPU's copy of a page cost little beside a request of the card.
//! let side = SlotCosts {
//!     slot_ns: 4000.0,
//!     page_ns: 15.0,
//!     copy: CopyCosts { start_ns: 8000.0, page_ns: 0.7, byte_ns: 0.003, on_processor: false },
//! };
//! // Four EFA cards of a p5: 0.81 million requests a second and 97.4 Gbps each.
//! let costs = WayCosts {
//!     line_bytes_per_s: 48.7e9,
//!     requests_per_s: 3.24e6,
//!     latency_ns: 17_000.0,
//!     request_ns: 180.0,
//!     byte_ns: 0.0,
//!     gather_entries: 1,
//!     entry_ns: 57.0,
//!     max_request: 1 << 20,
//!     coalescing: Some(CoalescingCosts {
//!         slot_bytes: 512 << 10,
//!         slot_pages: 512,
//!         slots: 32,
//!         slot_line_ns: 43_000.0,
//!         page_entry_bytes: 16,
//!         slot_requests: 1,
//!         response_ns: 180.0,
//!         source: side,
//!         target: side,
//!     }),
//! };
//! assert_eq!(costs.choose(&PageLoad::scattered(16_384, 4 << 10)).way, Way::Coalesced);
//! assert_eq!(costs.choose(&PageLoad::scattered(1024, 64 << 10)).way, Way::Direct);
//! ```

/// A way must be faster by this factor before the model prefers it to a simpler one. The model is not more exact, and
/// simpler ways use less of both processors.
const MARGIN: f64 = 1.05;

/// How pages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// A work request per page.
    Direct,
    /// A work request per run of pages that follow each other in both memories.
    Merged,
    /// A work request per run of pages that follow each other at the target, by the device's gather list.
    Gathered,
    /// Pages are copied into slots at the source, and out of them at the target.
    Coalesced,
}

impl Way {
    /// All ways, the simplest first.
    pub const ALL: [Self; 4] = [Self::Direct, Self::Merged, Self::Gathered, Self::Coalesced];

    /// The name in rows and reports: `direct`, `merged`, `gathered` or `coalesced`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Merged => "merged",
            Self::Gathered => "gathered",
            Self::Coalesced => "coalesced",
        }
    }
}

/// A stage of a transfer. The slowest one is the limit of its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The devices' line rate.
    Line,
    /// The devices' rate of requests.
    Requests,
    /// The processor of one side.
    Cpu,
    /// The copies of one side.
    Copy,
    /// The slots of coalesced pages: too few are free.
    Slots,
}

impl Stage {
    /// The name in rows and reports: `line`, `requests`, `cpu`, `copy` or `slots`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Requests => "requests",
            Self::Cpu => "cpu",
            Self::Copy => "copy",
            Self::Slots => "slots",
        }
    }
}

/// The pages of a transfer, as counts. [`WayCosts`] takes pages as equally large, and runs as equally long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLoad {
    /// The bytes of all pages.
    pub bytes: u64,
    /// The number of pages.
    pub pages: u64,
    /// The number of runs of pages that follow each other in both memories; `pages` if no two do.
    pub runs: u64,
    /// The number of runs of pages that follow each other in the target's memory; `pages` if no two do.
    pub target_runs: u64,
}

impl PageLoad {
    /// `pages` pages of `page` bytes, of which no two follow each other.
    pub fn scattered(pages: u64, page: u64) -> Self {
        Self { bytes: pages.saturating_mul(page), pages, runs: pages, target_runs: pages }
    }
}

/// What the ways cost on one rail group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WayCosts {
    /// Payload bytes per second of all rails together. 0: the rate is unknown, and no limit.
    pub line_bytes_per_s: f64,
    /// Work requests per second of all rails together. 0: the rate is unknown, and no limit.
    pub requests_per_s: f64,
    /// The time from the posting of a small request to its arrival at the peer, on an idle line. All ways take the time
    /// from there to the completion.
    pub latency_ns: f64,
    /// The initiator's processor time per work request: engine, backend, provider and driver.
    pub request_ns: f64,
    /// Each side's processor time per byte of a work request: that of a kernel which copies bytes into and out of
    /// sockets, or between processes. 0: devices move the bytes.
    pub byte_ns: f64,
    /// The entries of a request's gather list (`max_sge`). 1 or 0: there is none.
    pub gather_entries: u32,
    /// The initiator's processor time per page that shares a work request with others: to find its neighbours, or for
    /// an entry of a gather list.
    pub entry_ns: f64,
    /// The largest work request, in bytes. 0: no limit.
    pub max_request: u64,
    /// What coalescing costs. `None`: one of the sides does not allow it.
    pub coalescing: Option<CoalescingCosts>,
}

/// What coalescing costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoalescingCosts {
    /// The bytes of the pages of a slot. The page table has room of its own.
    pub slot_bytes: u64,
    /// The most pages of a slot.
    pub slot_pages: u32,
    /// The slots of all rails together.
    pub slots: u32,
    /// The time for which a full slot keeps its rail's line busy.
    pub slot_line_ns: f64,
    /// The bytes of a page's entry in the page table, which travels with the pages.
    pub page_entry_bytes: u64,
    /// The initiator's work requests per slot: one, which carries the bytes, the page table and the request, or two if
    /// the request follows the bytes once they have arrived.
    pub slot_requests: u32,
    /// The target's processor time for the work request of a response: it has few bytes.
    pub response_ns: f64,
    /// The source's costs: it fills slots.
    pub source: SlotCosts,
    /// The target's costs: it empties slots, and responds by a work request.
    pub target: SlotCosts,
}

/// What slots cost one side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotCosts {
    /// Processor time per slot, without the initiator's work requests.
    pub slot_ns: f64,
    /// Processor time per page.
    pub page_ns: f64,
    /// The copies of the pages.
    pub copy: CopyCosts,
}

/// The time of copies: of `n` pages of `size` bytes, `start_ns + n * (page_ns + size * byte_ns)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyCosts {
    /// The time before the first byte of a slot is copied. Copies of several slots overlap it.
    pub start_ns: f64,
    /// The time per page.
    pub page_ns: f64,
    /// The time per byte.
    pub byte_ns: f64,
    /// Whether the engine's thread copies, instead of a GPU.
    pub on_processor: bool,
}

/// For how long a transfer keeps its stages busy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// The number of work requests of the initiator.
    pub requests: u64,
    /// The line.
    pub line_ns: f64,
    /// The devices' request engines.
    pub requests_ns: f64,
    /// The processor of the busier side, without copies.
    pub cpu_ns: f64,
    /// The slower side's copies, and that side's other processor time if its processor copies.
    pub copy_ns: f64,
    /// The slots, if each is used again as soon as it is free. 0 for other ways.
    pub slots_ns: f64,
    /// What the other stages add before the slowest one has its first byte, and after it has its last one.
    pub fill_ns: f64,
}

/// The chosen way, and its times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WayChoice {
    pub way: Way,
    pub times: StageTimes,
}

impl WayCosts {
    /// The fastest way. A way is preferred to a simpler one only if it is more than 5 % faster.
    pub fn choose(&self, load: &PageLoad) -> WayChoice {
        let direct = WayChoice { way: Way::Direct, times: self.requests_of(load.pages, 0, load) };
        Way::ALL[1..].iter().fold(direct, |best, way| match self.stages(*way, load) {
            Some(times) if times.total_ns() * MARGIN < best.times.total_ns() => {
                WayChoice { way: *way, times }
            }
            _ => best,
        })
    }

    /// The times of `way`. `None` if the way does not exist for these pages and devices.
    pub fn stages(&self, way: Way, load: &PageLoad) -> Option<StageTimes> {
        match way {
            Way::Direct => Some(self.requests_of(load.pages, 0, load)),
            Way::Merged => (load.runs < load.pages).then(|| self.requests_of(load.runs, load.pages, load)),
            Way::Gathered => {
                let is_possible = self.gather_entries > 1 && load.target_runs < load.runs;
                is_possible.then(|| {
                    // Pages that follow each other in both memories share an entry.
                    let target_runs = load.target_runs.max(1);
                    let entries = load.runs.div_ceil(target_runs).div_ceil(self.gather_entries.into());
                    self.requests_of(target_runs.saturating_mul(entries), load.pages, load)
                })
            }
            Way::Coalesced => self.coalescing.map(|coalescing| self.coalesced(&coalescing, load)),
        }
    }

    /// The times of a transfer of `requests` work requests, none of which is larger than a device allows. `entries`
    /// pages share requests with others.
    fn requests_of(&self, requests: u64, entries: u64, load: &PageLoad) -> StageTimes {
        let most = if self.max_request == 0 { u64::MAX } else { self.max_request };
        let requests = requests.max(load.bytes.div_ceil(most));
        StageTimes {
            requests,
            line_ns: ns_at(load.bytes as f64, self.line_bytes_per_s),
            requests_ns: ns_at(requests as f64, self.requests_per_s),
            cpu_ns: requests as f64 * self.request_ns
                + entries as f64 * self.entry_ns
                + load.bytes as f64 * self.byte_ns,
            copy_ns: 0.0,
            slots_ns: 0.0,
            fill_ns: self.latency_ns,
        }
    }

    fn coalesced(&self, costs: &CoalescingCosts, load: &PageLoad) -> StageTimes {
        let slots = costs.slots(load);
        let requests = slots.saturating_mul(costs.slot_requests.into());
        let (pages, slots_f) = (load.pages as f64, slots as f64);
        let table = pages * costs.page_entry_bytes as f64;
        let cpu = |side: &SlotCosts| slots_f * side.slot_ns + pages * side.page_ns;
        let moved = (load.bytes as f64 + table) * self.byte_ns;
        let source_cpu = cpu(&costs.source) + requests as f64 * self.request_ns + moved;
        let target_cpu = cpu(&costs.target) + slots_f * costs.response_ns + moved;
        let copy = |side: &SlotCosts| pages * side.copy.page_ns + load.bytes as f64 * side.copy.byte_ns;
        let (gather, scatter) = (copy(&costs.source), copy(&costs.target));
        // A processor that copies does nothing else meanwhile: its copies and the rest of its work are one stage.
        let copy_stage =
            |side: &SlotCosts, copy: f64, cpu: f64| if side.copy.on_processor { copy + cpu } else { copy };
        let gather_ns = copy_stage(&costs.source, gather, source_cpu);
        let scatter_ns = copy_stage(&costs.target, scatter, target_cpu);
        let line_ns = ns_at(load.bytes as f64 + table, self.line_bytes_per_s);
        let (cpu_ns, copy_ns) = (source_cpu.max(target_cpu), gather_ns.max(scatter_ns));
        // Each slot passes all stages, one after the other; all slots together pass the slowest stage. Both sides'
        // kernels move the bytes of a message at the same time.
        let all_stages = source_cpu + gather + line_ns + (target_cpu - moved) + scatter;
        let slowest = line_ns.max(cpu_ns).max(copy_ns);
        let of_one_slot = all_stages / slots_f.max(1.0);
        let starts = costs.source.copy.start_ns + costs.target.copy.start_ns;
        let messages = f64::from(costs.slot_requests) + 1.0;
        let turn = messages * self.latency_ns + starts + of_one_slot;
        StageTimes {
            requests,
            line_ns,
            requests_ns: ns_at(requests as f64, self.requests_per_s),
            cpu_ns,
            copy_ns,
            // A slot may wait for the one before it on the line.
            slots_ns: slots_f * (turn + costs.slot_line_ns) / f64::from(costs.slots.max(1)),
            fill_ns: turn - slowest / slots_f.max(1.0),
        }
    }
}

impl CoalescingCosts {
    /// How many pages of `page` bytes fit a slot. At least 1: a larger page takes several slots.
    pub fn pages_per_slot(&self, page: u64) -> u64 {
        (self.slot_bytes / page.max(1)).min(self.slot_pages.into()).max(1)
    }

    /// The number of slots that the pages take.
    pub fn slots(&self, load: &PageLoad) -> u64 {
        let page = load.bytes.div_ceil(load.pages.max(1));
        let room = self.slot_bytes.max(1);
        match page > room {
            true => load.pages.saturating_mul(page.div_ceil(room)),
            false => load.pages.div_ceil(self.pages_per_slot(page)),
        }
    }
}

impl StageTimes {
    /// The time of the transfer: of its slowest stage, and what the other stages add to it.
    pub fn total_ns(&self) -> f64 {
        // With slots to spare, a transfer of fewer slots does not wait for any.
        let slowest = self.line_ns.max(self.requests_ns).max(self.cpu_ns).max(self.copy_ns);
        slowest.max(self.slots_ns - self.fill_ns) + self.fill_ns
    }

    /// The slowest stage. Of equally slow ones, the first in the order of [`Stage`].
    pub fn limit(&self) -> Stage {
        let stages = [
            (Stage::Line, self.line_ns),
            (Stage::Requests, self.requests_ns),
            (Stage::Cpu, self.cpu_ns),
            (Stage::Copy, self.copy_ns),
            (Stage::Slots, self.slots_ns - self.fill_ns),
        ];
        let slowest =
            stages[1..].iter().fold(stages[0], |slow, stage| if stage.1 > slow.1 { *stage } else { slow });
        slowest.0
    }
}

/// The nanoseconds that `amount` takes at `per_s`. A rate of 0 is no limit.
fn ns_at(amount: f64, per_s: f64) -> f64 {
    if per_s > 0.0 { amount * 1e9 / per_s } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GPU: SlotCosts = SlotCosts {
        slot_ns: 4000.0,
        page_ns: 15.0,
        copy: CopyCosts { start_ns: 8000.0, page_ns: 0.7, byte_ns: 0.0028, on_processor: false },
    };
    const HOST: SlotCosts = SlotCosts {
        slot_ns: 1000.0,
        page_ns: 15.0,
        copy: CopyCosts { start_ns: 0.0, page_ns: 165.0, byte_ns: 0.063, on_processor: true },
    };

    /// Four cards of a p5.
    fn p5(side: SlotCosts) -> WayCosts {
        WayCosts {
            line_bytes_per_s: 48.7e9,
            requests_per_s: 3.24e6,
            latency_ns: 17_000.0,
            request_ns: 180.0,
            byte_ns: 0.0,
            gather_entries: 1,
            entry_ns: 57.0,
            max_request: 1 << 30,
            coalescing: Some(CoalescingCosts {
                slot_bytes: 512 << 10,
                slot_pages: 512,
                slots: 32,
                slot_line_ns: 43_000.0,
                page_entry_bytes: 16,
                slot_requests: 1,
                response_ns: 180.0,
                source: side,
                target: side,
            }),
        }
    }

    #[test]
    fn small_scattered_pages_of_gpus_are_coalesced() {
        for (page, way, limit) in [
            (1 << 10, Way::Coalesced, Stage::Cpu),
            (4 << 10, Way::Coalesced, Stage::Line),
            (64 << 10, Way::Direct, Stage::Line),
            (1 << 20, Way::Direct, Stage::Line),
        ] {
            let choice = p5(GPU).choose(&PageLoad::scattered((1 << 30) / page, page));
            assert_eq!((choice.way, choice.times.limit()), (way, limit), "{page}: {choice:?}");
        }
    }

    #[test]
    fn few_pages_stay_direct() {
        // 16 pages take 5 µs of the cards, and a slot makes three trips.
        assert_eq!(p5(GPU).choose(&PageLoad::scattered(16, 4096)).way, Way::Direct);
        assert_eq!(p5(GPU).choose(&PageLoad::scattered(1, 0)).way, Way::Direct);
    }

    #[test]
    fn one_core_copies_host_pages_slower_than_cards_take_them() {
        let choice = p5(HOST).choose(&PageLoad::scattered(65_536, 4096));
        assert_eq!((choice.way, choice.times.limit()), (Way::Direct, Stage::Requests));
        // 1 KiB pages: 3.2 million requests a second, or 4 million copies.
        let choice = p5(HOST).choose(&PageLoad::scattered(65_536, 1024));
        assert_eq!((choice.way, choice.times.limit()), (Way::Coalesced, Stage::Copy));
    }

    #[test]
    fn neighbours_are_merged() {
        let load = PageLoad { bytes: 1 << 28, pages: 65_536, runs: 1024, target_runs: 1024 };
        let choice = p5(GPU).choose(&load);
        assert_eq!((choice.way, choice.times.requests), (Way::Merged, 1024));
    }

    #[test]
    fn gather_lists_need_a_device_and_an_ordered_target() {
        let load = PageLoad { bytes: 1 << 28, pages: 65_536, runs: 65_536, target_runs: 64 };
        let mut costs = WayCosts { coalescing: None, ..p5(GPU) };
        assert_eq!(costs.choose(&load).way, Way::Direct);
        costs.gather_entries = 30;
        let choice = costs.choose(&load);
        // 1024 pages at the target take 35 lists of 30 entries.
        assert_eq!((choice.way, choice.times.requests), (Way::Gathered, 64 * 35));
        assert_eq!(costs.stages(Way::Gathered, &PageLoad::scattered(64, 4096)), None);
    }

    #[test]
    fn an_unwilling_target_is_never_coalesced_to() {
        let costs = WayCosts { coalescing: None, ..p5(GPU) };
        assert_eq!(costs.choose(&PageLoad::scattered(65_536, 4096)).way, Way::Direct);
        assert_eq!(costs.stages(Way::Coalesced, &PageLoad::scattered(65_536, 4096)), None);
    }

    /// A kernel that copies all bytes leaves less to gain: both ways pay for that.
    #[test]
    fn bytes_that_the_processor_moves_count_for_both_ways() {
        let devices = WayCosts { request_ns: 1500.0, requests_per_s: 0.0, line_bytes_per_s: 0.0, ..p5(HOST) };
        let sockets = WayCosts { byte_ns: 0.37, ..devices };
        let load = PageLoad::scattered(4096, 16 << 10);
        assert_eq!((devices.choose(&load).way, sockets.choose(&load).way), (Way::Coalesced, Way::Direct));
        let load = PageLoad::scattered(16_384, 4 << 10);
        assert_eq!(sockets.choose(&load).way, Way::Coalesced);
        let direct = |costs: WayCosts| costs.stages(Way::Direct, &load).map_or(0.0, |times| times.cpu_ns);
        assert!((direct(sockets) - direct(devices) - load.bytes as f64 * 0.37).abs() < 1.0);
    }

    #[test]
    fn too_few_slots_are_the_limit() {
        let mut costs = p5(GPU);
        costs.coalescing = costs.coalescing.map(|coalescing| CoalescingCosts { slots: 2, ..coalescing });
        let load = PageLoad::scattered(1 << 20, 1024);
        let times = costs.stages(Way::Coalesced, &load);
        assert_eq!(times.map(|times| times.limit()), Some(Stage::Slots));
        assert!(
            times.map(|times| times.total_ns())
                > p5(GPU).stages(Way::Coalesced, &load).map(|times| times.total_ns())
        );
    }

    #[test]
    fn slots_hold_whole_pages() {
        let Some(costs) = p5(GPU).coalescing else { panic!("it is set above") };
        assert_eq!(
            (costs.pages_per_slot(4096), costs.pages_per_slot(8), costs.pages_per_slot(1 << 20)),
            (128, 512, 1)
        );
        assert_eq!(costs.slots(&PageLoad::scattered(129, 4096)), 2);
        assert_eq!(costs.slots(&PageLoad::scattered(3, 1 << 20)), 6);
        assert_eq!(costs.slots(&PageLoad::scattered(0, 0)), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        /// No way that exists is faster by more than the margin.
        #[test]
        fn the_choice_is_near_the_best(
            page in 0_u64..1 << 21, pages in 0_u64..1 << 20, runs in 1_u64..64, target_runs in 1_u64..64,
            line in 0.0..1e11, rate in 0.0..1e7, request in 0.0..1e4, entries in 0_u32..32, slot in 0_u64..1 << 21,
            host in any::<bool>(),
        ) {
            let side = if host { HOST } else { GPU };
            let costs = p5(side);
            let coalescing = costs.coalescing.map(|costs| CoalescingCosts { slot_bytes: slot, ..costs });
            let costs = WayCosts {
                line_bytes_per_s: line, requests_per_s: rate, request_ns: request, gather_entries: entries, coalescing, ..costs
            };
            let runs = pages.div_ceil(runs);
            let load = PageLoad { bytes: page * pages, pages, runs, target_runs: runs.div_ceil(target_runs) };
            let choice = costs.choose(&load);
            prop_assert!(choice.times.total_ns().is_finite());
            prop_assert_eq!(costs.stages(choice.way, &load), Some(choice.times));
            for way in Way::ALL {
                if let Some(times) = costs.stages(way, &load) {
                    prop_assert!(times.total_ns().is_finite());
                    prop_assert!(choice.times.total_ns() <= times.total_ns() * MARGIN);
                }
            }
        }

        /// Numbers that no device has do not panic, and leave the simplest way.
        #[test]
        fn absurd_numbers_leave_direct(bytes in any::<u64>(), pages in any::<u64>(), runs in any::<u64>(), slot in any::<u64>()) {
            let load = PageLoad { bytes, pages, runs, target_runs: runs };
            let mut costs = p5(GPU);
            costs.coalescing = costs.coalescing.map(|costs| CoalescingCosts { slot_bytes: slot, slot_pages: 0,
                page_entry_bytes: u64::MAX, slot_requests: u32::MAX, ..costs });
            costs.gather_entries = u32::MAX;
            let _ = costs.choose(&load);
            costs.request_ns = f64::NAN;
            costs.latency_ns = f64::NAN;
            prop_assert_eq!(costs.choose(&load).way, Way::Direct);
        }
    }
}

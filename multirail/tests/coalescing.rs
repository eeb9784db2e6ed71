//! Small pages over a modelled EFA card of a p5, in virtual time: the card carries 97.4 Gbps, but only 0.81 million
//! requests per second. Coalesced pages share requests. Copies by the processor take no virtual time, so this shows what
//! the card gains.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::spi::Paths;
use multirail::{
    Access, Clock, CoalescePolicy, ErrorKind, Fabric, FabricBuilder, Op, Pages, PathPolicy, Peer,
    ReadOptions, Region, RemoteRegion, Staged, StagingPolicy, TransportConfig, VirtualClock, WriteOptions,
};

/// Bytes of all pages of a transfer.
const TOTAL: usize = 16 << 20;

/// What `explain` says of pages that have requests of their own.
const NOT_CHOSEN: &str =
    "not coalesced: the policy does not ask for it, or a request for each piece is as fast";

/// Two hosts with a card each.
struct Hosts {
    clock: VirtualClock,
    fabrics: [Fabric; 2],
    to_target: Peer,
    source: Region,
    target: Region,
    remote: RemoteRegion,
    content: Vec<u8>,
}

impl Hosts {
    fn new(bytes: usize, coalesce: [Option<CoalescePolicy>; 2]) -> Self {
        Self::with_cards(1, bytes, coalesce)
    }

    fn with_cards(count: u32, bytes: usize, coalesce: [Option<CoalescePolicy>; 2]) -> Self {
        let clock = VirtualClock::default();
        let open = |coalesce: Option<CoalescePolicy>, seed| {
            let cards =
                Arc::new(Loopback::with(LoopbackConfig::default().devices(count).link(LinkModel::p5())));
            let cards = match coalesce {
                Some(policy) => Staged::new(cards, StagingPolicy::Never).coalescing(policy),
                None => Staged::new(cards, StagingPolicy::WhereRefused),
            };
            let transport = TransportConfig::new("cards", Arc::new(cards));
            let builder = FabricBuilder::new().transport(transport).clock(Arc::new(clock.clone()));
            builder.seed(seed).caller_driven().open().unwrap()
        };
        let fabrics = [open(coalesce[0], 1), open(coalesce[1], 2)];
        let (to_target, _) = fabrics[0].connect_local(&fabrics[1]).unwrap();
        let [source, target] = [0, 1].map(|side: usize| fabrics[side].alloc(bytes, Access::all()).unwrap());
        let content: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
        source.copy_in(0, &content).unwrap();
        let remote = to_target.import(&target.descriptor()).unwrap();
        Self { clock, fabrics, to_target, source, target, remote, content }
    }

    /// Runs until the operation has ended. Returns the virtual time that it took.
    fn finish(&self, op: &mut Op) -> Duration {
        let (begin, mut idle) = (self.clock.now(), 0);
        while op.try_result().is_none_or(|result| result.map(drop).is_err_and(|error| panic!("{error}"))) {
            // A worker that copies between slots and regions reports no event.
            let events = self.fabrics.iter().map(|fabric| fabric.step().events).sum::<usize>();
            idle = if events == 0 { idle + 1 } else { 0 };
            if idle > 4 {
                idle = 0;
                let due = self.fabrics.iter().map(Fabric::due).min().unwrap();
                self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
            }
        }
        self.clock.now().since(begin)
    }
}

/// The place at the target of a page: all pages have another order there.
fn place(number: usize, count: usize) -> usize {
    number * 1031 % count
}

/// Bytes per nanosecond of all pages, written or read.
fn speed(page: usize, policy: CoalescePolicy, is_read: bool) -> f64 {
    speed_of(TOTAL / page, page, policy, is_read)
}

/// Bytes per nanosecond of `count` pages.
fn speed_of(count: usize, page: usize, policy: CoalescePolicy, is_read: bool) -> f64 {
    let total = count * page;
    let hosts = Hosts::new(total, [Some(CoalescePolicy::Never); 2]);
    let from = Pages::new((0..count as u32).collect::<Vec<_>>());
    let to = Pages::new((0..count).map(|number| place(number, count) as u32).collect::<Vec<_>>());
    let begin = |_| {
        let (write, read) = (WriteOptions::new().coalesce(policy), ReadOptions::new().coalesce(policy));
        let Hosts { to_target, source, target, remote, content, .. } = &hosts;
        if is_read {
            target.copy_in(0, content).unwrap();
            return to_target.read_pages_with(source, &to, remote, &from, page, &read).unwrap();
        }
        to_target.write_pages_with(source, &from, remote, &to, page, &write).unwrap()
    };
    // The first one warms up.
    let spans = [0, 1].map(|round| hosts.finish(&mut begin(round)));
    let arrived = if is_read { &hosts.source } else { &hosts.target };
    let mut bytes_there = vec![0; total];
    arrived.copy_out(0, &mut bytes_there).unwrap();
    for number in 0..count {
        let there = &bytes_there[place(number, count) * page..][..page];
        assert!(there == &hosts.content[number * page..][..page], "page {number}");
    }
    total as f64 / spans[1].as_nanos() as f64
}

#[test]
fn small_pages_reach_the_line() {
    for is_read in [false, true] {
        let line = speed(64 << 10, CoalescePolicy::Never, is_read);
        for (page, least_gain, least_of_line) in [(4 << 10, 3.0, 0.95), (1 << 10, 8.0, 0.95)] {
            let [never, always] =
                [CoalescePolicy::Never, CoalescePolicy::Always].map(|policy| speed(page, policy, is_read));
            println!(
                "is_read {is_read}, {page} B: {never:.2} GB/s, coalesced {always:.2} GB/s; 64 KiB pages {line:.2} GB/s"
            );
            assert!(always >= least_gain * never, "{page} B: {always} against {never}");
            assert!(always >= least_of_line * line, "{page} B: {always} against {line} of 64 KiB pages");
        }
    }
}

/// A card carries a request without the peer's processor, so its path counts as broken after 10 ms without progress.
/// The requests of coalesced pages need the peer's worker, whose thread may be kept off its core for longer.
#[test]
fn a_busy_target_breaks_no_path() {
    let page = 4096;
    let hosts = Hosts::with_cards(2, TOTAL, [Some(CoalescePolicy::Always); 2]);
    let count = TOTAL / page;
    let from = Pages::new((0..count as u32).collect::<Vec<_>>());
    let to = Pages::new((0..count).map(|number| place(number, count) as u32).collect::<Vec<_>>());
    let Hosts { to_target, source, remote, fabrics, clock, .. } = &hosts;
    let mut op = to_target.write_pages(source, &from, remote, &to, page).unwrap();
    for _ in 0..1000 {
        fabrics[0].step();
        clock.advance(Duration::from_micros(100));
    }
    assert!(op.try_result().is_none(), "the target has not run");
    hosts.finish(&mut op);
    let broken = fabrics.iter().flat_map(|fabric| fabric.counters()).map(|rail| rail.paths_broken);
    assert_eq!(broken.sum::<u64>(), 0);
}

#[test]
fn auto_chooses_the_faster_way() {
    use CoalescePolicy::{Always, Auto, Never};
    let large = [(4096, 4096), (16_384, 1024), (1024, 16 << 10), (256, 64 << 10)];
    // Of one slot, the model counts the copies, which take no time here: 64 pages of 4 KiB stay direct.
    let small = [(256, 4096), (512, 1024), (4, 4096), (16, 1024)];
    for (count, page) in large.into_iter().chain(small) {
        for is_read in [false, true] {
            let [never, always, auto] =
                [Never, Always, Auto].map(|policy| speed_of(count, page, policy, is_read));
            println!(
                "{count} pages of {page} B, is_read {is_read}: {never:.2}, {always:.2}, auto {auto:.2} GB/s"
            );
            assert!(auto >= 0.95 * never.max(always), "{count} pages of {page} B: {auto}");
        }
    }
}

#[test]
fn a_receipt_and_explain_tell_of_coalescing() {
    let hosts = Hosts::new(64 << 12, [Some(CoalescePolicy::Never); 2]);
    let pages = Pages::new((0..32).rev().collect::<Vec<_>>());
    let Hosts { to_target, source, remote, .. } = &hosts;
    let options = |policy| WriteOptions::new().coalesce(policy);
    for (policy, page, is_coalesced, why) in [
        (CoalescePolicy::Always, 4096, true, "coalesced: the pieces share slots; they have 4 KiB on average"),
        (CoalescePolicy::Never, 4096, false, NOT_CHOSEN),
        // They are too few.
        (CoalescePolicy::Auto, 4096, false, NOT_CHOSEN),
    ] {
        let write = || to_target.write_pages_with(source, &pages, remote, &pages, page, &options(policy));
        let explained =
            to_target.explain_write_pages(source, &pages, remote, &pages, page, &options(policy)).unwrap();
        assert_eq!(explained.coalescing.as_deref(), Some(why));
        let mut op = write().unwrap();
        hosts.finish(&mut op);
        let path = op.receipt().unwrap().rails[0].path;
        assert_eq!(path.contains(Paths::COALESCED), is_coalesced, "{path}");
    }
    let counters: Vec<_> = hosts.fabrics.iter().flat_map(|fabric| fabric.operation_counters()).collect();
    let sum = counters.iter().map(|counters| counters.coalesced_bytes).sum::<u64>();
    assert_eq!(sum, 32 * 4096, "{counters:?}");
    // A large write has requests of its own.
    let large = to_target.explain_write(source, 0..source.len(), remote, 0, &options(CoalescePolicy::Always));
    let large = large.unwrap().coalescing.unwrap();
    assert!(
        large.starts_with("not coalesced: ") && large.ends_with(" on average is more than 32 KiB"),
        "{large}"
    );
    // The path policy has the last word.
    let both = options(CoalescePolicy::Always).path_policy(PathPolicy::without(Paths::COALESCED));
    let refused =
        to_target.write_pages_with(source, &pages, remote, &pages, 4096, &both).map(Op::detach).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
}

#[test]
fn both_sides_must_allow_it() {
    let pages = Pages::new((0..32).rev().collect::<Vec<_>>());
    for coalesce in [[Some(CoalescePolicy::Always), None], [None, Some(CoalescePolicy::Always)]] {
        let hosts = Hosts::new(64 << 12, coalesce);
        let Hosts { to_target, source, remote, .. } = &hosts;
        let write = |options| to_target.write_pages_with(source, &pages, remote, &pages, 4096, &options);
        let refused =
            write(WriteOptions::new().coalesce(CoalescePolicy::Always)).map(Op::detach).unwrap_err();
        assert!(
            refused.kind() == ErrorKind::Unsupported && refused.to_string().contains("MULTIRAIL_COALESCE")
        );
        // So is a lone write or read.
        let always = WriteOptions::new().coalesce(CoalescePolicy::Always);
        let lone = to_target.write_with(source, 0..100, remote, 0, &always).map(Op::detach).unwrap_err();
        let read = ReadOptions::new().coalesce(CoalescePolicy::Always);
        let read = to_target.read_with(source, 0..100, remote, 0, &read).map(Op::detach).unwrap_err();
        assert_eq!([lone.kind(), read.kind()], [ErrorKind::Unsupported; 2]);
        // The transport's own policy coalesces where it can.
        let mut op = write(WriteOptions::new()).unwrap();
        hosts.finish(&mut op);
        assert!(!op.receipt().unwrap().rails[0].path.contains(Paths::COALESCED));
    }
}

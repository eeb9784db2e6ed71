//! What a lost, a flapping and a slow card of 32 cost, in virtual time: 32 cards as those of a p5 move 32 MiB operations
//! of 64 KiB pages, four at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{BrokenPath, LinkModel, Loopback, LoopbackConfig};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Pages, Peer, RailCounters, Region, RemoteRegion, Time,
    TransportConfig, VirtualClock,
};

const CARDS: u32 = 32;
const PAGE: usize = 64 << 10;
const PAGES: u32 = 512;
const LEN: usize = PAGES as usize * PAGE;
const UNDER_WAY: usize = 4;
const MS: Duration = Duration::from_millis(1);

/// Two connected hosts, and the operations under way.
struct Hosts {
    clock: VirtualClock,
    fabrics: [Fabric; 2],
    to_target: Peer,
    source: Region,
    _target: Region,
    remote: RemoteRegion,
    pages: Pages,
    ops: VecDeque<Op>,
}

impl Hosts {
    fn new(link: LinkModel) -> Self {
        let clock = VirtualClock::default();
        let cards = || LoopbackConfig::default().devices(CARDS).groups(8);
        let open = |link, seed| open_cards(&clock, cards().link(link), seed);
        let target = LinkModel { fence_takes: Duration::from_micros(30), ..LinkModel::p5() };
        let fabrics = [open(link, 0), open(target, 1)];
        let (to_target, _) = fabrics[0].connect_local(&fabrics[1]).unwrap();
        let source = fabrics[0].alloc(LEN, Access::LOCAL).unwrap();
        let region = fabrics[1].alloc(LEN, Access::all()).unwrap();
        let remote = to_target.import(&region.descriptor()).unwrap();
        let mut order: Vec<u32> = (0..PAGES).collect();
        fastrand::Rng::with_seed(0).shuffle(&mut order);
        let pages = Pages::new(order);
        let ops = VecDeque::new();
        Self { clock, fabrics, to_target, source, _target: region, remote, pages, ops }
    }

    /// Moves operations for `span`. Returns the gigabits per second of the pages that have arrived. (An operation has 0.27
    /// gigabits, too many to count operations.)
    fn run(&mut self, span: Duration) -> f64 {
        let arrived = |hosts: &Self| hosts.counters().iter().map(|rail| rail.completions).sum::<u64>();
        let (begun, until) = (self.clock.now(), self.clock.now().after(span));
        let before = arrived(self);
        while self.clock.now() < until {
            while self.ops.len() < UNDER_WAY {
                let pages = &self.pages;
                let op = self.to_target.write_pages(&self.source, pages, &self.remote, pages, PAGE).unwrap();
                self.ops.push_back(op);
            }
            if self.fabrics.iter().map(|fabric| fabric.step().events).sum::<usize>() == 0 {
                let due = self.fabrics.iter().map(Fabric::due).fold(until, Time::min);
                self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
            }
            self.ops.retain_mut(|op| match op.try_result() {
                None => true,
                Some(result) => {
                    assert_eq!(result.expect("no operation fails").bytes, LEN as u64);
                    false
                }
            });
        }
        let bytes = (arrived(self) - before) as f64 * PAGE as f64;
        bytes * 8.0 / self.clock.now().since(begun).as_nanos() as f64
    }

    fn counters(&self) -> Vec<RailCounters> {
        self.fabrics[0].counters()
    }
}

#[test]
fn a_lost_card_costs_a_thirty_second() {
    let lost_at = Time::ZERO.after(5 * MS);
    let mut hosts = Hosts::new(LinkModel { lose_devices_at: vec![(5, lost_at)], ..LinkModel::p5() });
    let before = hosts.run(5 * MS);
    let at_once = hosts.run(10 * MS);
    let later = hosts.run(10 * MS);
    println!("before {before:.0} Gbps, the 10 ms after the loss {at_once:.0}, later {later:.0}");
    assert!(hosts.counters()[5].replayed > 0 && hosts.counters()[5].paths_broken == 1);
    assert!(before > 0.97 * 32.0 * 97.433, "{before} Gbps with all cards");
    assert!(at_once >= 0.97 * before * 31.0 / 32.0 && later >= 0.97 * before * 31.0 / 32.0);
}

#[test]
fn a_port_that_was_down_is_used_again() {
    for path_errors_after in [None, Some(Duration::from_micros(200))] {
        let (from, until) = (Time::ZERO.after(5 * MS), Time::ZERO.after(25 * MS));
        let broken_paths = vec![BrokenPath { device: 5, peer: None, from, until }];
        let mut hosts = Hosts::new(LinkModel { broken_paths, path_errors_after, ..LinkModel::p5() });
        let before = hosts.run(5 * MS);
        let down = hosts.run(20 * MS);
        let returning = hosts.run(15 * MS);
        let mended = hosts.counters()[5].paths_mended;
        let posts = hosts.counters()[5].posts;
        let after = hosts.run(5 * MS);
        let used = hosts.counters()[5].posts - posts;
        println!("before {before:.0} Gbps, down {down:.0}, coming back {returning:.0}, after {after:.0}");
        println!("the path was used again {mended} times, for {used} requests");
        assert_eq!((mended, hosts.counters()[5].paths_broken), (1, 1));
        assert!(after >= 0.99 * before, "{after} of {before} Gbps after the card is back");
        // An even share of what has moved.
        let share = after * 5e6 / 8.0 / (PAGE as f64) / 32.0;
        assert!(used as f64 > 0.9 * share, "{used} requests of {share}");
    }
}

#[test]
fn a_slow_card_costs_what_it_is_slower() {
    let mut hosts = Hosts::new(LinkModel::p5());
    let whole = hosts.run(5 * MS);
    let mut hosts = Hosts::new(LinkModel { slow: Some((5, 10)), ..LinkModel::p5() });
    let first = hosts.run(5 * MS);
    let learnt = hosts.run(20 * MS);
    let bound = 0.95 * whole * 31.1 / 32.0;
    println!("all fast {whole:.0} Gbps; one slow: {first:.0}, then {learnt:.0}; bound {bound:.0}");
    assert!(learnt >= bound);
}

/// Keeps two operations under way for `span`, each made by `write` with its number. Returns how many have ended, all of
/// them well.
fn keep_writing(
    clock: &VirtualClock,
    fabrics: &[Fabric],
    write: impl Fn(usize) -> Op,
    span: Duration,
) -> [u32; 2] {
    let (mut ended, mut ops) = ([0, 0], [write(0), write(1)]);
    while clock.now() < Time::ZERO.after(span) {
        if fabrics.iter().map(|fabric| fabric.step().events).sum::<usize>() == 0 {
            let due = fabrics.iter().map(Fabric::due).fold(Time::NEVER, Time::min);
            clock.advance(due.since(clock.now()).max(Duration::from_nanos(1)));
        }
        for (number, op) in ops.iter_mut().enumerate() {
            if let Some(result) = op.try_result() {
                result.unwrap();
                ended[number] += 1;
                *op = write(number);
            }
        }
    }
    ended
}

/// A host with these cards, in virtual time.
fn open_cards(clock: &VirtualClock, cards: LoopbackConfig, seed: u64) -> Fabric {
    let transport = TransportConfig::new("cards", Arc::new(Loopback::with(cards)));
    let builder = FabricBuilder::new().transport(transport).clock(Arc::new(clock.clone()));
    builder.seed(seed).caller_driven().open().unwrap()
}

/// A host with one card, and one with two, whose path over the first one breaks. The host with one card learns of that
/// from the peer's fence. Its operations wait until its only path is back.
#[test]
fn the_only_path_comes_back_too() {
    let clock = VirtualClock::default();
    let open =
        |devices, link, seed| open_cards(&clock, LoopbackConfig::default().devices(devices).link(link), seed);
    let path =
        BrokenPath { device: 0, peer: None, from: Time::ZERO.after(MS), until: Time::ZERO.after(3 * MS) };
    let path_errors_after = Some(Duration::from_micros(50));
    let two = LinkModel { broken_paths: vec![path], path_errors_after, ..LinkModel::p5() };
    let fabrics = [open(1, LinkModel::p5(), 0), open(2, two, 1)];
    let (to_two, to_one) = fabrics[0].connect_local(&fabrics[1]).unwrap();
    let peers = [to_two, to_one];
    let regions = [0, 1].map(|of: usize| fabrics[of].alloc(LEN, Access::all()).unwrap());
    let remotes = [0, 1].map(|of: usize| peers[of].import(&regions[1 - of].descriptor()).unwrap());
    let write = |of: usize| peers[of].write(&regions[of], 0..1 << 20, &remotes[of], 1 << 20).unwrap();
    let ended = keep_writing(&clock, &fabrics, write, 40 * MS);
    let one = &fabrics[0].counters()[0];
    println!(
        "{ended:?} transfers; the only path broke {} times, and came back {}",
        one.paths_broken, one.paths_mended
    );
    assert!(one.paths_broken > 0 && one.paths_mended == one.paths_broken);
    assert!(ended[0] > 50 && ended[1] > 50, "{ended:?}");
}

/// A path to one peer breaks: the card still carries everything to the other one.
#[test]
fn a_broken_path_to_one_peer_leaves_the_others_alone() {
    let clock = VirtualClock::default();
    let open = |link, seed| open_cards(&clock, LoopbackConfig::default().devices(2).link(link), seed);
    let path = BrokenPath { device: 1, peer: Some(0), from: Time::ZERO.after(MS), until: Time::NEVER };
    let fabrics = [
        open(LinkModel { broken_paths: vec![path], ..LinkModel::p5() }, 0),
        open(LinkModel::p5(), 1),
        open(LinkModel::p5(), 2),
    ];
    let peers = [&fabrics[1], &fabrics[2]].map(|target| fabrics[0].connect_local(target).unwrap().0);
    let source = fabrics[0].alloc(LEN, Access::LOCAL).unwrap();
    let targets = [&fabrics[1], &fabrics[2]].map(|target| target.alloc(LEN, Access::all()).unwrap());
    let remotes = [0, 1].map(|of| peers[of].import(&targets[of].descriptor()).unwrap());
    let write = |of: usize| peers[of].write(&source, 0..LEN, &remotes[of], 0).unwrap();
    let ended = keep_writing(&clock, &fabrics, write, 60 * MS);
    let rail = &fabrics[0].counters()[1];
    println!("{ended:?} transfers, {} paths broken, {} requests replayed", rail.paths_broken, rail.replayed);
    assert_eq!(rail.paths_broken, 1);
    assert!(ended[0] > 5 && ended[1] > 5 && rail.replayed > 0);
}

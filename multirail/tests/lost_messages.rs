//! The device that carries messages is lost under way, here or at the peer: messages go over another one. No message
//! arrives twice, and none that was sent well is missing. Everything runs in virtual time.
//!
//! `MULTIRAIL_SEEDS=500 cargo test -p multirail --test lost_messages` runs more seeds. A failure names its seed, and
//! `MULTIRAIL_SEED=N` runs it alone.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{BrokenPath, LinkModel, Loopback, LoopbackConfig};
use multirail::{
    Access, Clock, ErrorKind, Fabric, FabricBuilder, Op, Peer, RecvPool, Region, SendOptions, Time,
    TransportConfig, VirtualClock,
};

const DEADLINE: Duration = Duration::from_secs(10);
/// The last messages are sent after all losses, and after the fences.
const AFTER: usize = 5;
const LATE: Duration = Duration::from_millis(1);
/// Bytes of a message: its number.
const LEN: usize = 8;

fn open(clock: &VirtualClock, devices: u32, link: LinkModel, seed: u64) -> Fabric {
    let cards = Loopback::with(LoopbackConfig::default().devices(devices).link(link));
    let transport = TransportConfig::new("cards", Arc::new(cards));
    let builder = FabricBuilder::new().transport(transport).clock(Arc::new(clock.clone()));
    builder.seed(seed).notifications(4 << 20).caller_driven().open().unwrap()
}

/// Runs one turn of all fabrics. If nothing happens, moves the clock to what happens next, but not beyond `limit`.
/// Returns false if nothing happens until then.
fn turn(clock: &VirtualClock, fabrics: &[&Fabric], limit: Time) -> bool {
    if fabrics.iter().map(|fabric| fabric.step().events).sum::<usize>() == 0 {
        let due = fabrics.iter().map(|fabric| fabric.due()).fold(limit, Time::min);
        if due >= limit {
            clock.advance(limit.since(clock.now()));
            return false;
        }
        clock.advance(due.since(clock.now()).max(Duration::from_nanos(1)));
    }
    true
}

/// Where one side's messages arrive.
enum Inbox {
    Pool(RecvPool),
    /// Receives of one message each, with the offset of its buffer.
    Receives {
        region: Region,
        posted: Vec<(usize, Op)>,
        most: usize,
    },
}

impl Inbox {
    fn new(fabric: &Fabric, random: &mut fastrand::Rng) -> Self {
        let count = random.usize(1..8);
        match random.bool() {
            true => Self::Pool(fabric.recv_pool(count, LEN).unwrap()),
            false => Self::Receives {
                region: fabric.alloc(count * LEN, Access::LOCAL).unwrap(),
                posted: Vec::new(),
                most: count,
            },
        }
    }

    /// The messages that have arrived since the last call.
    fn take(&mut self, fabric: &Fabric) -> Vec<usize> {
        let number = |bytes: &[u8]| usize::from_le_bytes(bytes.try_into().unwrap());
        match self {
            Self::Pool(pool) => std::iter::from_fn(|| pool.try_next())
                .map(|message| number(&message.unwrap().to_vec()))
                .collect(),
            Self::Receives { region, posted, most } => {
                let mut arrived = Vec::new();
                posted.retain_mut(|(at, op)| {
                    let Some(result) = op.try_result() else { return true };
                    assert_eq!(result.unwrap().bytes, LEN as u64);
                    let mut bytes = [0; LEN];
                    region.copy_out(*at, &mut bytes).unwrap();
                    arrived.push(number(&bytes));
                    false
                });
                for at in (0..*most).map(|index| index * LEN) {
                    if !posted.iter().any(|(used, _)| *used == at) {
                        posted.push((at, fabric.recv(region, at..at + LEN).unwrap()));
                    }
                }
                arrived
            }
        }
    }
}

/// One side's messages.
struct Outbox {
    region: Region,
    sent: Vec<Op>,
    count: usize,
    next_at: Time,
}

impl Outbox {
    fn new(fabric: &Fabric, count: usize) -> Self {
        let region = fabric.alloc(count * LEN, Access::LOCAL).unwrap();
        for number in 0..count {
            region.copy_in(number * LEN, &number.to_le_bytes()).unwrap();
        }
        Self { region, sent: Vec::new(), count, next_at: Time::ZERO }
    }

    /// Sends the next message, if its time has come.
    fn advance(&mut self, peer: &Peer, now: Time, random: &mut fastrand::Rng) {
        if self.sent.len() == self.count || now < self.next_at {
            return;
        }
        let at = self.sent.len() * LEN;
        let options = SendOptions::new().imm(7).deadline(DEADLINE);
        self.sent.push(peer.send_with(&self.region, at..at + LEN, &options).unwrap());
        self.next_at = now.after(Duration::from_micros(random.u64(0..20)));
        if self.sent.len() == self.count - AFTER {
            self.next_at = self.next_at.max(Time::ZERO.after(LATE));
        }
    }
}

/// Sends messages both ways while devices are lost. Returns how many sends failed.
fn run(seed: u64) -> usize {
    const COUNT: usize = 40;
    let mut random = fastrand::Rng::with_seed(seed);
    let devices = [2, 3, 4][random.usize(..3)];
    let link = LinkModel {
        send_depth: Some(random.u32(2..=16)),
        jitter: Duration::from_micros(random.u64(1..=30)),
        half_one_in: random.bool().then(|| random.u32(2..=6)),
        reorder: random.bool(),
        late_after: Duration::from_micros(random.u64(1..=300)),
        fence_takes: Duration::from_micros(random.u64(..=100)),
        ..LinkModel::p5()
    };
    let mut losses = vec![(0, Time::from_nanos(random.u64(..400_000)))];
    if devices > 2 && random.bool() {
        losses.push((1, Time::from_nanos(random.u64(..400_000))));
    }
    let lossy = LinkModel { lose_devices_at: losses, ..link.clone() };
    let links = if random.bool() { [lossy, link] } else { [link, lossy] };
    let clock = VirtualClock::default();
    let [a_link, b_link] = links;
    let fabrics = [open(&clock, devices, a_link, seed), open(&clock, devices, b_link, seed + 1)];
    let (to_b, to_a) = fabrics[0].connect_local(&fabrics[1]).unwrap();
    let peers = [to_b, to_a];
    let mut outboxes = [0, 1].map(|side: usize| Outbox::new(&fabrics[side], COUNT));
    let mut inboxes = [0, 1].map(|side: usize| Inbox::new(&fabrics[side], &mut random));
    let mut arrived = [vec![0_usize; COUNT], vec![0; COUNT]];
    let mut results = [const { Vec::new() }; 2];
    let limit = Time::ZERO.after(DEADLINE * 2);
    let mut more = true;
    // Runs on until nothing happens any more: a second copy of a message would still arrive.
    while more {
        let now = clock.now();
        for side in 0..2 {
            outboxes[side].advance(&peers[side], now, &mut random);
            inboxes[side].take(&fabrics[side]).into_iter().for_each(|number| arrived[1 - side][number] += 1);
        }
        let next = outboxes.iter().filter(|outbox| outbox.sent.len() < COUNT).map(|outbox| outbox.next_at);
        let next = next.fold(limit, Time::min).max(now);
        more = turn(&clock, &[&fabrics[0], &fabrics[1]], next) || next < limit;
    }
    for (outbox, results) in outboxes.iter_mut().zip(&mut results) {
        results.extend(outbox.sent.iter_mut().map(|op| op.try_result().expect("a send without an end")));
    }
    let mut failed = 0;
    for (results, arrived) in results.iter().zip(&arrived) {
        for (number, (result, arrived)) in results.iter().zip(arrived).enumerate() {
            match result {
                Ok(_) => assert_eq!(*arrived, 1, "message {number} was sent well"),
                Err(error) => {
                    failed += 1;
                    assert!(*arrived <= 1, "message {number} arrived {arrived} times");
                    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{number}: {error}");
                }
            }
        }
        let after = &results[COUNT - AFTER..];
        assert!(after.iter().all(Result::is_ok), "sent over another device: {after:?}");
    }
    failed
}

fn seeds() -> Range<u64> {
    let number = |name| std::env::var(name).ok().map(|value| value.parse().unwrap());
    match number("MULTIRAIL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..number("MULTIRAIL_SEEDS").unwrap_or(60) + 1,
    }
}

#[test]
fn messages_change_their_device() {
    let (mut failed, seeds) = (0, seeds());
    for seed in seeds.clone() {
        match catch_unwind(AssertUnwindSafe(|| run(seed))) {
            Ok(more) => failed += more,
            Err(panic) => {
                eprintln!("failed with MULTIRAIL_SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    let sent = (seeds.end - seeds.start) as usize * 80;
    println!("{failed} of {sent} messages ended with DeviceLost");
    // Those that were under way while others of the same device had arrived.
    assert!(failed * 10 < sent);
}

/// One of two senders loses its first device. Its messages arrive on another device than those of the other one, and a
/// receive that is posted takes a message of either.
#[test]
fn one_receive_takes_messages_of_both_devices() {
    let clock = VirtualClock::default();
    let lossy = LinkModel { lose_devices_at: vec![(0, Time::from_nanos(1000))], ..LinkModel::p5() };
    let hub = open(&clock, 2, LinkModel::p5(), 1);
    let senders = [open(&clock, 2, lossy, 2), open(&clock, 2, LinkModel::p5(), 3)];
    let peers = [0, 1].map(|number: usize| senders[number].connect_local(&hub).unwrap().0);
    let fabrics = [&hub, &senders[0], &senders[1]];
    let into = hub.alloc(LEN, Access::LOCAL).unwrap();
    let from = [0, 1].map(|number: usize| senders[number].alloc(LEN, Access::LOCAL).unwrap());
    let options = SendOptions::new().deadline(DEADLINE);
    while turn(&clock, &fabrics, Time::from_nanos(100_000)) {}
    for round in 0..20 {
        let sender = [0, 1, 1, 0][round % 4];
        from[sender].copy_in(0, &round.to_le_bytes()).unwrap();
        let mut receive = hub.recv(&into, 0..LEN).unwrap();
        let mut send = peers[sender].send_with(&from[sender], 0..LEN, &options).unwrap();
        let limit = clock.now().after(DEADLINE / 2);
        let (mut sent, mut received) = (None, None);
        while sent.is_none() || received.is_none() {
            sent = sent.or_else(|| send.try_result());
            received = received.or_else(|| receive.try_result());
            assert!(turn(&clock, &fabrics, limit) || sent.is_some() && received.is_some(), "round {round}");
        }
        assert_eq!(sent.unwrap().unwrap().bytes, LEN as u64);
        assert_eq!(received.unwrap().unwrap().bytes, LEN as u64);
        let mut bytes = [0; LEN];
        into.copy_out(0, &mut bytes).unwrap();
        assert_eq!(usize::from_le_bytes(bytes), round);
    }
}

/// As above, with a receive on each of the two devices, and two messages of one sender: both receives take one.
#[test]
fn receives_follow_the_messages() {
    let clock = VirtualClock::default();
    let lossy = LinkModel { lose_devices_at: vec![(0, Time::from_nanos(1000))], ..LinkModel::p5() };
    let hub = open(&clock, 2, LinkModel::p5(), 1);
    let senders = [open(&clock, 2, lossy, 2), open(&clock, 2, LinkModel::p5(), 3)];
    let peers = [0, 1].map(|number: usize| senders[number].connect_local(&hub).unwrap().0);
    let fabrics = [&hub, &senders[0], &senders[1]];
    let into = hub.alloc(2 * LEN, Access::LOCAL).unwrap();
    let options = SendOptions::new().deadline(DEADLINE);
    while turn(&clock, &fabrics, Time::from_nanos(100_000)) {}
    for sender in [1, 0, 0, 1, 1] {
        let from = senders[sender].alloc(LEN, Access::LOCAL).unwrap();
        let receives = [0, LEN].map(|at| hub.recv(&into, at..at + LEN).unwrap());
        let sends = [(); 2].map(|()| peers[sender].send_with(&from, 0..LEN, &options).unwrap());
        let mut ops: Vec<_> = receives.into_iter().chain(sends).map(|op| (op, false)).collect();
        let limit = clock.now().after(DEADLINE / 2);
        while ops.iter().any(|(_, is_over)| !is_over) {
            for (op, is_over) in ops.iter_mut().filter(|(_, is_over)| !is_over) {
                *is_over = op.try_result().is_some_and(|result| result.unwrap().bytes == LEN as u64);
            }
            let more = turn(&clock, &fabrics, limit);
            assert!(more || ops.iter().all(|(_, is_over)| *is_over), "messages of sender {sender} wait");
        }
    }
}

/// Notifications go over messages of their own: they outlive the first device, too.
#[test]
fn notifications_change_their_device() {
    for loses in [0, 1] {
        let clock = VirtualClock::default();
        let lossy = LinkModel { lose_devices_at: vec![(0, Time::from_nanos(30_000))], ..LinkModel::p5() };
        let links = if loses == 0 { [lossy, LinkModel::p5()] } else { [LinkModel::p5(), lossy] };
        let [a_link, b_link] = links;
        let (a, b) = (open(&clock, 4, a_link, 1), open(&clock, 4, b_link, 2));
        let to_b = a.connect_local(&b).unwrap().0;
        let mut arriving = b.notifications().unwrap();
        let mut taken = Vec::new();
        for number in 0..100_u32 {
            let mut op = to_b.notify(&number.to_le_bytes()).unwrap();
            let limit = clock.now().after(DEADLINE);
            let result = loop {
                if let Some(result) = op.try_result() {
                    break result;
                }
                assert!(turn(&clock, &[&a, &b], limit), "{number}");
            };
            assert!(result.is_ok(), "{number}: {result:?}");
            taken.extend(std::iter::from_fn(|| arriving.try_next()).map(|it| it.unwrap().bytes.to_vec()));
        }
        while turn(&clock, &[&a, &b], clock.now().after(Duration::from_millis(1))) {}
        taken.extend(std::iter::from_fn(|| arriving.try_next()).map(|it| it.unwrap().bytes.to_vec()));
        assert_eq!(taken, (0..100_u32).map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>());
    }
}

/// Sends messages from `a` to `b`, one after another: each send succeeds, and each message arrives once.
fn all_messages_arrive(clock: &VirtualClock, a: &Fabric, b: &Fabric, count: usize) {
    let to_b = a.connect_local(b).unwrap().0;
    let (from, pool) = (a.alloc(LEN, Access::LOCAL).unwrap(), b.recv_pool(4, LEN).unwrap());
    let taken = || std::iter::from_fn(|| pool.try_next()).map(Result::unwrap).count();
    let options = SendOptions::new().deadline(DEADLINE);
    let mut arrived = 0;
    for number in 0..count {
        let mut op = to_b.send_with(&from, 0..LEN, &options).unwrap();
        let limit = clock.now().after(DEADLINE);
        let result = loop {
            arrived += taken();
            if let Some(result) = op.try_result() {
                break result;
            }
            assert!(turn(clock, &[a, b], limit), "{number}");
        };
        assert!(result.is_ok(), "{number}: {result:?}");
    }
    while turn(clock, &[a, b], clock.now().after(Duration::from_millis(1))) {
        arrived += taken();
    }
    assert_eq!(arrived, count);
}

/// Fabrics that have lost devices before connect over the others: messages, notifications, writes and reads work. If no
/// pair of devices is left, they do not connect.
#[test]
fn fabrics_connect_after_losses() {
    // The devices of each side, and those that it loses.
    let cases: [[(u32, &[u32]); 2]; 9] = [
        [(2, &[0]), (2, &[])],
        [(2, &[]), (2, &[0])],
        [(4, &[0]), (4, &[1])],
        [(4, &[0, 1]), (4, &[2])],
        [(2, &[0]), (4, &[3])],
        [(2, &[0]), (1, &[])],
        [(1, &[]), (2, &[0])],
        [(4, &[1]), (2, &[])],
        [(3, &[0, 1]), (3, &[2])],
    ];
    for case in cases {
        let clock = VirtualClock::default();
        let [a, b] = case.map(|(devices, lost)| {
            let lose_devices_at = lost.iter().map(|device| (*device, Time::from_nanos(1000))).collect();
            open(&clock, devices, LinkModel { lose_devices_at, ..LinkModel::p5() }, devices.into())
        });
        while turn(&clock, &[&a, &b], Time::from_nanos(100_000)) {}
        if case[0].0 == 3 {
            let error = a.connect_local(&b).err().unwrap();
            assert!(
                error.kind() == ErrorKind::Unreachable && error.to_string().contains("works at both ends")
            );
            continue;
        }
        all_messages_arrive(&clock, &a, &b, 10);
        all_messages_arrive(&clock, &b, &a, 10);
        let (to_b, to_a) = a.connect_local(&b).unwrap();
        let [local, target] = [&a, &b].map(|fabric| fabric.alloc(1 << 20, Access::all()).unwrap());
        let random: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(1 << 20).collect();
        local.copy_in(0, &random).unwrap();
        let (there, here) =
            (to_b.import(&target.descriptor()).unwrap(), to_a.import(&local.descriptor()).unwrap());
        let half = 1 << 19;
        let wait = |mut op: Op| {
            let limit = clock.now().after(DEADLINE);
            let result = loop {
                if let Some(result) = op.try_result() {
                    break result;
                }
                assert!(turn(&clock, &[&a, &b], limit), "{case:?}");
            };
            result.unwrap_or_else(|error| panic!("{case:?}: {error}"));
        };
        wait(to_b.write(&local, 0..half, &there, 0).unwrap());
        wait(to_a.read(&target, half..2 * half, &here, half).unwrap());
        let mut arrived = vec![0; random.len()];
        target.copy_out(0, &mut arrived).unwrap();
        assert!(arrived == random, "{case:?}");
        // Notifications have the first two devices only.
        if [0, 1].iter().all(|device| case.iter().any(|(_, lost)| lost.contains(device))) {
            assert!(
                to_b.notify(b"there").is_err_and(|error| error.to_string().contains("works at both ends"))
            );
            continue;
        }
        let mut notifications = [&a, &b].map(|fabric| fabric.notifications().unwrap());
        wait(to_b.notify(b"there").unwrap());
        wait(to_a.notify(b"back").unwrap());
        while turn(&clock, &[&a, &b], clock.now().after(Duration::from_millis(1))) {}
        let arrived = notifications.each_mut().map(|it| it.try_next().unwrap().unwrap().bytes.to_vec());
        assert_eq!(arrived, [&b"back"[..], b"there"], "{case:?}");
    }
}

/// The path breaks first, and a device at its end is lost while nothing is settled: both sides learn that it does not
/// come back.
#[test]
fn a_device_is_lost_behind_a_broken_path() {
    for loses in [0, 1] {
        let clock = VirtualClock::default();
        let path = BrokenPath { device: 0, peer: None, from: Time::from_nanos(20_000), until: Time::NEVER };
        let errors = Some(Duration::from_micros(1));
        let mut links =
            [0, 1].map(|_| LinkModel { fence_takes: Duration::from_millis(1), ..LinkModel::p5() });
        links[0].broken_paths = vec![path];
        links[0].path_errors_after = errors;
        links[loses].lose_devices_at = vec![(0, Time::from_nanos(200_000))];
        let [a_link, b_link] = links;
        let (a, b) = (open(&clock, 2, a_link, 1), open(&clock, 2, b_link, 2));
        all_messages_arrive(&clock, &a, &b, 20);
    }
}

/// The path over the first device is broken for a while, and the device works: messages wait for it.
#[test]
fn messages_wait_for_a_path_that_comes_back() {
    let clock = VirtualClock::default();
    let path = BrokenPath {
        device: 0,
        peer: None,
        from: Time::from_nanos(50_000),
        until: Time::ZERO.after(Duration::from_millis(100)),
    };
    let errors = Some(Duration::from_micros(50));
    let link = LinkModel { broken_paths: vec![path], path_errors_after: errors, ..LinkModel::p5() };
    let (a, b) = (open(&clock, 2, link, 1), open(&clock, 2, LinkModel::p5(), 2));
    all_messages_arrive(&clock, &a, &b, 30);
    assert!(clock.now() > path.until);
}

//! A `select!` drops a write. After the cancel or the drain no late byte lands.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use multirail::{Access, Fabric, Op, Peer, Region, RemoteRegion, Result};

use crate::{PAGE, TestDevices, TestPage, differing, limited, outlast, strict};

const SEEDS: std::ops::Range<u64> = 0..4;
/// The number of rounds of each seed.
const ROUNDS: u64 = 12;

/// A future that is ready after this many polls. It wakes itself for each.
struct Polls(u32);

impl Future for Polls {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.0 == 0 {
            return Poll::Ready(());
        }
        self.0 -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// An initiator and a target with a page each.
struct PagePair {
    fabric: Fabric,
    _target: (Fabric, Region),
    peer: Peer,
    src: TestPage,
    dst: TestPage,
    remote: RemoteRegion,
    probe: RemoteRegion,
    random: fastrand::Rng,
    /// The number of dropped writes.
    dropped: u64,
}

impl PagePair {
    fn new(seed: u64) -> Result<Self> {
        let (fabric, target) = (TestDevices::Late.open(seed)?, TestDevices::Late.open(seed + 1000)?);
        let (peer, _) = fabric.connect_local(&target)?;
        let (src, dst) =
            (TestPage::new(&fabric, Access::LOCAL, 1)?, TestPage::new(&target, Access::all(), 2)?);
        let remote = peer.import(&dst.region.descriptor())?;
        let probed = target.alloc(64, Access::all())?;
        let probe = peer.import(&probed.descriptor())?;
        let random = fastrand::Rng::with_seed(seed);
        Ok(Self { fabric, _target: (target, probed), peer, src, dst, remote, probe, random, dropped: 0 })
    }

    fn write(&self) -> Result<Op> {
        self.peer.write(&self.src.region, 0..PAGE, &self.remote, 0)
    }

    /// A random number of polls, against which the write may win or lose.
    fn polls(&mut self) -> Polls {
        Polls(self.random.u32(0..3000))
    }

    /// Fills both pages with new content and checks it: outstanding bytes would show.
    async fn reuse(&mut self, round: u64) -> Result<()> {
        self.src.fill(100 + round)?;
        self.dst.fill(200 + round)?;
        outlast(&self.peer, &self.src.region, &self.probe).await?;
        assert_eq!((self.dst.wrong_bytes(), self.src.wrong_bytes()), (0, 0), "late bytes in round {round}");
        Ok(())
    }
}

/// Runs `race` in every round, then waits with `quiet` until all operations are over.
async fn rounds<O>(
    seed: u64,
    race: impl AsyncFn(Op, Polls) -> Option<O>,
    quiet: impl AsyncFn(&Peer, O) -> Result<()>,
) -> Result<()> {
    let mut pair = PagePair::new(seed)?;
    for round in 0..ROUNDS {
        // A race that the write sometimes loses, on any machine.
        let turns = if round % 4 == 0 { Polls(0) } else { pair.polls() };
        let op = pair.write()?;
        if let Some(lost) = race(op, turns).await {
            pair.dropped += 1;
            quiet(&pair.peer, lost).await?;
        }
        pair.reuse(round).await?;
    }
    assert!(pair.dropped >= ROUNDS / 4);
    Ok(())
}

async fn drained(peer: &Peer, (): ()) -> Result<()> {
    peer.drain()?.await
}

async fn cancelled(_: &Peer, op: Op) -> Result<()> {
    let _ = op.cancel().await;
    Ok(())
}

#[test]
fn tokio_select_drops_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let race = async |op: Op, turns: Polls| {
        tokio::select! {
            biased;
            () = turns => Some(()),
            written = op => written.map_or_else(|error| panic!("{error}"), |_| None),
        }
    };
    SEEDS.for_each(|seed| runtime.block_on(limited(rounds(seed, race, drained))).unwrap());
}

#[test]
fn tokio_select_keeps_it_for_a_cancel() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let race = async |mut op: Op, turns: Polls| {
        tokio::select! {
            biased;
            () = turns => Some(op),
            written = &mut op => written.map_or_else(|error| panic!("{error}"), |_| None),
        }
    };
    SEEDS.for_each(|seed| runtime.block_on(limited(rounds(seed, race, cancelled))).unwrap());
}

#[test]
fn futures_select_drops_it() {
    let race = async |op: Op, turns: Polls| {
        let (mut op, mut turns) = (op.fuse(), turns.fuse());
        futures::select_biased! {
            () = turns => Some(()),
            written = op => written.map_or_else(|error| panic!("{error}"), |_| None),
        }
    };
    SEEDS.for_each(|seed| futures::executor::block_on(limited(rounds(seed, race, drained))).unwrap());
}

#[test]
fn smol_or_drops_it() {
    let race = async |op: Op, turns: Polls| {
        let late = async { (turns.await, Some(())).1 };
        let written = async { op.await.map_or_else(|error| panic!("{error}"), |_| None) };
        smol::future::or(late, written).await
    };
    SEEDS.for_each(|seed| smol::block_on(limited(rounds(seed, race, drained))).unwrap());
}

/// A task is aborted while it awaits its write. No other task has the operation.
#[test]
fn an_aborted_task_drops_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let race = async |op: Op, turns: Polls| {
        let task = tokio::spawn(op);
        turns.await;
        task.abort();
        task.await.is_err().then_some(())
    };
    SEEDS.for_each(|seed| runtime.block_on(limited(rounds(seed, race, drained))).unwrap());
}

/// Checks that the rounds above show something: on this link, posted bytes land after the drop until the drain is over,
/// over any content of the page.
#[test]
fn without_waiting_late_bytes_land() {
    let posts = |fabric: &Fabric| fabric.counters().iter().map(|rail| rail.posts).sum::<u64>();
    let late = async {
        let (mut hit, mut limit) = (0, limit::Limit::of(crate::LIMIT));
        for seed in 0.. {
            if hit > 0 && seed >= 20 || limit.is_over() {
                break;
            }
            let mut pair = PagePair::new(seed)?;
            let before = posts(&pair.fabric);
            let op = pair.write()?;
            while posts(&pair.fabric) == before {
                Polls(1).await;
            }
            drop(op);
            pair.dst.fill(5)?;
            pair.peer.drain()?.await?;
            // On a busy machine the bytes may land before this thread has filled the page, or meanwhile: then they do
            // not cover it, and the round shows nothing. Others follow until one does. No byte comes from elsewhere, so
            // each is of one of the two.
            let (not_posted, not_filled) = (differing(&pair.dst.region, 1), pair.dst.wrong_bytes());
            assert!(not_posted + not_filled <= PAGE, "bytes that nobody wrote");
            hit += u32::from(not_posted == 0);
        }
        Ok::<_, multirail::Error>(hit)
    };
    assert!(strict::run(late).unwrap() > 0);
}

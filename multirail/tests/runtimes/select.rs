//! A `select!` drops a write: once the cancel or the drain is over, no late byte lands.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use multirail::{Access, Fabric, Op, Peer, Region, RemoteRegion, Result};

use crate::device::{Device, limited, outlast};
use crate::page::{PAGE, Page, differing};
use crate::strict;

const SEEDS: std::ops::Range<u64> = 0..4;
/// Rounds of each seed.
const ROUNDS: u64 = 12;

/// Ready after so many polls, each of which it asks for itself.
struct Turns(u32);

impl Future for Turns {
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

/// An initiator, its target, and the page of each.
struct Pair {
    fabric: Fabric,
    _target: (Fabric, Region),
    peer: Peer,
    src: Page,
    dst: Page,
    remote: RemoteRegion,
    probe: RemoteRegion,
    random: fastrand::Rng,
    /// Writes that lost.
    dropped: u64,
}

impl Pair {
    fn new(seed: u64) -> Result<Self> {
        let (fabric, target) = (Device::Late.open(seed)?, Device::Late.open(seed + 1000)?);
        let (peer, _) = fabric.connect_local(&target)?;
        let (src, dst) = (Page::new(&fabric, Access::LOCAL, 1)?, Page::new(&target, Access::all(), 2)?);
        let remote = peer.import(&dst.region.descriptor())?;
        let probed = target.alloc(64, Access::all())?;
        let probe = peer.import(&probed.descriptor())?;
        let random = fastrand::Rng::with_seed(seed);
        Ok(Self { fabric, _target: (target, probed), peer, src, dst, remote, probe, random, dropped: 0 })
    }

    fn write(&self) -> Result<Op> {
        self.peer.write(&self.src.region, 0..PAGE, &self.remote, 0)
    }

    /// As many as the write may lose against, or win.
    fn turns(&mut self) -> Turns {
        Turns(self.random.u32(0..3000))
    }

    /// Both memories get new content. What is still under way shows.
    async fn reuse(&mut self, round: u64) -> Result<()> {
        self.src.fill(100 + round)?;
        self.dst.fill(200 + round)?;
        outlast(&self.peer, &self.src.region, &self.probe).await?;
        assert_eq!((self.dst.strays(), self.src.strays()), (0, 0), "late bytes in round {round}");
        Ok(())
    }
}

/// Runs `race` in every round, then asks `quiet` for the moment when all is over.
async fn rounds<O>(
    seed: u64,
    race: impl AsyncFn(Op, Turns) -> Option<O>,
    quiet: impl AsyncFn(&Peer, O) -> Result<()>,
) -> Result<()> {
    let mut pair = Pair::new(seed)?;
    for round in 0..ROUNDS {
        // One that certainly loses now and then, whatever the machine is busy with.
        let turns = if round % 4 == 0 { Turns(0) } else { pair.turns() };
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
    let race = async |op: Op, turns: Turns| {
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
    let race = async |mut op: Op, turns: Turns| {
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
    let race = async |op: Op, turns: Turns| {
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
    let race = async |op: Op, turns: Turns| {
        let late = async { (turns.await, Some(())).1 };
        let written = async { op.await.map_or_else(|error| panic!("{error}"), |_| None) };
        smol::future::or(late, written).await
    };
    SEEDS.for_each(|seed| smol::block_on(limited(rounds(seed, race, drained))).unwrap());
}

/// A task is aborted while it awaits its write; nobody else has the operation.
#[test]
fn an_aborted_task_drops_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let race = async |op: Op, turns: Turns| {
        let task = tokio::spawn(op);
        turns.await;
        task.abort();
        task.await.is_err().then_some(())
    };
    SEEDS.for_each(|seed| runtime.block_on(limited(rounds(seed, race, drained))).unwrap());
}

/// That the rounds above show anything: on this link, what is posted lands after the
/// drop, on whatever the page holds by then, until the drain is over.
#[test]
fn without_waiting_late_bytes_land() {
    let posts = |fabric: &Fabric| fabric.counters().iter().map(|rail| rail.posts).sum::<u64>();
    let late = async {
        let mut hit = 0;
        for seed in 0..20 {
            let mut pair = Pair::new(seed)?;
            let before = posts(&pair.fabric);
            let op = pair.write()?;
            while posts(&pair.fabric) == before {
                Turns(1).await;
            }
            drop(op);
            pair.dst.fill(5)?;
            pair.peer.drain()?.await?;
            hit += u32::from(pair.dst.strays() > 0);
            assert!(
                pair.dst.strays() == 0 || differing(&pair.dst.region, 1) == 0,
                "a part of what is posted"
            );
        }
        Ok::<_, multirail::Error>(hit)
    };
    assert!(strict::run(late).unwrap() > 0);
}

//! Operations as futures: any executor, exact wakes, blocking waits.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::Duration;

use transport_core::spi::Operations;
use transport_core::{Access, ErrorKind, Op, WriteOptions, wait};

use crate::check::{Failure, Verdict, ensure, refused, same};
use crate::ground::{Ground, OPEN};
use crate::lab::{Lab, Options, Pair};
use crate::subject::Variant;
use crate::trial::{ALL_PATHS, Context, Trial};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("futures::wait_drives", wait_drives).on(&[
        Variant::Plain,
        Variant::Queued,
        Variant::SmallQueue,
    ]),
    Trial::new("futures::any_wait_drives", any_wait_drives).on(ALL_PATHS).needs(Operations::WRITE_IMM),
    Trial::new("futures::wait_gives_up_and_may_go_on", wait_gives_up).on(&[Variant::Slow]),
    Trial::new("futures::wakes_the_last_waker", wakes_the_last_waker).on(&[Variant::Slow]),
    Trial::new("futures::result_is_handed_out_once", handed_out_once).on(ALL_PATHS),
    Trial::new("futures::detached_goes_on", detached_goes_on).on(ALL_PATHS),
];

/// Counts how often it was woken.
#[derive(Default)]
pub(super) struct Wakes(AtomicUsize);

impl Wakes {
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) fn counting_waker() -> (Arc<Wakes>, Waker) {
    let wakes = Arc::new(Wakes::default());
    (wakes.clone(), Waker::from(wakes))
}

/// Two fabrics for whose devices time passes while somebody waits.
fn ticking(context: &Context) -> Verdict<Pair> {
    let options = Options { ticking: true, ..Options::default() };
    Lab::new(context).pair_of(&options, &options)
}

/// A blocking wait on a caller-driven fabric needs nobody else.
fn wait_drives(context: &Context) -> Verdict {
    const fn sendable<T: Send + 'static>() {}
    sendable::<Op>();
    let pair = ticking(context)?;
    let src = Ground::new(&pair.a, 2_000_000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 2_000_000, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    for size in [10, 10_000, 1_900_000] {
        let outcome = pair.to_b.write(&src.region, 0..size, &remote, 1)?.wait(limit::HANG)?;
        same("bytes", outcome.bytes, size as u64)?;
        dst.expect_from(1, &src, 0..size);
        dst.check("waited for")?;
    }
    Ok(())
}

/// So does the one that takes any future, for every fabric that the future looks to.
fn any_wait_drives(context: &Context) -> Verdict {
    const LIMIT: Duration = limit::HANG;
    let pair = ticking(context)?;
    let src = Ground::new(&pair.a, 300_000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 300_000, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let never = wait(pair.to_a.imm(9).expect(1), Duration::from_millis(1));
    refused("an imm that nobody sends", never, &[ErrorKind::DeadlineExceeded])?;
    (0..3).try_for_each(|imm| {
        let options = WriteOptions::new().imm(imm);
        let arrives = pair.to_a.imm(imm).expect(1);
        let write = pair.to_b.write_with(&src.region, 0..300_000, &remote, 0, &options)?;
        let both = async { Ok::<_, transport_core::Error>((write.await?, arrives.await?)) };
        same("bytes", wait(both, LIMIT)??.0.bytes, 300_000)
    })?;
    dst.expect_from(0, &src, 0..300_000);
    dst.check("waited for")
}

fn wait_gives_up(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 4096, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    refused("a short wait", op.wait(Duration::from_millis(1)), &[ErrorKind::DeadlineExceeded])?;
    dst.check("before the latency is over")?;
    pair.lab.result(&mut op)??;
    dst.expect_from(0, &src, 0..4096);
    dst.check("after it")
}

fn wakes_the_last_waker(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, 4096, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = std::pin::pin!(pair.to_b.write(&src.region, 0..4096, &remote, 0)?);
    let ((early, first), (late, second)) = (counting_waker(), counting_waker());
    ensure(op.as_mut().poll(&mut Task::from_waker(&first)).is_pending(), "ready at once")?;
    ensure(op.as_mut().poll(&mut Task::from_waker(&second)).is_pending(), "ready at once")?;
    pair.lab.settle()?;
    same("wakes of the task that left", early.count(), 0)?;
    ensure(late.count() > 0, "the waiting task was not woken")?;
    match op.as_mut().poll(&mut Task::from_waker(&second)) {
        Poll::Ready(outcome) => same("bytes", outcome?.bytes, 4096),
        Poll::Pending => Err(Failure::new("pending after it was woken")),
    }
}

fn handed_out_once(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 4096, Access::LOCAL, context.seed)?;
    let dst = Ground::new(&pair.b, 4096, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    let mut op = pair.to_b.write(&src.region, 0..4096, &remote, 0)?;
    pair.lab.result(&mut op)??;
    ensure(op.try_result().is_none(), "a second result")?;
    refused("a second wait", op.wait(Duration::from_millis(5)), &[ErrorKind::Closed])?;
    refused("a second poll", pollster::block_on(op), &[ErrorKind::Closed]).map(drop)
}

fn detached_goes_on(context: &Context) -> Verdict {
    let pair = Pair::new(context)?;
    let src = Ground::new(&pair.a, 700_000, Access::LOCAL, context.seed)?;
    let mut dst = Ground::new(&pair.b, 700_000, OPEN, context.seed + 1)?;
    let remote = dst.import(&pair.to_b)?;
    pair.to_b.write(&src.region, 0..600_000, &remote, 50_000)?.detach();
    dst.expect_from(50_000, &src, 0..600_000);
    // Neither region nor operation has an owner here any more.
    drop((src, remote));
    pair.lab.settle()?;
    dst.check("a detached write")
}

//! Cleanup: fabrics and peers leave no thread, no descriptor and no late byte, and idle fabrics use no CPU time.

use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use limit::Limit;
use rustix::process::Signal;
use transport_core::spi::Operations;
use transport_core::{ErrorKind, HostBuffer, Memory, Op};

use crate::backend_under_test::{TransferSide, Variant};
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{ConnectedPair, HelperProcess, LIMIT, default_fabric, worker_fabric};
use crate::trial::{Trial, TrialContext, TrialFabric};

const PATHS: &[Variant] = &[Variant::Plain, Variant::Queued, Variant::Slow];

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("cleanup::no_thread_or_descriptor_left", nothing_left).process(),
    Trial::new("cleanup::peers_leave_nothing", peers_leave_nothing).process(),
    Trial::new("cleanup::dropped_memory_is_released", dropped_memory).process(),
    Trial::new("cleanup::closing_drains", closing_drains).on(PATHS).process(),
    Trial::new("cleanup::dropping_drains", dropping_drains).on(PATHS).process(),
    Trial::new("cleanup::idle_costs_nothing", idle).process(),
    Trial::new("cleanup::any_executor_and_thread", any_executor)
        .on(&[Variant::Plain, Variant::Queued])
        .needs(Operations::WRITE_IMM)
        .process(),
];

/// Two fabrics connect, work and close in one helper. Afterwards the helper holds the same resources as before.
fn nothing_left(context: &TrialContext) -> TestResult {
    let fabric = worker_fabric(context)?;
    let near = CheckedRegion::new(&fabric, 1 << 20, FULL_ACCESS, 1)?;
    fabric.publish("near", &near.region)?;
    let listener = within(LIMIT, "listen", fabric.listen("127.0.0.1:0"))??;
    let mut helper = HelperProcess::spawn_idle(context)?;
    let before = helper.resource_usage()?;
    for round in 0..4 {
        helper.command("open")?;
        helper.command(&format!("alloc far {} 2", 1 << 20))?;
        helper.command("listen")?;
        helper.command(&format!("connect {}", listener.local_addr()))?;
        helper.command("write far 0 1000000 near 0 7")?;
        helper.command("read far 0 1000000 near 0")?;
        helper.command("receive far 0 100")?;
        helper.command("close")?;
        // A joined thread may stay in /proc for a moment, because the kernel wakes the joining thread first. And a
        // separate thread releases memory that GPUs use, after it has waited for them.
        let mut limit = Limit::of(LIMIT);
        let after = loop {
            let usage = helper.resource_usage()?;
            let is_as_before = (usage.threads, usage.files) == (before.threads, before.files);
            if is_as_before || limit.is_over() {
                break usage;
            }
        };
        let left = format!("round {round}: threads and descriptors of a helper that closed its fabric");
        ensure_eq(&left, (after.threads, after.files), (before.threads, before.files))?;
    }
    Ok(())
}

/// Peers that connect and disconnect leave no resources in a fabric that stays open.
fn peers_leave_nothing(context: &TrialContext) -> TestResult {
    // Each peer is a fabric, and to open a fabric of 32 devices takes long.
    let peers = if context.backend.rails() < 32 { 50 } else { 30 };
    // What the first connection starts stays: per rail, a server and its sockets. Idle helper threads stay for
    // some seconds too, but only a few, for any number of peers.
    const KEPT: usize = 25;
    ensure(peers > KEPT, "too few peers: a leak of one resource per peer would not show")?;
    let mut helper = HelperProcess::spawn(context)?;
    let address = helper.command("listen")?;
    let before = helper.resource_usage()?;
    for _ in 0..peers {
        let fabric = worker_fabric(context)?;
        let near = CheckedRegion::new(&fabric, 1 << 16, FULL_ACCESS, 1)?;
        fabric.publish("near", &near.region)?;
        let peer = helper.connect(&fabric, &address)?;
        helper.command("alloc far 65536 2")?;
        helper.command("write far 0 65536 near 0 7")?;
        peer.imm(7).expect(1).wait(LIMIT)?;
        fabric.close();
        helper.command("wait-closed")?;
        helper.command("free far")?;
    }
    // The backend releases the last resources of a peer soon after it has reported the close, not at once.
    let mut limit = Limit::of(LIMIT);
    loop {
        let now = helper.resource_usage()?;
        if now.threads <= before.threads + KEPT && now.files <= before.files + KEPT {
            return Ok(());
        }
        ensure(!limit.is_over(), format!("{now:?} after {peers} peers, {before:?} before them"))?;
        std::thread::yield_now();
    }
}

/// Memory that reports its release, and that stays mapped for good.
struct Owned {
    buffer: ManuallyDrop<HostBuffer>,
    released: Sender<()>,
}

// SAFETY: the buffer's.
unsafe impl Memory for Owned {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.buffer.shared_file()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.released.send(());
    }
}

/// Counts the pages whose last byte is not zero any more.
fn landed(start: *mut u8, len: usize) -> usize {
    let last = (4095..len).step_by(4096);
    // SAFETY: within memory that is never unmapped; peers may write to it at the same time.
    last.filter(|at| unsafe { AtomicU8::from_ptr(start.add(*at)) }.load(Ordering::Relaxed) != 0).count()
}

/// This side drops a region while a stopped peer is in the middle of a write to it. Once the owner has the memory back,
/// no further byte lands there, though the peer continues.
fn dropped_memory(context: &TrialContext) -> TestResult {
    const LEN: usize = 64 << 20;
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    let (released, release) = channel();
    let memory = Arc::new(Owned { buffer: ManuallyDrop::new(HostBuffer::new(LEN)?), released });
    let start = memory.as_ptr();
    // SAFETY: nobody else uses the memory, which is never unmapped.
    let region = unsafe { fabric.register(memory, FULL_ACCESS) }?;
    fabric.publish("near", &region)?;
    helper.command(&format!("alloc far {LEN} 2"))?;
    helper.start(&format!("write far 0 {LEN} near 0 -"))?;
    let mut limit = Limit::of(LIMIT);
    while landed(start, LEN) == 0 {
        ensure(!limit.is_over(), "nothing of the write lands")?;
    }
    helper.signal(Signal::STOP)?;
    fabric.unpublish("near");
    drop(region);
    let mut before = None;
    let mut look_on = |span| {
        let mut span = Limit::of(span);
        while !span.is_over() {
            if before.is_none() && release.try_recv().is_ok() {
                before = Some(landed(start, LEN));
            }
        }
    };
    // This side still receives the bytes that sockets hold; then the peer goes on. The trial can only wait to see that
    // no further byte comes.
    look_on(Duration::from_millis(50));
    helper.signal(Signal::CONT)?;
    look_on(Duration::from_millis(200));
    drop(peer);
    fabric.close();
    drop(fabric);
    if before.is_none() {
        ensure(release.recv_timeout(LIMIT).is_ok(), "the memory is never released")?;
        before = Some(landed(start, LEN));
    }
    drop(helper);
    ensure_eq("pages with bytes, now and when the memory was released", Some(landed(start, LEN)), before)
}

/// Ends a fabric with outstanding operations. Afterwards no byte moves.
fn drains(context: &TrialContext, end: impl FnOnce(TrialFabric)) -> TestResult {
    let ConnectedPair { fabric, peer, mut helper } = ConnectedPair::new(context)?;
    helper.command(&format!("alloc far {} 1", 8 << 20))?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let src = CheckedRegion::new(&fabric, 8 << 20, FULL_ACCESS, 2)?;
    let ops: Result<Vec<Op>, _> = (0..20).map(|_| peer.write(&src.region, 0..8 << 20, &remote, 0)).collect();
    drop((src, peer, remote));
    // No deadline of an operation comes before the limit of the whole trial.
    end(fabric);
    for mut op in ops? {
        let result = op
            .try_result()
            .ok_or_else(|| TrialFailure::new("an operation has no result although its fabric is closed"))?;
        if let Err(error) = result {
            // The close of this side may have ended the peer's side first.
            ensure_err::<()>("an operation", Err(error), &[ErrorKind::Closed, ErrorKind::PeerDied])?;
        }
    }
    helper.command("fill far 3")?;
    helper.command("wait-closed")?;
    // Late bytes would show only after a wait.
    std::thread::sleep(Duration::from_millis(100));
    helper.command("check-all far").map(drop)
}

fn closing_drains(context: &TrialContext) -> TestResult {
    drains(context, |fabric| fabric.close())
}

fn dropping_drains(context: &TrialContext) -> TestResult {
    drains(context, drop)
}

/// An idle fabric with a connected peer uses less than one percent of a core.
fn idle(context: &TrialContext) -> TestResult {
    const SPAN: Duration = Duration::from_secs(1);
    let fabric = default_fabric(context)?;
    let mut helper = HelperProcess::spawn_idle(context)?;
    helper.command("open-default")?;
    let address = helper.command("listen")?;
    let peer = helper.connect(&fabric, &address)?;
    helper.command("alloc far 4096 1")?;
    let src = CheckedRegion::new(&fabric, 4096, FULL_ACCESS, 2)?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    // The fabric has worked before, so that its workers have gone from polling to sleeping.
    peer.write(&src.region, 0..4096, &remote, 0)?.wait(LIMIT)?;
    std::thread::sleep(Duration::from_millis(200));
    // Other work on the machine can only add CPU time, such as by cold caches. So one span within the limit is enough.
    let mut least = SPAN;
    for _ in 0..3 {
        let before = helper.resource_usage()?;
        std::thread::sleep(SPAN);
        least = least.min(helper.resource_usage()?.cpu_time - before.cpu_time);
        if least < SPAN / 100 {
            return Ok(());
        }
    }
    Err(TrialFailure::new(format!("an idle fabric used {least:?} of CPU time in {SPAN:?}")))
}

/// A foreign executor and several threads wait for operations at the same time.
fn any_executor(context: &TrialContext) -> TestResult {
    let (a, b) = (worker_fabric(context)?, worker_fabric(context)?.on_side(TransferSide::Target));
    let (to_b, to_a) = a.connect_local(&b)?;
    let src = CheckedRegion::new(&a, 1 << 20, FULL_ACCESS, 1)?;
    let mut dst = CheckedRegion::new(&b, 8 << 20, FULL_ACCESS, 2)?;
    let remote = dst.import(&to_b)?;
    let results: Vec<TestResult> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|part: usize| {
                let (to_b, src, remote) = (&to_b, &src, &remote);
                scope.spawn(move || -> TestResult {
                    for turn in 0..40 {
                        let (at, len) = (part << 20, [17, 4096, 100_000, 1 << 20][turn % 4]);
                        let op = to_b.write(&src.region, 0..len, remote, at)?;
                        pollster::block_on(op)?;
                        to_b.write_imm(part as u32)?.wait(LIMIT)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, TestResult>| {
            thread.join().unwrap_or_else(|_| Err(TrialFailure::new("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    results.into_iter().collect::<TestResult>()?;
    for part in 0..8 {
        dst.expect_from(part << 20, &src, 0..1 << 20);
        to_a.imm(part as u32).expect(40).wait(LIMIT)?;
    }
    dst.check("320 writes of eight threads")
}

//! What is left behind: no thread, no descriptor, no late byte, no use of the processor.

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

use crate::check::{Failure, Verdict, ensure, refused, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN};
use crate::process::{Child, LIMIT, Meeting, live, patient};
use crate::subject::{Side, Variant};
use crate::trial::{Context, Trial};

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

/// Two fabrics meet, work and close in one helper; then it holds what it held before.
fn nothing_left(context: &Context) -> Verdict {
    let fabric = live(context)?;
    let near = Ground::new(&fabric, 1 << 20, OPEN, 1)?;
    fabric.publish("near", &near.region)?;
    let listener = within(LIMIT, "listen", fabric.listen("127.0.0.1:0"))??;
    let mut child = Child::spawn_idle(context)?;
    let before = child.census()?;
    for round in 0..4 {
        child.ask("open")?;
        child.ask(&format!("alloc far {} 2", 1 << 20))?;
        child.ask("listen")?;
        child.ask(&format!("connect {}", listener.local_addr()))?;
        child.ask("write far 0 1000000 near 0 7")?;
        child.ask("read far 0 1000000 near 0")?;
        child.ask("receive far 0 100")?;
        child.ask("close")?;
        // A thread that was joined may stay in /proc for a moment: the kernel wakes who joins it first. And memory that
        // GPUs use goes back on a thread that waits for them.
        let mut limit = Limit::of(LIMIT);
        let after = loop {
            let census = child.census()?;
            let is_as_before = (census.threads, census.files) == (before.threads, before.files);
            if is_as_before || limit.is_over() {
                break census;
            }
        };
        let left = format!("round {round}: threads and descriptors of a helper that closed its fabric");
        same(&left, (after.threads, after.files), (before.threads, before.files))?;
    }
    Ok(())
}

/// Peers that come and go leave nothing in a fabric that stays.
fn peers_leave_nothing(context: &Context) -> Verdict {
    // Each is a fabric, and of 32 cards that is much to open.
    let peers = if context.subject.rails() < 32 { 50 } else { 30 };
    // What the first connection starts stays (per rail, a server and its sockets), and
    // so do idle helper threads, for some seconds: few, however many peers came.
    const KEPT: usize = 25;
    ensure(peers > KEPT, "one of each peer's would not be found")?;
    let mut child = Child::spawn(context)?;
    let address = child.ask("listen")?;
    let before = child.census()?;
    for _ in 0..peers {
        let fabric = live(context)?;
        let near = Ground::new(&fabric, 1 << 16, OPEN, 1)?;
        fabric.publish("near", &near.region)?;
        let peer = child.meets(&fabric, &address)?;
        child.ask("alloc far 65536 2")?;
        child.ask("write far 0 65536 near 0 7")?;
        peer.imm(7).expect(1).wait(LIMIT)?;
        fabric.close();
        child.ask("ended")?;
        child.ask("free far")?;
    }
    // The last of a peer goes once the backend has said goodbye: soon, not at once.
    let mut limit = Limit::of(LIMIT);
    loop {
        let now = child.census()?;
        if now.threads <= before.threads + KEPT && now.files <= before.files + KEPT {
            return Ok(());
        }
        ensure(!limit.is_over(), format!("after {peers} peers {now:?}, before them {before:?}"))?;
        std::thread::yield_now();
    }
}

/// Memory whose owner hears when it is released, and can look at it even then.
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

/// A region is dropped while a peer that stands still writes to it. Its memory goes back to its owner, and from then on
/// no byte lands there, though the peer goes on.
fn dropped_memory(context: &Context) -> Verdict {
    const LEN: usize = 64 << 20;
    let Meeting { fabric, peer, mut child } = Meeting::new(context)?;
    let (released, release) = channel();
    let memory = Arc::new(Owned { buffer: ManuallyDrop::new(HostBuffer::new(LEN)?), released });
    let start = memory.as_ptr();
    // SAFETY: nobody else uses the memory, which is never unmapped.
    let region = unsafe { fabric.register(memory, OPEN) }?;
    fabric.publish("near", &region)?;
    child.ask(&format!("alloc far {LEN} 2"))?;
    child.tell(&format!("write far 0 {LEN} near 0 -"))?;
    let mut limit = Limit::of(LIMIT);
    while landed(start, LEN) == 0 {
        ensure(!limit.is_over(), "nothing of the write lands")?;
    }
    child.signal(Signal::STOP)?;
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
    // This side still receives the bytes that sockets hold; then the peer goes on. The trial can only wait to see that no
    // further byte comes.
    look_on(Duration::from_millis(50));
    child.signal(Signal::CONT)?;
    look_on(Duration::from_millis(200));
    drop(peer);
    fabric.close();
    drop(fabric);
    if before.is_none() {
        ensure(release.recv_timeout(LIMIT).is_ok(), "the memory is never released")?;
        before = Some(landed(start, LEN));
    }
    drop(child);
    same("pages with bytes, now and when the memory was released", Some(landed(start, LEN)), before)
}

/// Work under way when its fabric ends; afterwards no byte moves.
fn drains(context: &Context, end: impl FnOnce(End)) -> Verdict {
    let Meeting { fabric, peer, mut child } = Meeting::new(context)?;
    child.ask(&format!("alloc far {} 1", 8 << 20))?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    let src = Ground::new(&fabric, 8 << 20, OPEN, 2)?;
    let ops: Result<Vec<Op>, _> = (0..20).map(|_| peer.write(&src.region, 0..8 << 20, &remote, 0)).collect();
    drop((src, peer, remote));
    // The limit of the whole trial says that this ends: no deadline of an operation comes before.
    end(fabric);
    for mut op in ops? {
        let result = op.try_result().ok_or_else(|| Failure::new("an operation outlives its fabric"))?;
        if let Err(error) = result {
            // Our goodbye may have ended the peer's side first.
            refused::<()>("an operation", Err(error), &[ErrorKind::Closed, ErrorKind::PeerDied])?;
        }
    }
    child.ask("fill far 3")?;
    child.ask("ended")?;
    // An absence can only be waited for.
    std::thread::sleep(Duration::from_millis(100));
    child.ask("holds far").map(drop)
}

fn closing_drains(context: &Context) -> Verdict {
    drains(context, |fabric| fabric.close())
}

fn dropping_drains(context: &Context) -> Verdict {
    drains(context, drop)
}

/// Under one percent of a core, with a peer connected.
fn idle(context: &Context) -> Verdict {
    const SPAN: Duration = Duration::from_secs(1);
    let fabric = patient(context)?;
    let mut child = Child::spawn_idle(context)?;
    child.ask("open-patient")?;
    let address = child.ask("listen")?;
    let peer = child.meets(&fabric, &address)?;
    child.ask("alloc far 4096 1")?;
    let src = Ground::new(&fabric, 4096, OPEN, 2)?;
    let remote = within(LIMIT, "a lookup", peer.region("far"))??;
    // Not fresh: something was done before.
    peer.write(&src.region, 0..4096, &remote, 0)?.wait(LIMIT)?;
    std::thread::sleep(Duration::from_millis(200));
    // What else the machine does can only add to it: cold caches, mostly. So one span within the limit shows it.
    let mut least = SPAN;
    for _ in 0..3 {
        let before = child.census()?;
        std::thread::sleep(SPAN);
        least = least.min(child.census()?.busy - before.busy);
        if least < SPAN / 100 {
            return Ok(());
        }
    }
    Err(Failure::new(format!("an idle fabric used {least:?} of the processor in {SPAN:?}")))
}

/// Operations are awaited by a foreign executor and by several threads at once.
fn any_executor(context: &Context) -> Verdict {
    let (a, b) = (live(context)?, live(context)?.at(Side::Target));
    let (to_b, to_a) = a.connect_local(&b)?;
    let src = Ground::new(&a, 1 << 20, OPEN, 1)?;
    let mut dst = Ground::new(&b, 8 << 20, OPEN, 2)?;
    let remote = dst.import(&to_b)?;
    let results: Vec<Verdict> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|part: usize| {
                let (to_b, src, remote) = (&to_b, &src, &remote);
                scope.spawn(move || -> Verdict {
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
        let join = |thread: std::thread::ScopedJoinHandle<'_, Verdict>| {
            thread.join().unwrap_or_else(|_| Err(Failure::new("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    results.into_iter().collect::<Verdict>()?;
    for part in 0..8 {
        dst.expect_from(part << 20, &src, 0..1 << 20);
        to_a.imm(part as u32).expect(40).wait(LIMIT)?;
    }
    dst.check("320 writes of eight threads")
}

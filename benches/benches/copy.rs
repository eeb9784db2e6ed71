//! Copies against memcpy: hot blocks, 64 MiB that no cache holds, and scattered pages
//! that no cache holds.
//!
//! `cargo bench -p benches --bench copy`. The cold groups rotate through a pool on each
//! side that must exceed the last-level cache: `COPY_POOL_MIB` (default 1024).

use std::hint::black_box;
use std::time::Duration;

use benches::shuffled;
use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use rustix::mm;
use transport_core::copy::{CopyStrategy, copy, finish, stream_four};
use transport_core::{HostBuffer, Memory};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// What the cold groups copy at once.
const COLD: usize = 64 * MIB;

/// Pages of one batch of the scattered groups.
const BATCH: usize = 256;

/// Memory that is mapped and touched, so that no copy faults.
enum Pool {
    /// 4 KiB pages, private to this process.
    Anonymous(*mut u8, usize),
    /// As loopback's regions are: in huge pages, where the kernel has them.
    Shared(HostBuffer),
}

impl Pool {
    fn anonymous(len: usize) -> Self {
        let protection = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, protection, mm::MapFlags::PRIVATE) };
        Self::Anonymous(base.expect("mmap").cast(), len).touched()
    }

    fn shared(len: usize) -> Self {
        Self::Shared(HostBuffer::new(len).expect("memory")).touched()
    }

    fn touched(self) -> Self {
        // SAFETY: all of the pool, which nobody else knows of.
        unsafe { self.base().write_bytes(1, self.len()) };
        self
    }

    fn base(&self) -> *mut u8 {
        match self {
            Self::Anonymous(base, _) => *base,
            Self::Shared(buffer) => buffer.as_ptr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Anonymous(_, len) => *len,
            Self::Shared(buffer) => buffer.len(),
        }
    }

    /// Window `index` of `len` bytes.
    fn window(&self, index: usize, len: usize) -> *mut u8 {
        debug_assert!((index + 1) * len <= self.len());
        // SAFETY: the window lies inside the pool: `rotate` counts to its length / `len`.
        unsafe { self.base().add(index * len) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Self::Anonymous(base, len) = *self {
            // SAFETY: mapped by this value, which is the last to name it.
            unsafe { mm::munmap(base.cast(), len).expect("munmap") }
        }
    }
}

/// One way to copy, with the fence it owes. Safety: as [`copy`]'s.
type Contender = (&'static str, unsafe fn(*mut u8, *const u8, usize));

/// # Safety
/// Those of [`copy`].
unsafe fn memcpy(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise; nobody races in this bench.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// # Safety
/// Those of [`copy`].
unsafe fn plain(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(CopyStrategy::Plain, dst, src, len) }
    finish(CopyStrategy::Plain);
}

/// # Safety
/// Those of [`copy`].
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(CopyStrategy::Stream, dst, src, len) }
    finish(CopyStrategy::Stream);
}

const CONTENDERS: [Contender; 3] = [("memcpy", memcpy), ("plain", plain), ("stream", stream)];

fn rotate(bencher: &mut Bencher, contender: Contender, dst: &Pool, src: &Pool, len: usize) {
    let windows = dst.len().min(src.len()) / len;
    let mut index = 0;
    bencher.iter(|| {
        // SAFETY: windows of `len` bytes of two different pools.
        unsafe { contender.1(dst.window(index, len), src.window(index, len), black_box(len)) };
        index = if index + 1 < windows { index + 1 } else { 0 };
    });
}

fn hot(criterion: &mut Criterion) {
    for len in [8, 64, 256, KIB, 4 * KIB, 64 * KIB, 256 * KIB, MIB] {
        // One window each: the same bytes again and again.
        let (dst, src) = (Pool::anonymous(len), Pool::anonymous(len));
        let mut group = criterion.benchmark_group(format!("hot/{len}"));
        group.throughput(Throughput::BytesDecimal(len as u64));
        group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        for contender in CONTENDERS {
            group.bench_function(contender.0, |bencher| rotate(bencher, contender, &dst, &src, len));
        }
    }
}

fn cold(criterion: &mut Criterion, kind: &str, dst: &Pool, src: &Pool) {
    let mut group = criterion.benchmark_group(format!("cold/{kind}/64MiB"));
    group.throughput(Throughput::BytesDecimal(COLD as u64));
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    for contender in CONTENDERS {
        group.bench_function(contender.0, |bencher| rotate(bencher, contender, dst, src, COLD));
    }
}

/// Batches of random pages of `len` bytes; `copy_batch` gets their ends and owes the fence.
fn scatter(
    bencher: &mut Bencher,
    (dst, src): (&Pool, &Pool),
    len: usize,
    copy_batch: impl Fn(&[(*mut u8, *const u8)]),
) {
    let pages = dst.len().min(src.len()) / len;
    let (to, from) = (shuffled(pages as u32, 1), shuffled(pages as u32, 2));
    let ends: Vec<_> = to
        .iter()
        .zip(&from)
        .map(|(to, from)| (dst.window(*to as usize, len), src.window(*from as usize, len).cast_const()))
        .collect();
    let mut batches = ends.chunks_exact(BATCH).cycle();
    bencher.iter(|| copy_batch(black_box(batches.next().expect("a pool holds many batches"))));
}

/// Random pages, one fence for each batch of them.
fn cold_scattered(criterion: &mut Criterion) {
    let pools = (&Pool::shared(pool_bytes()), &Pool::shared(pool_bytes()));
    for len in [4 * KIB, 16 * KIB, 64 * KIB] {
        let mut group = criterion.benchmark_group(format!("cold/scattered/{len}"));
        group.throughput(Throughput::BytesDecimal((BATCH * len) as u64));
        group.sample_size(20).measurement_time(Duration::from_secs(3));
        for (name, way) in [("memcpy", None), ("stream", Some(CopyStrategy::Stream))] {
            group.bench_function(name, |bencher| {
                scatter(bencher, pools, len, |batch| {
                    for (to, from) in batch {
                        // SAFETY: pages of `len` bytes of two different pools.
                        unsafe {
                            match way {
                                None => memcpy(*to, *from, len),
                                Some(way) => copy(way, *to, *from, len),
                            }
                        }
                    }
                    finish(way.unwrap_or(CopyStrategy::Plain));
                })
            });
        }
        group.bench_function("stream_four", |bencher| {
            scatter(bencher, pools, len, |batch| {
                let (fours, _) = batch.as_chunks::<4>();
                for four in fours {
                    // SAFETY: pages of `len` bytes of two different pools.
                    unsafe { stream_four(four.map(|ends| ends.0), four.map(|ends| ends.1), len) };
                }
                finish(CopyStrategy::Stream);
            })
        });
    }
}

fn pool_bytes() -> usize {
    let mib = std::env::var("COPY_POOL_MIB").ok().and_then(|text| text.parse().ok());
    (mib.unwrap_or(1024) * MIB).max(COLD)
}

fn cold_anonymous(criterion: &mut Criterion) {
    cold(criterion, "anonymous", &Pool::anonymous(pool_bytes()), &Pool::anonymous(pool_bytes()));
}

fn cold_shared(criterion: &mut Criterion) {
    cold(criterion, "shared", &Pool::shared(pool_bytes()), &Pool::shared(pool_bytes()));
}

criterion_group!(benches, hot, cold_anonymous, cold_shared, cold_scattered);
criterion_main!(benches);

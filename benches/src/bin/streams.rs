//! Cold copies beside the best loop of streaming stores: one and two threads copy 64 MiB at a time, from memory to
//! memory in huge pages, by the library, by memcpy, and by loops of 1, 2 and 4 streams in bursts of 64 B to 2 KiB.
//!
//! `cargo run --profile dist -p benches --bin streams`. The copies take turns. Only x86_64 has several loops.

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    benches::exit_code("streams", x86_64::run())
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("streams: this processor has one loop of streaming copies, so there is nothing to compare");
    ExitCode::FAILURE
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;
    use std::process::ExitCode;
    use std::sync::Barrier;
    use std::time::Instant;

    use benches::BenchResult;
    use clap::Parser;
    use transport_core::copy::{CopyStrategy, StreamChoice, copy, finish};
    use transport_core::{HostBuffer, Memory};

    const MIB: usize = 1 << 20;

    /// The bytes of one copy of one thread.
    const LEN: usize = 64 * MIB;

    #[derive(Parser)]
    struct Arguments {
        /// Rounds; each has one copy by every loop. With 0, only the library's choice is printed.
        #[arg(long, default_value_t = 9)]
        rounds: usize,
        /// MiB of each side and thread: more than the last cache.
        #[arg(long, default_value_t = 256)]
        pool: usize,
        /// Fail unless the library has this part of the best loop's rate, with one thread and with two.
        #[arg(long)]
        least: Option<f64>,
    }

    /// Copies a range. Safety: as [`copy`]'s.
    type Copier = unsafe fn(*mut u8, *const u8, usize);

    struct Contender {
        name: String,
        copier: Copier,
        /// GB/s of all threads together, by round.
        rates: Vec<f64>,
    }

    impl Contender {
        fn new(name: impl Into<String>, copier: Copier) -> Self {
            Self { name: name.into(), copier, rates: Vec::new() }
        }

        fn median(&self) -> f64 {
            median(self.rates.clone())
        }
    }

    fn median(mut values: Vec<f64>) -> f64 {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or_default()
    }

    pub fn run() -> BenchResult<ExitCode> {
        let arguments = Arguments::parse();
        StreamChoice::check_setting()?;
        settle(arguments.pool)?;
        if arguments.rounds == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        let mut is_enough = true;
        for threads in [1, 2] {
            let ratio = compare(threads, &arguments)?;
            is_enough &= arguments.least.is_none_or(|least| ratio >= least);
        }
        Ok(if is_enough { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Copies until the library has chosen its loop, and prints the time and the choice.
    fn settle(pool: usize) -> BenchResult<()> {
        let (src, dst) = (buffer(pool * MIB)?, buffer(pool * MIB)?);
        let (begun, mut copied) = (Instant::now(), 0);
        let is_final = || StreamChoice::of_ranges().is_none_or(|choice| choice.is_final);
        while !is_final() {
            let at = copied % (pool * MIB);
            // SAFETY: a MiB of each of two buffers, whose length is a multiple of it.
            unsafe { ours(dst.as_ptr().add(at), src.as_ptr().add(at), MIB) };
            copied += MIB;
        }
        let choice =
            StreamChoice::of_ranges().map_or("the only loop".to_owned(), |choice| choice.to_string());
        println!(
            "multirail: {choice}, after {} MiB in {:.1} ms",
            copied / MIB,
            begun.elapsed().as_secs_f64() * 1e3
        );
        Ok(())
    }

    /// Prints a table, and returns the part of the best loop's rate that the library has.
    fn compare(threads: usize, arguments: &Arguments) -> BenchResult<f64> {
        let bytes = arguments.pool * MIB / LEN.min(arguments.pool * MIB) * LEN;
        let pools = (0..threads).map(|_| Ok((buffer(bytes)?, buffer(bytes)?)));
        let pools = pools.collect::<BenchResult<Vec<_>>>()?;
        let mut contenders = vec![Contender::new("multirail", ours), Contender::new("memcpy", memcpy)];
        contenders.extend(loops());
        let mut turn = 0;
        for round in 0..=arguments.rounds {
            for contender in &mut contenders {
                turn += 1;
                let rate = rate(contender.copier, &pools, turn % (bytes / LEN) * LEN);
                // The first round warms up.
                if round > 0 {
                    contender.rates.push(rate);
                }
            }
        }
        let best =
            contenders[2..].iter().max_by(|a, b| a.median().total_cmp(&b.median())).ok_or("no loop")?;
        let ratios = contenders[0].rates.iter().zip(&best.rates).map(|(ours, best)| ours / best);
        let ratio = median(ratios.collect());
        println!("\n{threads} thread(s), median of {} rounds, GB/s (best round)", arguments.rounds);
        for contender in &contenders {
            let most = contender.rates.iter().copied().fold(0.0, f64::max);
            println!("  {:16} {:6.2} ({most:.2})", contender.name, contender.median());
        }
        let most = |contender: &Contender| contender.rates.iter().copied().fold(0.0, f64::max);
        let bests = contenders[2..].iter().map(most).fold(0.0, f64::max);
        println!(
            "  multirail / best loop ({}): {ratio:.3}; of the best rounds of each: {:.3}",
            best.name,
            most(&contenders[0]) / bests
        );
        Ok(ratio)
    }

    /// GB/s of a copy by all threads at once.
    fn rate(copier: Copier, pools: &[(HostBuffer, HostBuffer)], at: usize) -> f64 {
        let start = Barrier::new(pools.len());
        let slowest = std::thread::scope(|scope| {
            let threads: Vec<_> = pools
                .iter()
                .map(|(src, dst)| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        let begun = Instant::now();
                        // SAFETY: `LEN` bytes of each of two buffers.
                        unsafe { copier(dst.as_ptr().add(at), src.as_ptr().add(at), LEN) };
                        begun.elapsed().as_secs_f64()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(f64::INFINITY)).fold(0.0, f64::max)
        });
        (pools.len() * LEN) as f64 / 1e9 / slowest
    }

    fn buffer(len: usize) -> BenchResult<HostBuffer> {
        let buffer = HostBuffer::new(len)?;
        // SAFETY: all of a buffer that nobody else knows.
        unsafe { buffer.as_ptr().write_bytes(1, len) };
        Ok(buffer)
    }

    /// # Safety
    /// As [`copy`]'s.
    unsafe fn ours(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy(CopyStrategy::Stream, dst, src, len) };
        finish(CopyStrategy::Stream);
    }

    /// # Safety
    /// As [`copy`]'s.
    unsafe fn memcpy(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
    }

    /// Every loop, of the widest registers that this processor has.
    fn loops() -> Vec<Contender> {
        let is_wide = is_x86_feature_detected!("avx512f");
        let is_narrow = !is_x86_feature_detected!("avx2");
        macro_rules! loops {
            ($($streams:literal: $($burst:literal)*;)*) => {[$($((
                format!("{} x {} B", $streams, $burst),
                [by_zmm::<$streams, $burst> as Copier, by_ymm::<$streams, $burst>, by_xmm::<$streams, $burst>],
            ),)*)*]};
        }
        let all = loops! {
            1: 64 256;
            2: 64 128 256 512 1024 2048;
            4: 64 128 256 512 1024 2048;
        };
        let width = if is_wide { 0 } else { 1 + usize::from(is_narrow) };
        all.into_iter().map(|(name, copiers)| Contender::new(name, copiers[width])).collect()
    }

    /// A loop over quarters (halves) of each MiB (half a MiB), with one line as its unit.
    macro_rules! streaming {
        ($name:ident: $load:literal, $store:literal, [$($register:tt $at:literal),*]) => {
            /// # Safety
            /// As [`copy`]'s, `len` is a multiple of 1 MiB, `dst` is aligned to a line, and the CPU has the registers.
            unsafe fn $name<const STREAMS: usize, const BURST: usize>(dst: *mut u8, src: *const u8, len: usize) {
                const APART: usize = 256 << 10;
                for block in (0..len).step_by(STREAMS * APART) {
                    for at in (0..APART).step_by(BURST) {
                        for stream in 0..STREAMS {
                            let first = block + stream * APART + at;
                            for line in (first..first + BURST).step_by(64) {
                                // SAFETY: a line of the range.
                                unsafe {
                                    asm!(
                                        $(concat!($load, " ", $register, ", [{s} + ", $at, "]"),)*
                                        $(concat!($store, " [{d} + ", $at, "], ", $register),)*
                                        s = in(reg) src.add(line), d = in(reg) dst.add(line),
                                        $(out($register) _,)*
                                        options(nostack, preserves_flags),
                                    );
                                }
                            }
                        }
                    }
                }
                // SAFETY: a fence touches no memory.
                unsafe { asm!("sfence", options(nostack, preserves_flags)) }
            }
        };
    }

    streaming! { by_zmm: "vmovdqu64", "vmovntdq", ["zmm16" "0"] }
    streaming! { by_ymm: "vmovdqu", "vmovntdq", ["ymm0" "0", "ymm1" "32"] }
    streaming! { by_xmm: "movdqu", "movntdq", ["xmm0" "0", "xmm1" "16", "xmm2" "32", "xmm3" "48"] }
}

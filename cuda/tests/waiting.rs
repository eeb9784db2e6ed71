//! Streams that wait for arrivals and begin transfers. Without a GPU each test is skipped, with a message.
//!
//! The tests print how long each step took (`--nocapture --test-threads 1`), and do not check these times.

use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use backend_loopback::Loopback;
use cudarc::driver::sys;
use multirail_cuda::{CudaSignal, Device, RawStream};
use multirail_spi::{Access, Signal};
use transport_core::{
    Fabric, FabricBuilder, Mirror, OnPeerClosed, Op, Peer, Region, RemoteRegion, TransportConfig,
    WriteOptions,
};

const LEN: usize = 64 << 10;
const ROUNDS: u32 = 1000;
const LIMIT: Duration = limit::HANG;
const IMM: u32 = 7;

/// The first GPU.
fn device() -> Device {
    Device::open(0).unwrap()
}

/// A stream, created as another library would do it.
struct ForeignStream(RawStream);

impl ForeignStream {
    fn new() -> Self {
        let (mut context, mut stream) = (null_mut(), null_mut());
        // SAFETY: the driver is started, because there is a device; each call writes one value.
        unsafe {
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            assert_eq!(sys::cuStreamCreate(&raw mut stream, flags), sys::CUresult::CUDA_SUCCESS);
        }
        Self(stream.cast())
    }

    fn waits_for(&self, word: &CudaSignal, value: u32) {
        // SAFETY: the tests keep stream and word until `synchronise`.
        unsafe { word.wait_on(self.0, value) }.unwrap();
    }

    fn writes(&self, word: &CudaSignal, value: u32) {
        // SAFETY: as above.
        unsafe { word.write_on(self.0, value) }.unwrap();
    }

    fn synchronise(&self) {
        // SAFETY: a living stream.
        assert_eq!(unsafe { sys::cuStreamSynchronize(self.0.cast()) }, sys::CUresult::CUDA_SUCCESS);
    }
}

impl Drop for ForeignStream {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0.cast()) };
    }
}

/// Ends every wait for a word when it is dropped. Otherwise a test that panics would leave its stream waiting forever.
struct ReleaseOnDrop(Arc<CudaSignal>);

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        self.0.atomic().fetch_add(1 << 30, Ordering::Release);
    }
}

fn word(device: &Device) -> (Arc<CudaSignal>, ReleaseOnDrop) {
    let word = Arc::new(CudaSignal::new(device).unwrap());
    (word.clone(), ReleaseOnDrop(word))
}

/// Spins until `word` has the value `value`.
fn wait_until(word: &CudaSignal, value: u32) {
    let begun = Instant::now();
    while word.atomic().load(Ordering::Acquire) != value {
        assert!(begun.elapsed() < LIMIT, "{word:?} does not reach {value}");
        std::hint::spin_loop();
    }
}

/// Two connected fabrics, and memory to write.
struct Setup {
    here: Fabric,
    there: Fabric,
    to_there: Peer,
    to_here: Peer,
    src: Region,
    dst: Region,
    remote: RemoteRegion,
}

impl Setup {
    fn new(settings: fn(FabricBuilder) -> FabricBuilder) -> Self {
        let open = || {
            let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
            settings(FabricBuilder::new().transport(loopback)).open().unwrap()
        };
        let (here, there) = (open(), open());
        let (to_there, to_here) = here.connect_local(&there).unwrap();
        let src = here.alloc(LEN, Access::LOCAL).unwrap();
        let dst = there.alloc(LEN, Access::REMOTE_WRITE).unwrap();
        let remote = to_there.import(&dst.descriptor()).unwrap();
        Self { here, there, to_there, to_here, src, dst, remote }
    }

    fn write(&self, options: &WriteOptions) -> Op {
        self.to_there.write_with(&self.src, 0..LEN, &self.remote, 0, options).unwrap()
    }

    /// Marks the source with the number of a round. Returns a closure that tells whether these bytes have arrived.
    fn mark(&self, round: u32) -> impl Fn() -> bool {
        self.src.copy_in(LEN - 4, &round.to_le_bytes()).unwrap();
        move || {
            let mut landed = [0; 4];
            self.dst.copy_out(LEN - 4, &mut landed).unwrap();
            landed == round.to_le_bytes()
        }
    }
}

#[derive(Default)]
struct WaitTimes(Vec<Duration>);

impl WaitTimes {
    fn print(mut self, what: &str) {
        self.0.sort_unstable();
        let at = |part: usize| self.0[(self.0.len() - 1) * part / 100].as_secs_f64() * 1e6;
        println!("{what}: median {:.2} us, 99 % {:.2} us, least {:.2} us", at(50), at(99), at(0));
    }
}

fn processor_and_gpu_share_a_word() {
    let device = device();
    let stream = ForeignStream::new();
    let (first, _first) = word(&device);
    let (second, _second) = word(&device);
    assert_ne!(first.device_address(), second.device_address());
    println!("{}: waits flush writes of NICs: {}", device.name(), first.flushes_remote_writes());
    stream.waits_for(&first, 5);
    stream.writes(&second, 9);
    first.atomic().store(4, Ordering::Release);
    assert_eq!(second.atomic().load(Ordering::Acquire), 0);
    first.atomic().store(6, Ordering::Release);
    wait_until(&second, 9);
    // The word wraps around, and the default stream waits.
    let default = std::mem::ManuallyDrop::new(ForeignStream(null_mut()));
    first.atomic().store(u32::MAX, Ordering::Release);
    default.waits_for(&first, 1);
    default.writes(&second, 10);
    first.atomic().store(1, Ordering::Release);
    wait_until(&second, 10);
    stream.synchronise();
}

/// The stream continues when bytes with an imm arrive. For comparison, the test also measures a word that the processor
/// stores.
fn a_stream_waits_for_arrivals() {
    let device = device();
    let (stream, setup) = (ForeignStream::new(), Setup::new(|builder| builder));
    let [(ready, _ready), (landed, _landed), (done, _done)] = [0; 3].map(|_| word(&device));
    let (mut arriving, mut passing, mut bare) =
        (WaitTimes::default(), WaitTimes::default(), WaitTimes::default());
    let enqueue = |round| {
        stream.writes(&ready, round);
        stream.waits_for(&landed, round);
        stream.writes(&done, round);
        wait_until(&ready, round);
    };
    for round in 1..=ROUNDS {
        enqueue(round);
        let begun = Instant::now();
        landed.atomic().store(round, Ordering::Release);
        wait_until(&done, round);
        bare.0.push(begun.elapsed());
    }
    stream.synchronise();
    [&ready, &done].into_iter().for_each(|word| word.atomic().store(0, Ordering::Release));
    let mirror = setup.to_here.imm(IMM).mirror(landed.clone(), OnPeerClosed::Pass);
    for round in 1..=ROUNDS {
        let has_landed = setup.mark(round);
        enqueue(round);
        let begun = Instant::now();
        let mut op = setup.write(&WriteOptions::new().imm(IMM));
        wait_until(&landed, round);
        let arrived = Instant::now();
        wait_until(&done, round);
        assert!(has_landed(), "the stream went on before the bytes of round {round}");
        passing.0.push(arrived.elapsed());
        arriving.0.push(arrived - begun);
        op.wait(LIMIT).unwrap();
    }
    assert_eq!(mirror.total(), ROUNDS.into());
    bare.print("word of the processor -> stream -> word of the stream");
    arriving.print("write of 64 KiB with imm -> mirrored word");
    passing.print("mirrored word -> stream -> word of the stream");
    // The peer closes: the stream must not wait forever.
    enqueue(ROUNDS + 1);
    setup.here.close();
    wait_until(&landed, ROUNDS + Mirror::PASS);
    wait_until(&done, ROUNDS + 1);
    stream.synchronise();
}

/// The stream writes a word, and an operation that waited for the word begins: on a worker that polls without pause, on
/// a worker that naps, and on the caller's thread.
fn a_stream_begins_a_transfer() {
    let device = device();
    let stream = ForeignStream::new();
    let run = |setup: &Setup, rounds: u32, pause: Duration| {
        let (trigger, _trigger) = word(&device);
        let (mut written, mut run) = (WaitTimes::default(), WaitTimes::default());
        for round in 1..=rounds {
            let has_landed = setup.mark(round);
            let mut op = setup.write(&WriteOptions::new().when(trigger.clone(), round));
            std::thread::sleep(pause);
            assert!(op.try_result().is_none() && !has_landed());
            let begun = Instant::now();
            stream.writes(&trigger, round);
            wait_until(&trigger, round);
            let triggered = Instant::now();
            op.wait(LIMIT).unwrap();
            run.0.push(triggered.elapsed());
            written.0.push(triggered - begun);
            assert!(has_landed(), "the write of round {round} is complete, but its bytes have not arrived");
        }
        stream.synchronise();
        (written, run)
    };
    let setup = Setup::new(|builder| builder);
    let (written, spinning) = run(&setup, ROUNDS, Duration::ZERO);
    let (_, napping) = run(&setup, ROUNDS / 10, Duration::from_millis(5));
    let driven = Setup::new(FabricBuilder::caller_driven);
    let (_, by_caller) = run(&driven, ROUNDS, Duration::ZERO);
    written.print("cuStreamWriteValue32 called -> word seen");
    spinning.print("word seen -> write of 64 KiB done, by a worker that is awake");
    napping.print("word seen -> write of 64 KiB done, by a worker after 5 ms of nothing");
    by_caller.print("word seen -> write of 64 KiB done, driven by the caller");
}

/// The stream begins a write, waits for the peer's answer, and continues. The processor takes no part in these steps.
fn there_and_back_by_the_stream_alone() {
    let device = device();
    let (stream, setup) = (ForeignStream::new(), Setup::new(|builder| builder));
    let [(step, _step), (there, _there), (back, _back), (done, _done)] = [0; 4].map(|_| word(&device));
    let _mirrors = [
        setup.to_here.imm(IMM).mirror(there.clone(), OnPeerClosed::Pass),
        setup.to_there.imm(IMM).mirror(back.clone(), OnPeerClosed::Pass),
    ];
    let answer = setup.here.alloc(LEN, Access::REMOTE_WRITE).unwrap();
    let answered = setup.to_here.import(&answer.descriptor()).unwrap();
    let mut times = WaitTimes::default();
    for round in 1..=ROUNDS {
        let options = WriteOptions::new().imm(IMM);
        let _has_landed = setup.mark(round);
        let mut ops = [
            setup.write(&options.clone().when(step.clone(), round)),
            setup
                .to_here
                .write_with(&setup.dst, 0..LEN, &answered, 0, &options.when(there.clone(), round))
                .unwrap(),
        ];
        let begun = Instant::now();
        stream.writes(&step, round);
        stream.waits_for(&back, round);
        stream.writes(&done, round);
        wait_until(&done, round);
        times.0.push(begun.elapsed());
        let mut landed = [0; 4];
        answer.copy_out(LEN - 4, &mut landed).unwrap();
        assert_eq!(landed, round.to_le_bytes());
        ops.iter_mut().for_each(|op| _ = op.wait(LIMIT).unwrap());
    }
    times.print("stream -> write of 64 KiB -> answer of 64 KiB -> stream, and the processor sees it");
    setup.there.close();
    stream.synchronise();
}

fn main() -> ExitCode {
    conformance::run_or_skip(
        Device::all().err().map(|why| why.to_string()),
        conformance::tests![
            processor_and_gpu_share_a_word,
            a_stream_waits_for_arrivals,
            a_stream_begins_a_transfer,
            there_and_back_by_the_stream_alone
        ],
    )
}

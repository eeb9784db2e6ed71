//! GPU memory, plain copies, page-locked memory, comparing bytes on a GPU. Without a GPU each test is skipped, with a
//! message.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use backend_loopback::Null;
use cudarc::driver::sys;
use multirail_cuda::{
    CudaMemory, CudaSignal, Device, PinnedBuffer, PlainCopy, PlainCopyEnd, Reach, WritesOrdering,
};
use multirail_spi::{Access, ErrorKind, Memory, MemoryKind, Signal};
use transport_core::{FabricBuilder, TransportConfig};

fn devices() -> Vec<Device> {
    Device::all().unwrap()
}

/// Memory that the test allocates by the driver's own calls, freed with this value.
struct DriverMemory(u64);

impl DriverMemory {
    fn new(device: &Device, len: usize, is_managed: bool) -> Self {
        // Makes sure that the primary context exists, as it does in the program of another library.
        let _context = CudaMemory::new(device, 1).unwrap();
        let (mut start, mut context) = (0, std::ptr::null_mut());
        // SAFETY: the driver is started; each call writes one value.
        unsafe {
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            let code = match is_managed {
                true => sys::cuMemAllocManaged(&raw mut start, len, 1),
                false => sys::cuMemAlloc_v2(&raw mut start, len),
            };
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        }
        Self(start)
    }
}

impl Drop for DriverMemory {
    fn drop(&mut self) {
        // SAFETY: allocated above, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.0) };
    }
}

fn devices_have_names_addresses_and_attributes() {
    for (number, device) in devices().into_iter().enumerate() {
        assert_eq!(device.ordinal() as usize, number);
        assert!(!device.name().is_empty() && device.processors() > 0);
        let address = device.address().expect("a PCI function");
        println!(
            "GPU {number}: {} at {address}, {} processors, DMA-BUF {}, RDMA {}, writes ordered by {:?}",
            device.name(),
            device.processors(),
            device.has_dma_buf(),
            device.has_rdma(),
            device.writes_ordering()
        );
        // A GPU that sees writes in order needs no flush. The flush works wherever the driver says so, needed or not.
        let flush = CudaMemory::new(&device, 1).unwrap().needed_flush();
        match device.writes_ordering() {
            WritesOrdering::None => {
                assert_eq!(flush.is_ok_and(|flush| flush.is_some()), device.can_flush_writes())
            }
            _ => assert!(flush.unwrap().is_none()),
        }
        assert_eq!(device.flush_writes().is_ok(), device.can_flush_writes());
        println!("a call can flush writes: {}", device.can_flush_writes());
        if let Ok(machine) = topology::sysfs::this_host()
            && let Some(function) = machine.function(address)
        {
            assert_eq!(function.kind, topology::Kind::Gpu);
        }
        let missing = Device::open(number as u32 + 1000).err().unwrap();
        assert!(matches!(missing.kind(), ErrorKind::NotFound | ErrorKind::InvalidRequest), "{missing}");
    }
}

fn bytes_go_in_and_out() {
    for device in devices() {
        let memory = CudaMemory::new(&device, 100_001).unwrap();
        assert_eq!((memory.len(), memory.kind()), (100_001, MemoryKind::Cuda { device: device.ordinal() }));
        assert_eq!(memory.near(), device.address());
        let mut all = vec![1; 100_001];
        memory.copy_out(0, &mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 0), "new memory is zero");
        let bytes: Vec<u8> = (0..5000).map(|at| at as u8).collect();
        memory.copy_in(95_001, &bytes).unwrap();
        memory.copy_out(95_001, &mut all[..5000]).unwrap();
        assert_eq!(all[..5000], bytes);
        for (at, len) in [(100_001, 1), (0, 100_002), (usize::MAX, 2)] {
            let refused = memory.copy_in(at, &vec![0; len]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
        }
        assert_eq!(CudaMemory::new(&device, 0).err().unwrap().kind(), ErrorKind::InvalidRequest);
        let refused = CudaMemory::new(&device, 1 << 50).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Exhausted, "{refused}");
        let refused = CudaMemory::new(&device, usize::MAX).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Exhausted, "{refused}");
    }
}

fn addresses_of_others_are_checked() {
    for device in devices().into_iter().take(1) {
        let raw = Arc::new(DriverMemory::new(&device, 1 << 20, false));
        let of = |start, len, owner: &Arc<DriverMemory>| {
            let owner: Arc<DriverMemory> = Arc::clone(owner);
            // SAFETY: the owner keeps the memory.
            unsafe { CudaMemory::of_pointer(start, len, owner) }
        };
        let part = of(raw.0 + 4096, 8192, &raw).unwrap();
        part.copy_in(0, b"there").unwrap();
        let mut back = [0; 5];
        of(raw.0, 1 << 20, &raw).unwrap().copy_out(4096, &mut back).unwrap();
        assert_eq!(&back, b"there");
        assert_eq!(of(raw.0, (1 << 20) + 1, &raw).err().unwrap().kind(), ErrorKind::OutOfBounds);
        let host = Box::new([0_u8; 64]);
        let refused = of(host.as_ptr() as u64, 64, &raw).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
        let managed = Arc::new(DriverMemory::new(&device, 4096, true));
        let refused = of(managed.0, 4096, &managed).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    }
}

/// Memory of the first GPU's pool, freed with this value.
struct Pooled {
    start: u64,
    pool: sys::CUmemoryPool,
}

impl Pooled {
    fn new(device: &Device, len: usize) -> Self {
        drop(DriverMemory::new(device, 1, false));
        let (mut start, mut pool) = (0, std::ptr::null_mut());
        // SAFETY: the context is current; each call writes one value.
        unsafe {
            assert_eq!(sys::cuDeviceGetDefaultMemPool(&raw mut pool, 0), sys::CUresult::CUDA_SUCCESS);
            let code = sys::cuMemAllocAsync(&raw mut start, len, std::ptr::null_mut());
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamSynchronize(std::ptr::null_mut()), sys::CUresult::CUDA_SUCCESS);
        }
        Self { start, pool }
    }

    fn give_access(&self, device: &Device) {
        let id = device.ordinal() as i32;
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: sys::CUmemLocation { type_, id }, flags };
        // SAFETY: the call reads one description.
        let code = unsafe { sys::cuMemPoolSetAccess(self.pool, &raw const access, 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        // SAFETY: allocated above, freed once.
        let _ = unsafe { sys::cuMemFreeAsync(self.start, std::ptr::null_mut()) };
    }
}

fn reach_follows_access() {
    let devices = devices();
    let Some(first) = devices.first() else { return };
    let own = CudaMemory::new(first, 1 << 20).unwrap();
    let raw = DriverMemory::new(first, 1 << 20, false);
    let pooled = Pooled::new(first, 1 << 20);
    for address in [own.as_ptr() as u64, raw.0, pooled.start] {
        assert_eq!(Reach::of_gpu(first, first, address, 1 << 20), Some(Reach::Kernel), "{address:#x}");
    }
    if let Some(second) = devices.get(1) {
        let reach = if second.reaches(first) { Reach::Kernel } else { Reach::Driver };
        assert_eq!(Reach::of_gpu(second, first, raw.0, 1 << 20), Some(reach));
        if reach == Reach::Kernel {
            assert_eq!(Reach::of_gpu(second, first, own.as_ptr() as u64, 1 << 20), Some(reach));
            assert_eq!(
                Reach::of_gpu(second, first, pooled.start, 1 << 20),
                None,
                "the GPU has no access yet"
            );
            pooled.give_access(second);
            assert_eq!(Reach::of_gpu(second, first, pooled.start, 1 << 20), Some(reach));
        }
    }
    let pinned = PinnedBuffer::new(first, 1 << 20).unwrap();
    let start = pinned.as_ptr() as u64;
    assert_eq!(Reach::of_host(start, 1 << 20), Reach::Kernel);
    assert_eq!(Reach::of_host(start + 4096, 100), Reach::Kernel);
    assert_eq!(Reach::of_host(start, (1 << 20) + 1), Reach::Driver, "not all of it is locked");
    let plain = vec![0_u8; 1 << 20];
    assert_eq!(Reach::of_host(plain.as_ptr() as u64, 1 << 20), Reach::Driver);
}

fn exports_show_no_neighbours() {
    for device in devices().into_iter().take(1).filter(Device::has_dma_buf) {
        let memory = CudaMemory::new(&device, 5 << 20).unwrap();
        let buffer = memory.dma_buf().unwrap().expect("a DMA-BUF");
        assert_eq!(buffer.offset, 0);
        assert!(
            std::fs::read_link(format!("/proc/self/fd/{}", fd(&buffer)))
                .unwrap()
                .display()
                .to_string()
                .contains("dmabuf")
        );
        // A part of an allocation that begins in the middle of a page.
        let raw = Arc::new(DriverMemory::new(&device, 1 << 20, false));
        // SAFETY: the owner keeps the memory.
        let part = unsafe { CudaMemory::of_pointer(raw.0 + 5000, 100, Arc::clone(&raw) as _) }.unwrap();
        assert_eq!(part.dma_buf().unwrap().unwrap().offset, 5000 - 4096);
        // An allocation of less than a page, which shares the page with others.
        let small = Arc::new(DriverMemory::new(&device, 100, false));
        // SAFETY: the owner keeps the memory.
        let small_memory =
            || unsafe { CudaMemory::of_pointer(small.0, 100, Arc::clone(&small) as _) }.unwrap();
        let refused = small_memory().dma_buf().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Permission);
        assert!(refused.context().contains("may_expose_neighbours"), "{refused}");
        assert!(small_memory().may_expose_neighbours().dma_buf().unwrap().is_some());
    }
}

fn fd(buffer: &multirail_spi::DmaBuf) -> i32 {
    use std::os::fd::AsRawFd;
    buffer.file.as_raw_fd()
}

fn regions_copy_by_cuda() {
    for device in devices().into_iter().take(1) {
        let memory = Arc::new(CudaMemory::new(&device, 1 << 20).unwrap());
        let null = FabricBuilder::new().transport(TransportConfig::new("null", Arc::new(Null::new(1))));
        let fabric = null.open().unwrap();
        // SAFETY: nobody else has the memory.
        let region = unsafe { fabric.register(memory.clone(), Access::LOCAL) }.unwrap();
        region.copy_in(1000, b"by CUDA").unwrap();
        let mut back = [0; 7];
        region.copy_out(1000, &mut back).unwrap();
        assert_eq!(&back, b"by CUDA");
    }
}

fn slices_of_cudarc_are_kept() {
    for device in devices() {
        let stream = cudarc::driver::CudaContext::new(device.ordinal() as usize).unwrap().default_stream();
        let numbers: Vec<u32> = (0..10_000).collect();
        let memory = CudaMemory::of_slice(stream.clone_htod(&numbers).unwrap()).unwrap();
        assert_eq!((memory.len(), memory.device().ordinal()), (40_000, device.ordinal()));
        let mut back = [0; 8];
        memory.copy_out(39_992, &mut back).unwrap();
        assert_eq!(back, [9998_u32.to_le_bytes(), 9999_u32.to_le_bytes()].concat()[..]);
        // The thread that drops the memory has no context.
        std::thread::spawn(move || drop(memory)).join().unwrap();
        let again = stream.clone_htod(&numbers).unwrap();
        assert_eq!(stream.clone_dtoh(&again).unwrap(), numbers, "the drop left no error behind");
        let empty = CudaMemory::of_slice(stream.null::<u8>().unwrap()).err().unwrap();
        assert_eq!(empty.kind(), ErrorKind::InvalidRequest);
    }
}

/// Freeing waits for the GPU, and here the GPU waits for a word that this thread stores after the drop.
fn dropping_memory_does_not_wait_for_the_gpu() {
    for device in devices().into_iter().take(1) {
        let word = CudaSignal::new(&device).unwrap();
        let dropped = (
            CudaMemory::new(&device, 1 << 20).unwrap(),
            PinnedBuffer::new(&device, 1 << 20).unwrap(),
            CudaSignal::new(&device).unwrap(),
        );
        let raw = DriverMemory::new(&device, 1, false);
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the call writes one handle.
        let code = unsafe { sys::cuStreamCreate(&raw mut stream, flags) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        // SAFETY: stream and word stay until the test has waited for the stream.
        unsafe { word.wait_on(stream.cast(), 1) }.unwrap();
        drop(dropped);
        word.atomic().store(1, Ordering::Release);
        // SAFETY: a living stream, destroyed once.
        let codes = unsafe { [sys::cuStreamSynchronize(stream), sys::cuStreamDestroy_v2(stream)] };
        assert_eq!(codes, [sys::CUresult::CUDA_SUCCESS; 2]);
        drop(raw);
    }
}

const LEN: usize = 3 << 20;

/// Bytes that differ by position and by `salt`.
fn bytes(salt: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at / 251 + at + salt) as u8).collect()
}

fn fill(buffer: &PinnedBuffer, bytes: &[u8]) {
    assert_eq!(buffer.len(), bytes.len());
    // SAFETY: both have the same length, and nobody else has the buffer.
    unsafe { buffer.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn bytes_of(buffer: &PinnedBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    // SAFETY: as above.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(buffer.as_ptr(), bytes.len()) };
    bytes
}

fn from_the_host_over_every_gpu_and_back() {
    let devices = devices();
    for (near, far) in devices.iter().flat_map(|near| devices.iter().map(move |far| (near, far))) {
        let (source, back) = (PinnedBuffer::new(near, LEN).unwrap(), PinnedBuffer::new(far, LEN).unwrap());
        let salt = (near.ordinal() * 7 + far.ordinal()) as usize;
        fill(&source, &bytes(salt));
        let (source, back) = (Arc::new(source), Arc::new(back));
        let gpu = |device| Arc::new(CudaMemory::new(device, LEN).unwrap());
        let (first, second) = (gpu(near), gpu(far));
        for (from, to) in [
            (PlainCopyEnd::from(source), PlainCopyEnd::from(first.clone())),
            (first.into(), second.clone().into()),
            (second.into(), back.clone().into()),
        ] {
            PlainCopy::new(from, to).unwrap().run().unwrap();
        }
        assert_eq!(bytes_of(&back), bytes(salt), "by GPUs {} and {}", near.ordinal(), far.ordinal());
    }
}

fn page_locked_memory_can_be_shared_and_locked_again() {
    for device in devices().iter().take(1) {
        for _ in 0..3 {
            let buffer = PinnedBuffer::new(device, 5001).unwrap();
            assert_eq!((buffer.len(), buffer.device().ordinal()), (5001, device.ordinal()));
            assert!(buffer.shared_file().is_some());
        }
        let refused = PinnedBuffer::new(device, 0).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
    }
}

fn different_lengths_and_overlaps_are_refused() {
    for device in devices().iter().take(1) {
        let gpu = |len| Arc::new(CudaMemory::new(device, len).unwrap());
        let refused = PlainCopy::new(gpu(100), gpu(101)).err().unwrap();
        assert!(refused.context().contains("one length"), "{refused}");
        let both = gpu(100);
        let refused = PlainCopy::new(both.clone(), both).err().unwrap();
        assert!(refused.context().contains("overlap"), "{refused}");
    }
}

fn only_whole_pages_are_compared() {
    let device = Device::open(0).unwrap();
    let memory = CudaMemory::new(&device, 100).unwrap();
    for (size, pages) in [(0, 1), (100, 0), (100, 2), (33, 3), (u64::MAX, 2)] {
        let refused = memory.first_mismatch(size, &vec![0; pages]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest, "{refused}");
    }
    // The first output of SplitMix64 for 1234567, as its authors published it. Zeros follow.
    memory.copy_in(0, &6_457_827_717_110_365_317_u64.to_le_bytes()).unwrap();
    assert_eq!(memory.first_mismatch(100, &[1_234_567]).unwrap(), Some(8));
}

/// The reason why there is no GPU. `None` if there is one.
fn missing() -> Option<String> {
    let why = Device::all().err()?;
    assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
    Some(why.to_string())
}

fn main() -> ExitCode {
    conformance::run_or_skip(
        missing(),
        conformance::tests![
            devices_have_names_addresses_and_attributes,
            bytes_go_in_and_out,
            addresses_of_others_are_checked,
            reach_follows_access,
            exports_show_no_neighbours,
            regions_copy_by_cuda,
            slices_of_cudarc_are_kept,
            dropping_memory_does_not_wait_for_the_gpu,
            from_the_host_over_every_gpu_and_back,
            page_locked_memory_can_be_shared_and_locked_again,
            different_lengths_and_overlaps_are_refused,
            only_whole_pages_are_compared,
        ],
    )
}

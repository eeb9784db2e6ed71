//! A GPU.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesOptions_enum as FlushOptions,
    CUflushGPUDirectRDMAWritesScope_enum as FlushScope, CUflushGPUDirectRDMAWritesTarget_enum as FlushTarget,
};
use multirail_spi::{Error, ErrorKind, Flush, Result};
use topology::Address;

use crate::attributes::ordinal_of;
use crate::background::run_later;
use crate::driver::{check, in_context, start};
use crate::kernels::{PageKernel, VerifyKernel};
use crate::stream::Stream;

/// A GPU and its primary context, which stays alive as long as the value. Clones share both.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    address: Option<Address>,
    uuid: Uuid,
    /// The GPUs whose memory this GPU is known to reach: one bit per ordinal.
    reached: AtomicU64,
    page_kernel: OnceLock<PageKernel>,
    verify_kernel: OnceLock<VerifyKernel>,
    /// The stream for work that its caller waits for.
    waited_stream: OnceLock<Stream>,
}

/// A GPU's UUID (`cuDeviceGetUuid`). All processes know the GPU by the same UUID, while its ordinal may differ.
pub type Uuid = [u8; 16];

/// Which GPUs see a NIC's writes to GPU memory in order, without a flush
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// No GPU: a reader has to flush first.
    None,
    /// The GPU that owns the memory.
    Owner,
    /// Every GPU.
    AllDevices,
}

/// The GPUs that are open in this process.
static OPEN: Mutex<Vec<Weak<DeviceInner>>> = Mutex::new(Vec::new());

// SAFETY: contexts may be used from any thread (CUDA driver API, "Context Management").
unsafe impl Send for DeviceInner {}
// SAFETY: as above; all that changes in it is atomic.
unsafe impl Sync for DeviceInner {}

impl Device {
    /// All GPUs that this process may use (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// `Unsupported` if there is no driver or the driver is too old; `NotFound` if there is no GPU.
    pub fn all() -> Result<Vec<Self>> {
        start()?;
        let mut count = 0;
        // SAFETY: the driver is started, and writes one number.
        check("find GPUs", "the number of GPUs", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        if count == 0 {
            return Err(Error::new(ErrorKind::NotFound, "find GPUs", "the driver shows no GPU"));
        }
        (0..count as u32).map(Self::open).collect()
    }

    /// Opens the GPU with this ordinal.
    pub fn open(ordinal: u32) -> Result<Self> {
        start()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|inner| inner.strong_count() > 0);
        if let Some(inner) = open.iter().filter_map(Weak::upgrade).find(|inner| inner.ordinal == ordinal) {
            return Ok(Self(inner));
        }
        let device = Self::retain(ordinal)?;
        open.push(Arc::downgrade(&device.0));
        Ok(device)
    }

    /// Opens the GPU with this UUID.
    ///
    /// # Errors
    /// `NotFound` if this process does not see the GPU (`CUDA_VISIBLE_DEVICES`).
    pub fn of_uuid(uuid: Uuid) -> Result<Self> {
        start()?;
        let found = visible().find(|(_, raw)| {
            let mut found = sys::CUuuid { bytes: [0; 16] };
            // SAFETY: the driver is started, and writes one value.
            let code = unsafe { sys::cuDeviceGetUuid_v2(&raw mut found, *raw) };
            code == sys::CUresult::CUDA_SUCCESS && found.bytes.map(|byte| byte as u8) == uuid
        });
        let Some((ordinal, _)) = found else {
            let why = "this process does not see the peer's GPU: add the GPU to CUDA_VISIBLE_DEVICES";
            return Err(Error::new(ErrorKind::NotFound, "find a GPU", why));
        };
        Self::open(ordinal)
    }

    /// The GPU on which the memory at `address` lies. `None` if that is host memory or no memory, or if there is no
    /// CUDA.
    pub fn of_address(address: u64) -> Option<Self> {
        start().ok()?;
        Self::open(ordinal_of(address)?).ok()
    }

    /// Any GPU that is open in this process.
    pub fn opened() -> Option<Self> {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().find_map(Weak::upgrade).map(Self)
    }

    /// The UUID, by which other processes know this GPU.
    pub fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    /// The number by which CUDA knows this GPU in this process.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The model, for example `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The PCI function, which is the GPU's place in the machine.
    pub fn address(&self) -> Option<Address> {
        self.0.address
    }

    /// The number of multiprocessors; 0 if the driver does not tell.
    pub fn processors(&self) -> u32 {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).try_into().unwrap_or(0)
    }

    /// Whether the GPU can export its memory as a DMA-BUF.
    pub fn has_dma_buf(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 1
    }

    /// Whether NICs can reach the GPU's memory at all.
    pub fn has_rdma(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) == 1
    }

    /// Which GPUs see a NIC's writes to this GPU's memory in order.
    pub fn writes_ordering(&self) -> WritesOrdering {
        match self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
            ..100 => WritesOrdering::None,
            100..200 => WritesOrdering::Owner,
            200.. => WritesOrdering::AllDevices,
        }
    }

    /// Whether [`flush_writes`](Self::flush_writes) works.
    pub fn can_flush_writes(&self) -> bool {
        let by_call = FlushOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & by_call != 0
    }

    /// Returns once the GPU's kernels see all bytes that NICs have written to its memory
    /// (`cuFlushGPUDirectRDMAWrites`).
    ///
    /// # Errors
    /// `Unsupported` if the GPU has no such flush.
    pub fn flush_writes(&self) -> Result<()> {
        let target = FlushTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        self.within("flush writes of NICs", || {
            // SAFETY: the call takes no memory, and runs in the GPU's context.
            let code = unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) };
            check("flush writes of NICs", "to flush GPU memory", code)
        })
    }

    /// Whether the GPU reaches the memory of `other` directly, by NVLink or PCIe. If it can, the call also enables its
    /// peer access.
    pub fn reaches(&self, other: &Self) -> bool {
        let bit = 1_u64.checked_shl(other.ordinal()).unwrap_or(0);
        if self.ordinal() == other.ordinal() || self.0.reached.load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        let mut can = 0;
        // SAFETY: both GPUs are open; it writes one number.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.0.raw, other.0.raw) };
        if check("reach a GPU", "the query for peer access", code).is_err() || can == 0 {
            return false;
        }
        let enabled = self.within("reach a GPU", || {
            // SAFETY: the other GPU's context is retained.
            match unsafe { sys::cuCtxEnablePeerAccess(other.0.context, 0) } {
                sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
                code => check("reach a GPU", "peer access", code),
            }
        });
        match enabled {
            Ok(()) => self.0.reached.fetch_or(bit, Ordering::Relaxed),
            Err(why) => {
                tracing::warn!(%why, gpu = self.ordinal(), other = other.ordinal(), "no peer access");
                return false;
            }
        };
        true
    }

    /// Prepares copies on this GPU: compiles the kernel, which takes a tenth of a second the first time.
    ///
    /// # Errors
    /// `Unsupported` if the GPU cannot run the kernel.
    pub fn prepare(&self) -> Result<()> {
        self.page_kernel().map(drop)
    }

    /// Copies `len` bytes between memory of this GPU and memory of any GPU or the host. Waits for this copy, and not
    /// for other work of the GPU.
    ///
    /// # Safety
    /// Both ranges are memory that stays allocated during the call.
    pub unsafe fn copy(&self, to: u64, from: u64, len: u64) -> Result<()> {
        let stream = self.waited_stream()?;
        // SAFETY: by the caller; the call waits for the copy.
        self.within("copy", || unsafe { stream.copy_now(to, from, len) })
    }

    /// Zeroes `len` bytes, and waits for that. It uses a stream of this crate's, because on the default stream it would
    /// wait for the work of others.
    ///
    /// # Safety
    /// The bytes are memory of this GPU that stays allocated during the call.
    pub(crate) unsafe fn zero(&self, start: u64, len: u64) -> Result<()> {
        let stream = self.waited_stream()?;
        // SAFETY: by the caller.
        self.within("zero GPU memory", || unsafe { stream.zero_now(start, len) })
    }

    /// The kernel that copies pages, compiled for this GPU at its first use.
    pub(crate) fn page_kernel(&self) -> Result<&PageKernel> {
        self.compiled(&self.0.page_kernel, PageKernel::load)
    }

    /// The kernel that compares pages, compiled for this GPU at its first use.
    pub(crate) fn verify_kernel(&self) -> Result<&VerifyKernel> {
        self.compiled(&self.0.verify_kernel, VerifyKernel::load)
    }

    fn compiled<'a, K>(&self, kernel: &'a OnceLock<K>, load: fn() -> Result<K>) -> Result<&'a K> {
        if let Some(kernel) = kernel.get() {
            return Ok(kernel);
        }
        let loaded = self.within("compile a kernel", load)?;
        Ok(kernel.get_or_init(|| loaded))
    }

    /// The stream for work that its caller waits for.
    pub(crate) fn waited_stream(&self) -> Result<&Stream> {
        if let Some(stream) = self.0.waited_stream.get() {
            return Ok(stream);
        }
        let opened = Stream::new(self.0.context)?;
        Ok(self.0.waited_stream.get_or_init(|| opened))
    }

    /// A new stream.
    pub(crate) fn stream(&self) -> Result<Stream> {
        Stream::new(self.0.context)
    }

    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.0.raw
    }

    /// The GPUs other than this one that can reach this one's memory, open or not.
    pub(crate) fn accessors(&self) -> impl Iterator<Item = sys::CUdevice> {
        let own = self.raw();
        visible().map(|(_, raw)| raw).filter(move |raw| *raw != own).filter(move |raw| {
            let mut can = 0;
            // SAFETY: the driver is started, and writes one number.
            let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, *raw, own) };
            code == sys::CUresult::CUDA_SUCCESS && can == 1
        })
    }

    /// The value of an attribute; 0 if the driver does not know the attribute.
    pub(crate) fn attribute(&self, attribute: Attribute) -> c_int {
        let mut value = 0;
        // SAFETY: the driver is started, and writes one number.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.0.raw) };
        check("open GPU", "an attribute", code).map_or(0, |()| value)
    }

    /// Runs `work` in the GPU's context. The thread's own context is current again afterwards.
    pub(crate) fn within<T>(&self, operation: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        in_context(self.0.context, operation, work)
    }

    /// Runs `work`, which frees something, in the GPU's context on the background thread. An error is logged, because
    /// the destructor that calls this cannot return it.
    pub(crate) fn free_later(
        &self,
        operation: &'static str,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) {
        let device = self.clone();
        run_later(move || device.free_now(operation, work));
    }

    /// As [`free_later`](Self::free_later), but on this thread, before the call returns.
    pub(crate) fn free_now(&self, operation: &'static str, work: impl FnOnce() -> Result<()>) {
        if let Err(why) = self.within(operation, work) {
            tracing::warn!(%why, "CUDA memory is not freed");
        }
    }

    fn retain(ordinal: u32) -> Result<Self> {
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let (mut raw, mut context, mut uuid) = (0, std::ptr::null_mut(), sys::CUuuid { bytes: [0; 16] });
        let what = format!("GPU {ordinal}");
        // SAFETY: the driver is started, and each call writes one value.
        unsafe {
            check("open GPU", &what, sys::cuDeviceGet(&raw mut raw, number))?;
            check("open GPU", &what, sys::cuDeviceGetUuid_v2(&raw mut uuid, raw))?;
            check("open GPU", &what, sys::cuDevicePrimaryCtxRetain(&raw mut context, raw))?;
        }
        let (name, address) = (name(raw), address(raw));
        Ok(Self(Arc::new(DeviceInner {
            ordinal,
            raw,
            context,
            name,
            address,
            uuid: uuid.bytes.map(|byte| byte as u8),
            reached: AtomicU64::new(0),
            page_kernel: OnceLock::new(),
            verify_kernel: OnceLock::new(),
            waited_stream: OnceLock::new(),
        })))
    }
}

impl Flush for Device {
    fn flush(&self) -> Result<()> {
        self.flush_writes()
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        // The stream is closed before its context is released.
        drop(self.waited_stream.take());
        // SAFETY: retained when the GPU was opened. A GPU that was lost returns an error, which a destructor cannot
        // report.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

/// All GPUs that this process sees, with their ordinals. It does not open them.
fn visible() -> impl Iterator<Item = (u32, sys::CUdevice)> {
    let mut count = 0;
    // SAFETY: the driver is started, and writes one number.
    let counted = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    let count = if counted == sys::CUresult::CUDA_SUCCESS { count } else { 0 };
    (0..count).filter_map(|ordinal| {
        let mut raw = 0;
        // SAFETY: as above.
        let code = unsafe { sys::cuDeviceGet(&raw mut raw, ordinal) };
        (code == sys::CUresult::CUDA_SUCCESS).then_some((ordinal as u32, raw))
    })
}

fn name(device: sys::CUdevice) -> String {
    text(|buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { sys::cuDeviceGetName(buffer, len, device) }
    })
}

fn address(device: sys::CUdevice) -> Option<Address> {
    let name = text(|buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { sys::cuDeviceGetPCIBusId(buffer, len, device) }
    });
    name.parse().ok()
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> sys::CUresult) -> String {
    let mut buffer = [0_u8; 256];
    let code = read(buffer.as_mut_ptr().cast(), buffer.len() as c_int);
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    check("open GPU", "its name", code).map_or(String::new(), |()| text.to_string_lossy().into_owned())
}

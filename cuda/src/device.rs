//! A GPU.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use multirail_spi::{Error, ErrorKind, Result};
use topology::Address;

use crate::context::within;
use crate::driver::{check, start};
use crate::function::Function;
use crate::kernel::PageKernel;
use crate::stream::Stream;
use crate::verify;
use crate::visible::{address, name, raws};

/// A GPU with its primary context, which it keeps alive. Clones share it.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    ordinal: u32,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    address: Option<Address>,
    uuid: Uuid,
    /// GPUs whose memory it reaches, a bit each by ordinal.
    reached: AtomicU64,
    kernel: OnceLock<PageKernel>,
    verifier: OnceLock<Function>,
    /// For what is waited for.
    waited: OnceLock<Stream>,
}

/// What a GPU is called by every process, whatever it counts (`cuDeviceGetUuid`).
pub type Uuid = [u8; 16];

/// The GPUs that are open in this process, by ordinal.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

// SAFETY: contexts may be used from any thread (CUDA driver API, "Context Management").
unsafe impl Send for Inner {}
// SAFETY: as above; what changes in it is atomic.
unsafe impl Sync for Inner {}

impl Device {
    /// All GPUs that this process may use (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// `Unsupported` without a driver, or with too old a one; `NotFound` without a GPU.
    pub fn all() -> Result<Vec<Self>> {
        start()?;
        let mut count = 0;
        // SAFETY: the driver is started, and writes one number.
        check("find GPUs", "to count them", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        if count == 0 {
            return Err(Error::new(ErrorKind::NotFound, "find GPUs", "the driver shows no GPU"));
        }
        (0..count as u32).map(Self::open).collect()
    }

    /// The GPU that CUDA counts so.
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

    fn retain(ordinal: u32) -> Result<Self> {
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let (mut raw, mut context, mut uuid) = (0, std::ptr::null_mut(), sys::CUuuid { bytes: [0; 16] });
        let what = format!("GPU {ordinal}");
        // SAFETY: the driver is started, and writes one value each.
        unsafe {
            check("open GPU", &what, sys::cuDeviceGet(&raw mut raw, number))?;
            check("open GPU", &what, sys::cuDeviceGetUuid_v2(&raw mut uuid, raw))?;
            check("open GPU", &what, sys::cuDevicePrimaryCtxRetain(&raw mut context, raw))?;
        }
        let (name, address) = (name(raw), address(raw));
        Ok(Self(Arc::new(Inner {
            ordinal,
            raw,
            context,
            name,
            address,
            uuid: uuid.bytes.map(|byte| byte as u8),
            reached: AtomicU64::new(0),
            kernel: OnceLock::new(),
            verifier: OnceLock::new(),
            waited: OnceLock::new(),
        })))
    }

    /// The GPU of that UUID.
    ///
    /// # Errors
    /// `NotFound` where this process does not see it (`CUDA_VISIBLE_DEVICES`).
    pub fn of_uuid(uuid: Uuid) -> Result<Self> {
        start()?;
        let found = raws().find(|raw| {
            let mut its = sys::CUuuid { bytes: [0; 16] };
            // SAFETY: the driver is started, and writes one value.
            let code = unsafe { sys::cuDeviceGetUuid_v2(&raw mut its, raw.1) };
            code == sys::CUresult::CUDA_SUCCESS && its.bytes.map(|byte| byte as u8) == uuid
        });
        let Some((ordinal, _)) = found else {
            let why = "this process does not see that GPU: let CUDA_VISIBLE_DEVICES name it, too";
            return Err(Error::new(ErrorKind::NotFound, "find a GPU", why));
        };
        Self::open(ordinal)
    }

    /// One that is open in this process, if there is any.
    pub fn opened() -> Option<Self> {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().find_map(Weak::upgrade).map(Self)
    }

    /// The GPU whose memory an address is; `None` if it is the host's or nobody's, or there is no CUDA.
    pub fn of_address(address: u64) -> Option<Self> {
        start().ok()?;
        let ordinal = crate::attributes::ordinal(address)?;
        Self::open(ordinal).ok()
    }

    /// What other processes know it by.
    pub fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    /// CUDA's number for it.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The model, `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its PCI function, which tells its place in the machine.
    pub fn address(&self) -> Option<Address> {
        self.0.address
    }

    /// Its multiprocessors; 0 where the driver does not say.
    pub fn processors(&self) -> u32 {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).try_into().unwrap_or(0)
    }

    /// Whether its memory can be exported as a DMA-BUF.
    pub fn has_dma_buf(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 1
    }

    /// Whether cards can reach its memory at all.
    pub fn has_rdma(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) == 1
    }

    /// Whether it reaches the memory of `other` itself, by NVLink or PCIe; from now on it may.
    pub fn reaches(&self, other: &Self) -> bool {
        let bit = 1_u64.checked_shl(other.ordinal()).unwrap_or(0);
        if self.ordinal() == other.ordinal() || self.0.reached.load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        let mut can = 0;
        // SAFETY: both are open; it writes one number.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.0.raw, other.0.raw) };
        if check("reach a GPU", "whether it can", code).is_err() || can == 0 {
            return false;
        }
        let enabled = self.within("reach a GPU", || {
            // SAFETY: the other's context is retained.
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

    /// Makes ready what copies on it need: compiles the kernel, which takes a tenth of a second the first time.
    ///
    /// # Errors
    /// `Unsupported` where the GPU cannot run it.
    pub fn prepare(&self) -> Result<()> {
        self.kernel().map(drop)
    }

    /// The kernel that copies pages, compiled for this GPU at its first use.
    pub(crate) fn kernel(&self) -> Result<&PageKernel> {
        self.compiled(&self.0.kernel, PageKernel::load)
    }

    /// The kernel that compares pages.
    pub(crate) fn verifier(&self) -> Result<&Function> {
        self.compiled(&self.0.verifier, verify::load)
    }

    fn compiled<'a, K>(&self, kernel: &'a OnceLock<K>, load: fn() -> Result<K>) -> Result<&'a K> {
        if let Some(kernel) = kernel.get() {
            return Ok(kernel);
        }
        let loaded = self.within("compile a kernel", load)?;
        Ok(kernel.get_or_init(|| loaded))
    }

    /// Copies `len` bytes between memory of its own and of any GPU or the host, and waits for it, not for
    /// other work.
    ///
    /// # Safety
    /// Both ends are memory that stays allocated through the call.
    pub unsafe fn copy(&self, to: u64, from: u64, len: u64) -> Result<()> {
        let stream = self.waited()?;
        // SAFETY: by the caller; it is waited for.
        self.within("copy", || unsafe { stream.copy_now(to, from, len) })
    }

    /// Zeroes `len` bytes, and waits for it: a null stream's would be no one's to wait for.
    ///
    /// # Safety
    /// They are memory of this GPU that stays allocated through the call.
    pub(crate) unsafe fn zero(&self, start: u64, len: u64) -> Result<()> {
        let stream = self.waited()?;
        // SAFETY: by the caller.
        self.within("zero GPU memory", || unsafe { stream.zero_now(start, len) })
    }

    /// The stream for what is waited for.
    pub(crate) fn waited(&self) -> Result<&Stream> {
        if let Some(stream) = self.0.waited.get() {
            return Ok(stream);
        }
        let opened = Stream::new(self.0.context)?;
        Ok(self.0.waited.get_or_init(|| opened))
    }

    pub(crate) fn stream(&self) -> Result<Stream> {
        Stream::new(self.0.context)
    }

    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.0.raw
    }

    /// 0 where the driver does not know it.
    pub(crate) fn attribute(&self, attribute: Attribute) -> c_int {
        let mut value = 0;
        // SAFETY: the driver is started, and writes one number.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.0.raw) };
        check("open GPU", "an attribute", code).map_or(0, |()| value)
    }

    /// Runs `work` in its context, and leaves the thread with the one it had.
    pub(crate) fn within<T>(&self, operation: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        within(self.0.context, operation, work)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // It goes with the context.
        drop(self.waited.take());
        // SAFETY: retained when it was opened. An error of a lost GPU has no one left to hear it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

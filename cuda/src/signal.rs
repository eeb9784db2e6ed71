//! A word of host memory that GPUs can wait for and write.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUdeviceptr, CUstream, CUstreamWaitValue_flags as Wait,
    CUstreamWriteValue_flags as Write,
};
use multirail_spi::{Result, Signal};

use crate::Device;
use crate::background::with_room;
use crate::driver::check;

/// A CUDA stream, as every library has it: `CUstream`, `cudaStream_t`, torch's `cuda_stream`. Null is the default
/// stream.
pub type RawStream = *mut c_void;

/// A 32-bit word in page-locked host memory that is mapped into every GPU's addresses. A stream waits for the word or
/// writes it; a kernel polls or writes it at [`device_address`](Self::device_address).
///
/// `ImmCounter::mirror` counts arrivals into a signal, and `WriteOptions::when` begins an operation by one. A kernel
/// that polls the word reads it as `volatile`, and fences (`__threadfence_system`) before it reads the bytes that the
/// word announces. A kernel that writes the word fences before.
pub struct CudaSignal {
    word: NonNull<AtomicU32>,
    address: CUdeviceptr,
    /// The flags of `cuStreamWaitValue32`.
    wait_flags: u32,
    device: Device,
}

// SAFETY: the word is an atomic at a fixed address, and any thread may free it.
unsafe impl Send for CudaSignal {}
// SAFETY: as above.
unsafe impl Sync for CudaSignal {}

impl CudaSignal {
    /// Allocates a word with the value 0 for the streams of this GPU.
    ///
    /// # Errors
    /// `Exhausted` if no memory can be locked (`ulimit -l`).
    pub fn new(device: &Device) -> Result<Self> {
        let (mut word, mut address) = (std::ptr::null_mut(), 0);
        with_room(|| {
            device.within("allocate a signal", || {
                let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
                // SAFETY: the context is current; the driver writes the address of new memory.
                let code = unsafe { sys::cuMemHostAlloc(&raw mut word, size_of::<AtomicU32>(), flags) };
                check("allocate a signal", "memory that is locked and mapped", code)
            })
        })?;
        let Some(word) = NonNull::new(word.cast::<AtomicU32>()) else {
            let why = "CUDA returned a null address for new memory";
            return Err(multirail_spi::Error::new(multirail_spi::ErrorKind::Io, "allocate a signal", why));
        };
        // SAFETY: allocated above, at least as aligned as a word, and nobody else has the address yet.
        unsafe { word.write(AtomicU32::new(0)) };
        // From here on the destructor frees the word if anything fails.
        let wait_flags = Wait::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let mut signal = Self { word, address, wait_flags, device: device.clone() };
        device.within("allocate a signal", || {
            // SAFETY: memory of CUDA that was mapped; the driver writes its address.
            let code =
                unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, word.as_ptr().cast(), 0) };
            check("allocate a signal", "its address on the GPU", code)
        })?;
        signal.address = address;
        if device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) == 1 {
            signal.wait_flags |= Wait::CU_STREAM_WAIT_VALUE_FLUSH as u32;
        }
        Ok(signal)
    }

    /// The word's address for kernels.
    pub fn device_address(&self) -> u64 {
        self.address
    }

    /// The GPU that the signal was made for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a stream that waits for the word also flushes what NICs have written to the GPU's memory
    /// (`CU_STREAM_WAIT_VALUE_FLUSH`). If it does not, [`Device::writes_ordering`] says whether a flush is needed.
    pub fn flushes_remote_writes(&self) -> bool {
        self.wait_flags & Wait::CU_STREAM_WAIT_VALUE_FLUSH as u32 != 0
    }

    /// Lets all later work of `stream` wait until the word has reached `value` (`cuStreamWaitValue32` with
    /// `CU_STREAM_WAIT_VALUE_GEQ`: the word may be up to 2^31 - 1 past the value).
    ///
    /// Only the word ends the wait. So its writer must write it in any case, as a mirror does with
    /// `OnPeerClosed::Pass`. Work that waits behind it may block everything that synchronises with the GPU, for example
    /// freeing memory.
    ///
    /// # Safety
    /// `stream` is a living stream of the GPU's primary context, and the signal outlives the wait.
    pub unsafe fn wait_on(&self, stream: RawStream, value: u32) -> Result<()> {
        self.device.within("wait for a signal", || {
            // SAFETY: the caller guarantees that the stream and the signal live; the address is memory that is mapped
            // into every context.
            let code = unsafe {
                sys::cuStreamWaitValue32_v2(stream as CUstream, self.address, value, self.wait_flags)
            };
            check("wait for a signal", "a wait in a stream", code)
        })
    }

    /// Lets `stream` store `value` once all its earlier work is done and visible to the whole system
    /// (`cuStreamWriteValue32`, which fences the whole system before the store).
    ///
    /// # Safety
    /// As [`wait_on`](Self::wait_on).
    pub unsafe fn write_on(&self, stream: RawStream, value: u32) -> Result<()> {
        let flags = Write::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        self.device.within("write a signal", || {
            // SAFETY: as in `wait_on`.
            let code =
                unsafe { sys::cuStreamWriteValue32_v2(stream as CUstream, self.address, value, flags) };
            check("write a signal", "a store in a stream", code)
        })
    }
}

impl Signal for CudaSignal {
    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: initialised when it was allocated, and freed with `self`. GPUs access it as an aligned word.
        unsafe { self.word.as_ref() }
    }
}

impl std::fmt::Debug for CudaSignal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let now = self.atomic().load(std::sync::atomic::Ordering::Acquire);
        f.debug_struct("CudaSignal").field("now", &now).field("gpu", &self.device.ordinal()).finish()
    }
}

impl Drop for CudaSignal {
    fn drop(&mut self) {
        let word = self.word.as_ptr() as usize;
        self.device.free_later("free a signal", move || {
            // SAFETY: allocated by `new`, and freed once.
            check("free a signal", "to free it", unsafe { sys::cuMemFreeHost(word as *mut c_void) })
        });
    }
}

//! A word of host memory that GPUs see, too.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUdeviceptr, CUstream, CUstreamWaitValue_flags as Wait,
    CUstreamWriteValue_flags as Write,
};
use multirail_spi::{Result, Signal};

use crate::Device;
use crate::driver::check;
use crate::reaper::with_room;

/// A stream of CUDA's, as every library has it: `CUstream`, `cudaStream_t`, what torch calls
/// `cuda_stream`. Null is the default stream.
pub type RawStream = *mut c_void;

/// A 32-bit word in page-locked memory of the host, mapped into every GPU's addresses: what a stream waits
/// for or writes, and a kernel polls or writes at [`device_address`](Self::device_address).
///
/// `ImmCounter::mirror` counts arrivals into one;
/// `WriteOptions::when` begins an operation by one. A kernel that
/// polls it reads it as `volatile`, and fences (`__threadfence_system`) before it reads what the word
/// announces; one that writes it fences before.
pub struct CudaWord {
    place: NonNull<AtomicU32>,
    address: CUdeviceptr,
    /// What a wait asks the GPU for.
    wait: u32,
    device: Device,
}

// SAFETY: the word is an atomic at an address that stays, and may be freed by any thread.
unsafe impl Send for CudaWord {}
// SAFETY: as above.
unsafe impl Sync for CudaWord {}

impl CudaWord {
    /// A word of 0 for that GPU's streams.
    ///
    /// # Errors
    /// `Exhausted` where no memory can be locked (`ulimit -l`).
    pub fn new(device: &Device) -> Result<Self> {
        let (mut place, mut address) = (std::ptr::null_mut(), 0);
        with_room(|| {
            device.within("allocate a word", || {
                let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
                // SAFETY: the context is current; the driver writes the address of new memory.
                let code = unsafe { sys::cuMemHostAlloc(&raw mut place, size_of::<AtomicU32>(), flags) };
                check("allocate a word", "memory that is locked and mapped", code)
            })
        })?;
        let Some(place) = NonNull::new(place.cast::<AtomicU32>()) else {
            let why = "CUDA gave memory at no address";
            return Err(multirail_spi::Error::new(multirail_spi::ErrorKind::Io, "allocate a word", why));
        };
        // SAFETY: allocated above, at least as aligned as a word, and nobody knows it yet.
        unsafe { place.write(AtomicU32::new(0)) };
        // From here on it is freed whatever happens.
        let mut word =
            Self { place, address, wait: Wait::CU_STREAM_WAIT_VALUE_GEQ as u32, device: device.clone() };
        device.within("allocate a word", || {
            // SAFETY: memory of CUDA's that was mapped; the driver writes its address.
            let code =
                unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, place.as_ptr().cast(), 0) };
            check("allocate a word", "its address on the GPU", code)
        })?;
        word.address = address;
        if device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) == 1 {
            word.wait |= Wait::CU_STREAM_WAIT_VALUE_FLUSH as u32;
        }
        Ok(word)
    }

    /// Where kernels find it.
    pub fn device_address(&self) -> u64 {
        self.address
    }

    /// Its GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether what waits for it also flushes what cards have written to the GPU's memory
    /// (`CU_STREAM_WAIT_VALUE_FLUSH`). Where it does not, [`Device::writes_ordering`] says whether
    /// that is needed.
    pub fn flushes_remote_writes(&self) -> bool {
        self.wait & Wait::CU_STREAM_WAIT_VALUE_FLUSH as u32 != 0
    }

    /// Has all later work of `stream` wait until the word has reached `value`
    /// (`cuStreamWaitValue32` with `CU_STREAM_WAIT_VALUE_GEQ`: it may be up to 2^31 - 1 past it).
    ///
    /// The wait has no end but the word: whoever writes it must do so in any case, as a mirror does
    /// with `AtEnd::Pass`. Work that waits behind it may hold up
    /// everything that synchronises with the GPU, freeing memory for one.
    ///
    /// # Safety
    /// `stream` is a living stream of the GPU's primary context, and the word outlives the wait.
    pub unsafe fn wait_on(&self, stream: RawStream, value: u32) -> Result<()> {
        self.device.within("wait for a word", || {
            // SAFETY: the stream and the life of the word are the caller's to see to; the address is of
            // memory that is mapped into every context.
            let code =
                unsafe { sys::cuStreamWaitValue32_v2(stream as CUstream, self.address, value, self.wait) };
            check("wait for a word", "a wait in a stream", code)
        })
    }

    /// Has `stream` store `value` once all its earlier work is done and visible to everybody
    /// (`cuStreamWriteValue32`, which fences the whole system before the store).
    ///
    /// # Safety
    /// As [`wait_on`](Self::wait_on).
    pub unsafe fn write_on(&self, stream: RawStream, value: u32) -> Result<()> {
        let flags = Write::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        self.device.within("write a word", || {
            // SAFETY: as in `wait_on`.
            let code =
                unsafe { sys::cuStreamWriteValue32_v2(stream as CUstream, self.address, value, flags) };
            check("write a word", "a store in a stream", code)
        })
    }
}

impl Signal for CudaWord {
    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: written when it was allocated, and freed with `self`. GPUs access it as an aligned word.
        unsafe { self.place.as_ref() }
    }
}

impl std::fmt::Debug for CudaWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let now = self.atomic().load(std::sync::atomic::Ordering::Acquire);
        f.debug_struct("CudaWord").field("now", &now).field("gpu", &self.device.ordinal()).finish()
    }
}

impl Drop for CudaWord {
    fn drop(&mut self) {
        let place = self.place.as_ptr() as usize;
        self.device.give_back("free a word", move || {
            // SAFETY: allocated by `new`, and freed once.
            check("free a word", "it", unsafe { sys::cuMemFreeHost(place as *mut c_void) })
        });
    }
}

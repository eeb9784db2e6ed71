//! GPUs as the driver shows them, open or not.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys;
use topology::Address;

use crate::Device;
use crate::driver::check;

/// All GPUs that this process sees, by ordinal, without opening them.
pub(crate) fn raws() -> impl Iterator<Item = (u32, sys::CUdevice)> {
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

/// The GPUs other than `device` that can reach its memory.
pub(crate) fn others(device: &Device) -> impl Iterator<Item = sys::CUdevice> {
    let own = device.raw();
    raws().map(|(_, raw)| raw).filter(move |raw| *raw != own).filter(move |raw| {
        let mut can = 0;
        // SAFETY: the driver is started, and writes one number.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, *raw, own) };
        code == sys::CUresult::CUDA_SUCCESS && can == 1
    })
}

/// The model.
pub(crate) fn name(device: sys::CUdevice) -> String {
    text(|buffer, len| {
        // SAFETY: the buffer is as long as said.
        unsafe { sys::cuDeviceGetName(buffer, len, device) }
    })
}

/// The PCI function.
pub(crate) fn address(device: sys::CUdevice) -> Option<Address> {
    let name = text(|buffer, len| {
        // SAFETY: the buffer is as long as said.
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

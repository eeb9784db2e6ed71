//! An opened card.

use std::ffi::CStr;
use std::sync::Arc;

use multirail_spi::{Error, ErrorKind, Flushes, Result};
use rdma_sys as ib;

use crate::device_memory::DeviceRegions;
use crate::objects::{Object, last_errno, library};
use crate::status::os_error;

/// The names of the InfiniBand and RoCE cards of this machine.
pub(crate) fn names() -> Result<Vec<String>> {
    with_list(|list| Ok(list.iter().map(|device| name(*device)).collect()))
}

/// Calls `with` with the library's list of these cards.
fn with_list<T>(with: impl FnOnce(&[*mut ib::ibv_device]) -> Result<T>) -> Result<T> {
    let library = library()?;
    let mut count = 0;
    // SAFETY: `count` receives the length of the list, which is freed once below.
    let list = unsafe { library.get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(os_error("find devices", "its list of devices", last_errno()));
    }
    // SAFETY: as above.
    let all = unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) };
    // EFA and iWARP cards connect in other ways. SAFETY: the list of the devices is not freed yet.
    let is_ours = |device: &*mut ib::ibv_device| unsafe { (**device).transport_type == ib::IBV_TRANSPORT_IB };
    let ours: Vec<_> = all.iter().copied().filter(is_ours).collect();
    let result = with(&ours);
    // SAFETY: the list was opened above. From now on only opened devices of it are used.
    unsafe { library.free_device_list(list) };
    result
}

fn name(device: *mut ib::ibv_device) -> String {
    let Ok(library) = library() else { return String::new() };
    // SAFETY: the list of the device is not freed yet, and the name lives as long as the list.
    unsafe { CStr::from_ptr(library.get_device_name(device)) }.to_string_lossy().into_owned()
}

/// An opened card. The fields are closed in order.
pub(crate) struct Device {
    pub(crate) pd: Object<ib::ibv_pd>,
    pub(crate) context: Object<ib::ibv_context>,
    pub(crate) limits: ib::ibv_device_attr,
    pub(crate) name: String,
    /// Registered memory that the processor cannot access.
    pub(crate) device_regions: DeviceRegions,
    pub(crate) flushes: Flushes,
}

impl Device {
    pub(crate) fn open(wanted: &str) -> Result<Arc<Self>> {
        let library = library()?;
        let context = with_list(|list| {
            let device = list.iter().find(|device| name(**device) == wanted).copied();
            let missing =
                || Error::new(ErrorKind::NotFound, "open", format!("there is no RDMA device {wanted}"));
            // SAFETY: the list of the device is not freed yet.
            Object::of(unsafe { library.open_device(device.ok_or_else(missing)?) }, "open")
        })?;
        // SAFETY: zero is a value of the structure; the device is open.
        let limits = unsafe {
            let mut limits: ib::ibv_device_attr = std::mem::zeroed();
            match library.query_device(context.as_ptr(), &raw mut limits) {
                0 => limits,
                code => return Err(os_error("open", "to tell its limits", code)),
            }
        };
        // SAFETY: the device is open.
        let pd = Object::of(unsafe { library.alloc_pd(context.as_ptr()) }, "open")?;
        Ok(Arc::new(Self {
            pd,
            context,
            limits,
            name: wanted.to_owned(),
            device_regions: DeviceRegions::default(),
            flushes: Flushes::default(),
        }))
    }

    /// Whether the card is software, which reports an invented speed.
    pub(crate) fn is_software(&self) -> bool {
        // rxe's vendor (`RXE_VENDOR_ID`).
        self.limits.vendor_id == 0xff_ffff
    }
}

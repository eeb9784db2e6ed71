//! Options of EFA's endpoints, each with its reason, and behaviour that depends on libfabric's version.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use libfabric_sys as sys;

use crate::library::{Info, library};
use crate::objects::Device;

/// An option whose value is a C `bool`, and the first version of libfabric that has it.
struct EndpointOption {
    name: &'static str,
    option: u32,
    since: u32,
    value: bool,
}

/// The options that are set on every endpoint of a card before it is enabled (fi_endpoint(3)).
const EFA_OPTIONS: [EndpointOption; 2] = [
    // The provider's calls to CUDA may deadlock with the user's streams, and registered GPU memory needs none. Without
    // peer-to-peer access the provider needs them: it would accept GPU memory that the card cannot reach, and stage it.
    // In that case it refuses this option, and the backend registers no GPU memory (see `apply`).
    EndpointOption {
        name: "FI_OPT_CUDA_API_PERMITTED",
        option: sys::FI_OPT_CUDA_API_PERMITTED,
        since: sys::version(1, 18),
        value: false,
    },
    // Peers of this host use loopback. The provider's own path for such peers does not support GPU memory, and looks to
    // this backend like the card's path.
    EndpointOption {
        name: "FI_OPT_SHARED_MEMORY_PERMITTED",
        option: sys::FI_OPT_SHARED_MEMORY_PERMITTED,
        since: sys::version(1, 21),
        value: false,
    },
];

/// The first version whose EFA provider lets the card write. Earlier providers send messages to the peer's provider,
/// which copies the bytes.
const NATIVE_WRITES_SINCE: u32 = sys::version(1, 18);

/// The first version whose EFA provider sets FI_REMOTE_CQ_DATA on every message with completion data. Earlier providers
/// do not set it on messages that arrived before their receive was posted (`rxr_msg_handle_unexp_match`; 1.17, 1.18).
const MESSAGE_DATA_FLAG_SINCE: u32 = sys::version(1, 19);

/// Whether a completion of a message may have completion data without the flag that says so.
pub(crate) fn omits_data_flag(info: &Info) -> bool {
    info.is_card() && library().is_ok_and(|library| library.version() < MESSAGE_DATA_FLAG_SINCE)
}

/// Whether the environment turns unsolicited write receive off (`FI_EFA_USE_UNSOLICITED_WRITE_RECV`, parsed as by
/// `fi_param_get_bool`).
pub(crate) fn disables_unsolicited_receives() -> bool {
    let value = std::env::var("FI_EFA_USE_UNSOLICITED_WRITE_RECV").unwrap_or_default();
    matches!(value.to_ascii_lowercase().as_str(), "0" | "no" | "false" | "off")
}

/// Whether libfabric is too old to let the card write.
pub(crate) fn lacks_native_writes() -> bool {
    library().is_ok_and(|library| library.version() < NATIVE_WRITES_SINCE)
}

/// The cards with which libfabric 1.17 lets the card read only if the environment says so (`vendor_part_id` in
/// `rxr_env_initialize`; as `efa_prov_info.c` prints it).
const CARDS_WITHOUT_READS: [&str; 2] = ["0xefa0", "0xefa1"];

/// Whether libfabric 1.17 may let the card read, to carry out this side's reads and the peers' long writes
/// (`RXR_LONGREAD_RTW_PKT`). If not, it copies every byte to this side's memory itself, in calls on the endpoint that
/// has received the byte.
pub(crate) fn may_use_device_reads(info: &Info) -> bool {
    // Parsed by `strtol` there. What does not look like zero counts as one.
    match std::env::var_os("FI_EFA_USE_DEVICE_RDMA") {
        Some(value) => value != "0",
        None => !info.card_model().is_some_and(|model| CARDS_WITHOUT_READS.contains(&model.as_str())),
    }
}

/// Whether writes are emulated on an enabled endpoint of a card.
pub(crate) fn emulates_writes(ep: *mut sys::fid_ep, info: &Info) -> bool {
    if !info.is_card() || lacks_native_writes() {
        return info.is_card();
    }
    let (mut emulates, mut len) = (false, size_of::<bool>());
    let (level, option) = (sys::FI_OPT_ENDPOINT as c_int, sys::FI_OPT_EFA_EMULATED_WRITE);
    // SAFETY: the endpoint is open; the value has room for the option, which is a bool.
    let code = unsafe { sys::fi_getopt(ep, level, option, (&raw mut emulates).cast(), &raw mut len) };
    // efa-direct does not know this option, and emulates nothing.
    code == 0 && emulates
}

/// Sets the options of a card's endpoint, and warns about those that it refuses.
///
/// # Safety
/// The endpoint is open and not enabled.
pub(crate) unsafe fn apply(ep: *mut sys::fid_ep, device: &Device) {
    if !device.info.is_card() {
        return;
    }
    let Ok(library) = library() else { return };
    for option in EFA_OPTIONS.iter().filter(|option| library.version() >= option.since) {
        let value = &raw const option.value;
        // SAFETY: by the caller; the value is only read, and has the length that is passed.
        let code = unsafe {
            sys::fi_setopt(ep, sys::FI_OPT_ENDPOINT as c_int, option.option as c_int, value.cast(), 1)
        };
        if code != 0 {
            let why = library.strerror(code);
            tracing::warn!(option.name, option.value, why, "libfabric refuses an option of its endpoint");
            if option.option == sys::FI_OPT_CUDA_API_PERMITTED {
                device.takes_gpu_memory.store(false, Ordering::Relaxed);
            }
        }
    }
}

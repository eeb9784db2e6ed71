//! Settings of EFA's endpoints, each with its reason.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use libfabric_sys as sys;

use crate::library::{Info, library};
use crate::objects::Device;

/// An option that is a C `bool`, and the library from which on it exists.
struct Setting {
    name: &'static str,
    option: u32,
    since: u32,
    value: bool,
}

/// For every endpoint of a card, before it is enabled (fi_endpoint(3)).
const OF_CARDS: [Setting; 2] = [
    // We move GPU memory by registrations alone. With its own calls of CUDA the provider may
    // deadlock with the user's streams. Where it cannot do without (no peer to peer), it would also
    // take memory that no card reaches, and stage it: it is given none then.
    Setting {
        name: "FI_OPT_CUDA_API_PERMITTED",
        option: sys::FI_OPT_CUDA_API_PERMITTED,
        since: sys::version(1, 18),
        value: false,
    },
    // Peers of this host have loopback. The provider's own path for them cannot be told from
    // the card's, and does not know GPU memory.
    Setting {
        name: "FI_OPT_SHARED_MEMORY_PERMITTED",
        option: sys::FI_OPT_SHARED_MEMORY_PERMITTED,
        since: sys::version(1, 21),
        value: false,
    },
];

/// The first library whose EFA provider lets the card write; before, it sends messages to its
/// likes at the peer, which copy.
const WRITES_SINCE: u32 = sys::version(1, 18);

/// The first library whose EFA provider says of every message that came with completion data: before,
/// those that were there ahead of their receive have the data, but not the flag
/// (`rxr_msg_handle_unexp_match`; 1.17, 1.18).
const DATA_IS_TOLD_SINCE: u32 = sys::version(1, 19);

/// Whether messages may come with completion data that is not told of.
pub(crate) fn hides_data(info: &Info) -> bool {
    info.card().is_some() && library().is_ok_and(|library| library.version() < DATA_IS_TOLD_SINCE)
}

/// Whether the environment has the provider do without unsolicited write receives (`FI_EFA_USE_UNSOLICITED_WRITE_RECV`;
/// read as `fi_param_get_bool` does).
pub(crate) fn forgoes_unsolicited() -> bool {
    let value = std::env::var("FI_EFA_USE_UNSOLICITED_WRITE_RECV").unwrap_or_default();
    matches!(value.to_ascii_lowercase().as_str(), "0" | "no" | "false" | "off")
}

/// Whether the library is that old.
pub(crate) fn is_before_native_writes() -> bool {
    library().is_ok_and(|library| library.version() < WRITES_SINCE)
}

/// Whether writes are emulated on an enabled endpoint of a card.
pub(crate) fn emulates_writes(ep: *mut sys::fid_ep, info: &Info) -> bool {
    if info.card().is_none() || is_before_native_writes() {
        return info.card().is_some();
    }
    let (mut emulates, mut len) = (false, size_of::<bool>());
    let (level, option) = (sys::FI_OPT_ENDPOINT as c_int, sys::FI_OPT_EFA_EMULATED_WRITE);
    // SAFETY: the endpoint is open; the value has room for what the option is, a bool. Where the
    // option is unknown, as on efa-direct, nothing is emulated.
    let code = unsafe { sys::fi_getopt(ep, level, option, (&raw mut emulates).cast(), &raw mut len) };
    code == 0 && emulates
}

/// Sets what a card's endpoint should have; says what it refuses.
///
/// # Safety
/// The endpoint is open and not enabled.
pub(crate) unsafe fn apply(ep: *mut sys::fid_ep, device: &Device) {
    if device.info.card().is_none() {
        return;
    }
    let Ok(library) = library() else { return };
    for setting in OF_CARDS.iter().filter(|setting| library.version() >= setting.since) {
        let value = &raw const setting.value;
        // SAFETY: by the caller; the value is read only, and as long as said.
        let code = unsafe {
            sys::fi_setopt(ep, sys::FI_OPT_ENDPOINT as c_int, setting.option as c_int, value.cast(), 1)
        };
        if code != 0 {
            let why = library.strerror(code);
            tracing::warn!(setting.name, setting.value, why, "libfabric does not take a setting");
            if setting.option == sys::FI_OPT_CUDA_API_PERMITTED {
                device.has_gpus.store(false, Ordering::Relaxed);
            }
        }
    }
}

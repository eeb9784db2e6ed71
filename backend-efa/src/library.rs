//! The one libfabric of this process, and what it offers.

use std::ffi::{CStr, c_char};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libfabric_sys as sys;
use libfabric_sys::Library;
use multirail_spi::{Error, ErrorKind, Result};

use crate::hmem;
use crate::settings;
use crate::signals;
use crate::status::refused;

/// The environment variable that names another library than [`USUAL`].
pub(crate) const VARIABLE: &str = "MULTIRAIL_LIBFABRIC";
const USUAL: &str = "libfabric.so.1";

/// The fabric of cards that libfabric has from 2.0 on.
const DIRECT: &str = "efa-direct";

/// The latest interface this backend was written to: a provider behaves as of the version
/// that is asked for, and refuses one above the library's (fi_getinfo(3)).
const AUDITED: u32 = sys::version(1, 20);

/// The library, opened at the first call; `MULTIRAIL_LIBFABRIC` may name it, if it is not empty.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    let open = || {
        let named = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty());
        let name = named.unwrap_or_else(|| USUAL.to_owned());
        // SAFETY: the name is the usual one, or the user's word for it.
        let opened = signals::load(|| unsafe { Library::open(&name) });
        match opened {
            Ok(opened) => opened.map_err(|why| why.to_string()),
            Err(why) => Err(format!("no thread to load {name} in: {why}")),
        }
    };
    LIBRARY
        .get_or_init(open)
        .as_ref()
        .map_err(|why| Error::new(ErrorKind::Unsupported, "open libfabric", why.as_str()))
}

/// The version of the libfabric of this process, major and minor; opens it if nobody has.
///
/// # Errors
/// `Unsupported`: it is not there, too old, or not libfabric.
pub fn libfabric_version() -> Result<(u16, u16)> {
    let version = library()?.version();
    Ok(((version >> 16) as u16, version as u16))
}

/// One entry of what can be opened.
#[derive(Debug)]
pub(crate) struct Info(NonNull<sys::fi_info>);

// SAFETY: an owned tree of plain values that is only read.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Info {
    fn of(raw: *const sys::fi_info) -> Result<Self> {
        // SAFETY: null, or an entry that libfabric gave and that lives.
        let copy = unsafe { library()?.fi_dupinfo(raw) };
        NonNull::new(copy).map(Self).ok_or_else(|| refused("open", "memory for its info", -12))
    }

    pub(crate) fn copy(&self) -> Result<Self> {
        Self::of(self.as_ptr())
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.0.as_ptr()
    }

    /// All of it.
    pub(crate) fn get(&self) -> &sys::fi_info {
        // SAFETY: owned, and never changed after it was made.
        unsafe { self.0.as_ref() }
    }

    pub(crate) fn domain(&self) -> &sys::fi_domain_attr {
        // SAFETY: libfabric gives every entry all attributes.
        unsafe { &*self.get().domain_attr }
    }

    pub(crate) fn tx(&self) -> &sys::fi_tx_attr {
        // SAFETY: as above.
        unsafe { &*self.get().tx_attr }
    }

    pub(crate) fn rx(&self) -> &sys::fi_rx_attr {
        // SAFETY: as above.
        unsafe { &*self.get().rx_attr }
    }

    pub(crate) fn endpoint(&self) -> &sys::fi_ep_attr {
        // SAFETY: as above.
        unsafe { &*self.get().ep_attr }
    }

    pub(crate) fn provider(&self) -> String {
        // SAFETY: as above; the name is null or a string.
        unsafe { text((*self.get().fabric_attr).prov_name) }
    }

    pub(crate) fn fabric_name(&self) -> String {
        // SAFETY: as above.
        unsafe { text((*self.get().fabric_attr).name) }
    }

    pub(crate) fn domain_name(&self) -> String {
        // SAFETY: the name is null or a string.
        unsafe { text(self.domain().name) }
    }

    /// Whether a card is behind it, and its line rate in bits per second if that is known.
    pub(crate) fn card(&self) -> Option<Option<u64>> {
        // SAFETY: null, or a card's attributes, which lie in the entry.
        unsafe {
            let link = self.get().nic.as_ref()?.link_attr.as_ref();
            Some(link.map(|link| link.speed as u64).filter(|speed| *speed > 0))
        }
    }

    /// The card's PCI function.
    pub(crate) fn address(&self) -> Option<topology::Address> {
        // SAFETY: null, or a card's attributes, which lie in the entry.
        let bus = unsafe { self.get().nic.as_ref()?.bus_attr.as_ref()? };
        if bus.bus_type != sys::FI_BUS_PCI {
            return None;
        }
        // SAFETY: of this type, the attributes are those of PCI.
        let pci = unsafe { bus.attr.pci };
        let (domain, bus) = (u32::from(pci.domain_id), pci.bus_id);
        Some(topology::Address { domain, bus, device: pci.device_id, function: pci.function_id })
    }

    /// Whether it is the fabric that goes to a card without the provider's own protocols.
    pub(crate) fn is_direct(&self) -> bool {
        self.fabric_name() == DIRECT
    }

    /// Whether it is the provider of shared memory, which has rules of its own.
    pub(crate) fn is_shm(&self) -> bool {
        self.provider() == "shm"
    }

    /// Whether the provider has a state of each peer, as EFA's own protocols do, that goes with its address.
    pub(crate) fn has_states(&self) -> bool {
        self.card().is_some() && !self.is_direct()
    }

    /// Whether a peer's write with an imm takes a posted receive here: of a card that cannot do without, or is not to.
    pub(crate) fn imms_take_receives(&self) -> bool {
        self.is_direct() && (self.get().mode & sys::FI_RX_CQ_DATA != 0 || settings::forgoes_unsolicited())
    }

    /// Whether it takes memory of GPUs.
    pub(crate) fn has_gpus(&self) -> bool {
        self.get().caps & sys::FI_HMEM != 0
    }

    /// Bytes of a packet, where a card tells.
    pub(crate) fn mtu(&self) -> Option<u64> {
        // SAFETY: as above.
        unsafe { Some(self.get().nic.as_ref()?.link_attr.as_ref()?.mtu as u64) }
    }

    /// Whether keys, addresses or memory have the property `bit` (`FI_MR_*`).
    pub(crate) fn memory_mode(&self, bit: u32) -> bool {
        self.domain().mr_mode as u32 & bit != 0
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        if let Ok(library) = library() {
            // SAFETY: ours, freed once.
            unsafe { library.fi_freeinfo(self.as_ptr()) }
        }
    }
}

unsafe fn text(name: *const c_char) -> String {
    match name.is_null() {
        true => String::new(),
        // SAFETY: by the caller a string, if not null.
        false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
    }
}

/// Whether it names a fabric of the provider efa.
pub(crate) fn is_of_cards(provider: &str) -> bool {
    matches!(provider, "efa" | DIRECT)
}

/// What `provider` offers for reliable datagrams with remote writes; of one local address
/// if `node` says so.
///
/// Cards that take memory of GPUs are opened so; libfabric then has its part of CUDA at work.
pub(crate) fn offers(provider: &str, node: Option<&str>) -> Result<Vec<Info>> {
    /// Cards were found without GPU memory, and none with it: by `efa`, by `efa-direct`.
    static HAVE_NONE: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
    if !is_of_cards(provider) || !hmem::may_be(library()?.version()) {
        return offers_with(provider, node, Wants::default());
    }
    let have_none = &HAVE_NONE[usize::from(provider == DIRECT)];
    if !have_none.load(Relaxed) {
        // What else is wrong is said by the answer without.
        let found = offers_with(provider, node, Wants { gpus: true, ..Wants::default() }).unwrap_or_default();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let mut found = offers_with(provider, node, Wants::default())?;
    if found.is_empty() && provider == DIRECT {
        // From 2.4 on it hides cards without unsolicited write receive from who does not say that imms may take
        // receives (`efa_user_info.c`). Who says so at once would have no unsolicited ones on any card.
        found = offers_with(provider, node, Wants { imms_take_receives: true, ..Wants::default() })?;
    }
    have_none.fetch_or(!found.is_empty(), Relaxed);
    Ok(found)
}

/// Capabilities that a search for devices asks for beyond the usual ones.
#[derive(Default, Clone, Copy)]
struct Wants {
    /// Memory of GPUs.
    gpus: bool,
    /// Peers' writes with an imm take posted receives.
    imms_take_receives: bool,
}

fn offers_with(provider: &str, node: Option<&str>, wants: Wants) -> Result<Vec<Info>> {
    let library = library()?;
    if provider == "shm" && node.is_some() {
        // It would be the name of the shared memory, the same for every process.
        let why = "shm has no addresses: leave the local address out";
        return Err(Error::new(ErrorKind::InvalidRequest, "open libfabric", why));
    }
    let hints = Info::of(null())?;
    let string = |text: &str| {
        let why = format!("{text:?} has a zero byte");
        std::ffi::CString::new(text).map_err(|_| Error::new(ErrorKind::InvalidRequest, "open libfabric", why))
    };
    let (name, node) = (string(provider)?, node.map(string).transpose()?);
    let mut list = null_mut();
    // SAFETY: the hints are ours and complete; their strings are malloc's, as fi_freeinfo
    // expects; the list is freed below.
    let code = unsafe {
        let hints = &mut *hints.as_ptr();
        hints.caps = u64::from(sys::FI_MSG | sys::FI_RMA);
        if is_of_cards(provider) {
            // Its completion data is the imm alone: who sent it, it says itself.
            // Not those of this host, which have loopback: else the provider opens shared memory
            // for them, beside every card.
            hints.caps |= sys::FI_SOURCE | sys::FI_REMOTE_COMM;
        }
        hints.mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
        if wants.imms_take_receives {
            hints.mode |= sys::FI_RX_CQ_DATA;
        }
        (*hints.ep_attr).type_ = sys::FI_EP_RDM;
        let domain = &mut *hints.domain_attr;
        domain.mr_mode =
            (sys::FI_MR_LOCAL | sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY) as i32;
        if wants.gpus {
            hints.caps |= sys::FI_HMEM;
            domain.mr_mode |= sys::FI_MR_HMEM as i32;
        }
        // The control thread inserts addresses and registers while the worker posts.
        domain.threading = sys::FI_THREAD_SAFE;
        domain.av_type = sys::FI_AV_TABLE;
        domain.resource_mgmt = sys::FI_RM_ENABLED;
        let fabric = &mut *hints.fabric_attr;
        let of_cards = c"efa".as_ptr();
        fabric.prov_name = libc::strdup(if is_of_cards(provider) { of_cards } else { name.as_ptr() });
        let flags = if node.is_some() { sys::FI_SOURCE } else { 0 };
        let node = node.as_ref().map_or(null(), |node| node.as_ptr());
        let version = AUDITED.min(library.version());
        // The first call initialises all providers, of which some are libraries that are loaded then.
        signals::keep(|| library.fi_getinfo(version, node, null(), flags, hints, &mut list))
    };
    match code {
        0 => {}
        code if code.unsigned_abs() == sys::FI_ENODATA => return Ok(Vec::new()),
        code => return Err(refused("open libfabric", &format!("provider {provider}"), code)),
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        found.push(Info::of(next));
        // SAFETY: an entry of the list.
        next = unsafe { (*next).next };
    }
    // SAFETY: the list is libfabric's, and copied.
    unsafe { library.fi_freeinfo(list) };
    let mut found = found.into_iter().collect::<Result<Vec<_>>>()?;
    found.retain(|info| !is_of_cards(provider) || info.fabric_name() == provider);
    Ok(found)
}

//! The libfabric of this process, and the devices that it offers.

use std::ffi::{CStr, c_char};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libfabric_sys as sys;
use libfabric_sys::Library;
use multirail_spi::{Error, ErrorKind, Paths, Result};

use crate::hmem;
use crate::settings;
use crate::signals;
use crate::status::call_error;

/// The environment variable that names the library to open, instead of [`DEFAULT_LIBRARY`].
pub(crate) const LIBRARY_VARIABLE: &str = "MULTIRAIL_LIBFABRIC";
const DEFAULT_LIBRARY: &str = "libfabric.so.1";

/// The fabric, from libfabric 2.0 on, that posts to cards without the protocols of EFA's provider.
const EFA_DIRECT: &str = "efa-direct";

/// The latest version of libfabric's API that this backend knows. A provider behaves as in the version that a program
/// asks for. libfabric refuses a version above its own (fi_getinfo(3)).
const API_VERSION: u32 = sys::version(1, 20);

/// The library. The first call opens it.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    let open = || {
        let named = std::env::var(LIBRARY_VARIABLE).ok().filter(|name| !name.is_empty());
        let name = named.unwrap_or_else(|| DEFAULT_LIBRARY.to_owned());
        // SAFETY: the name is libfabric's, or the user has chosen another library.
        let opened = signals::load(|| unsafe { Library::open(&name) });
        match opened {
            Ok(opened) => opened.map_err(|why| why.to_string()),
            Err(why) => Err(format!("no thread could be started to load {name}: {why}")),
        }
    };
    LIBRARY
        .get_or_init(open)
        .as_ref()
        .map_err(|why| Error::new(ErrorKind::Unsupported, "open libfabric", why.as_str()))
}

/// The version of this process's libfabric, major and minor. Opens the library if it is not open.
///
/// # Errors
/// `Unsupported` if there is no libfabric, if it is too old, or if the library is not libfabric.
pub fn libfabric_version() -> Result<(u16, u16)> {
    let version = library()?.version();
    Ok(((version >> 16) as u16, version as u16))
}

/// An `fi_info` of libfabric: a device, and how to open it.
#[derive(Debug)]
pub(crate) struct Info(NonNull<sys::fi_info>);

// SAFETY: an owned tree of plain values that is only read.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Info {
    fn of(raw: *const sys::fi_info) -> Result<Self> {
        // SAFETY: null, or a live entry that libfabric gave.
        let copy = unsafe { library()?.fi_dupinfo(raw) };
        NonNull::new(copy).map(Self).ok_or_else(|| call_error("open", "memory for its info", -12))
    }

    pub(crate) fn copy(&self) -> Result<Self> {
        Self::of(self.as_ptr())
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.0.as_ptr()
    }

    /// The `fi_info` itself.
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

    /// The path of the provider's bytes.
    pub(crate) fn path(&self) -> Paths {
        let provider = self.provider();
        // A layered provider is named with the core provider first: `tcp;ofi_rxm`.
        match provider.split(';').next().unwrap_or_default() {
            "shm" | "sm2" => Paths::MEMORY_COPY,
            _ if self.is_card() => Paths::RDMA,
            _ => Paths::SOCKETS,
        }
    }

    /// Whether the device is a card, that is, a NIC. Software providers (`tcp`, `shm`) have none.
    pub(crate) fn is_card(&self) -> bool {
        !self.get().nic.is_null()
    }

    /// The card's line rate in bits per second; `None` if there is no card, or if its rate is unknown.
    pub(crate) fn link_bits_per_s(&self) -> Option<u64> {
        // SAFETY: null, or a card's attributes, which lie in the entry.
        let link = unsafe { self.get().nic.as_ref()?.link_attr.as_ref()? };
        Some(link.speed as u64).filter(|speed| *speed > 0)
    }

    /// The card's model, as the provider prints it: `0xefa1`.
    pub(crate) fn card_model(&self) -> Option<String> {
        // SAFETY: null, or a card's attributes, which lie in the entry; the text is null or a string.
        unsafe { Some(text(self.get().nic.as_ref()?.device_attr.as_ref()?.device_id)) }
    }

    /// The card's PCI function.
    pub(crate) fn pci_address(&self) -> Option<topology::Address> {
        // SAFETY: null, or a card's attributes, which lie in the entry.
        let bus = unsafe { self.get().nic.as_ref()?.bus_attr.as_ref()? };
        if bus.bus_type != sys::FI_BUS_PCI {
            return None;
        }
        // SAFETY: with this type, the attributes are those of PCI.
        let pci = unsafe { bus.attr.pci };
        let (domain, bus) = (u32::from(pci.domain_id), pci.bus_id);
        Some(topology::Address { domain, bus, device: pci.device_id, function: pci.function_id })
    }

    /// Whether this is the fabric [`EFA_DIRECT`].
    pub(crate) fn is_efa_direct(&self) -> bool {
        self.fabric_name() == EFA_DIRECT
    }

    /// Whether this is the provider `shm`, whose endpoints communicate through shared memory.
    pub(crate) fn is_shm(&self) -> bool {
        self.provider() == "shm"
    }

    /// Whether requests go through the protocols of EFA's provider, as they do on all cards but with [`EFA_DIRECT`].
    /// The provider then keeps state for each peer address, and drops it when the address is removed.
    pub(crate) fn uses_efa_protocols(&self) -> bool {
        self.is_card() && !self.is_efa_direct()
    }

    /// Whether a peer's write with an imm consumes a posted receive. True on `efa-direct` for a card without
    /// unsolicited write receive, or if the environment turns that off.
    pub(crate) fn imms_consume_receives(&self) -> bool {
        self.is_efa_direct()
            && (self.get().mode & sys::FI_RX_CQ_DATA != 0 || settings::disables_unsolicited_receives())
    }

    /// Whether the device registers GPU memory.
    pub(crate) fn takes_gpu_memory(&self) -> bool {
        self.get().caps & sys::FI_HMEM != 0
    }

    /// The largest packet in bytes, if a card reports it.
    pub(crate) fn mtu(&self) -> Option<u64> {
        // SAFETY: as above.
        unsafe { Some(self.get().nic.as_ref()?.link_attr.as_ref()?.mtu as u64) }
    }

    /// Whether the provider's memory registration has the property `bit` (`FI_MR_*`).
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

/// # Safety
/// `name` is null or a string.
unsafe fn text(name: *const c_char) -> String {
    match name.is_null() {
        true => String::new(),
        // SAFETY: by the caller: a string, if not null.
        false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
    }
}

/// Whether `provider` is `efa` or `efa-direct`: two fabrics of libfabric's provider efa, for cards.
pub(crate) fn is_efa_provider(provider: &str) -> bool {
    matches!(provider, "efa" | EFA_DIRECT)
}

/// The devices of `provider` that support reliable datagrams with remote writes. If `node` is given, only those with
/// that local address.
///
/// Asks for cards that register GPU memory first. This makes libfabric initialise its support of CUDA.
pub(crate) fn find_infos(provider: &str, node: Option<&str>) -> Result<Vec<Info>> {
    /// Whether an earlier call found cards, but none that registers GPU memory: for `efa` and for `efa-direct`.
    static NO_GPU_MEMORY: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
    if !is_efa_provider(provider) || !hmem::supports_gpu_memory(library()?.version()) {
        return get_infos(provider, node, ExtraCapabilities::default());
    }
    let no_gpu_memory = &NO_GPU_MEMORY[usize::from(provider == EFA_DIRECT)];
    if !no_gpu_memory.load(Relaxed) {
        // If this search fails for another reason, the search without GPU memory below reports it.
        let found =
            get_infos(provider, node, ExtraCapabilities { gpu_memory: true, ..ExtraCapabilities::default() })
                .unwrap_or_default();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let mut found = get_infos(provider, node, ExtraCapabilities::default())?;
    if found.is_empty() && provider == EFA_DIRECT {
        // From 2.4 on, libfabric lists a card without unsolicited write receive only if the hints allow imms to consume
        // receives (`efa_user_info.c`). The search above does not allow it, because then libfabric would use
        // unsolicited write receive on no card.
        found = get_infos(
            provider,
            node,
            ExtraCapabilities { imms_consume_receives: true, ..ExtraCapabilities::default() },
        )?;
    }
    no_gpu_memory.fetch_or(!found.is_empty(), Relaxed);
    Ok(found)
}

/// What a search for devices asks for, beside what it always asks for.
#[derive(Default, Clone, Copy)]
struct ExtraCapabilities {
    /// The device registers GPU memory.
    gpu_memory: bool,
    /// A peer's write with an imm may consume a posted receive.
    imms_consume_receives: bool,
}

fn get_infos(provider: &str, node: Option<&str>, extra: ExtraCapabilities) -> Result<Vec<Info>> {
    let library = library()?;
    if provider == "shm" && node.is_some() {
        // shm would use the address as the name of its shared memory, the same name in every process.
        let why = "shm has no local address: do not give one";
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
        if is_efa_provider(provider) {
            // FI_SOURCE: completion data has room for the imm alone, so the source address identifies the sender.
            // FI_REMOTE_COMM alone: peers of this host use loopback. Without this the provider would open shared memory
            // for such peers, for every card.
            hints.caps |= sys::FI_SOURCE | sys::FI_REMOTE_COMM;
        }
        hints.mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
        if extra.imms_consume_receives {
            hints.mode |= sys::FI_RX_CQ_DATA;
        }
        (*hints.ep_attr).type_ = sys::FI_EP_RDM;
        let domain = &mut *hints.domain_attr;
        domain.mr_mode =
            (sys::FI_MR_LOCAL | sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY) as i32;
        if extra.gpu_memory {
            hints.caps |= sys::FI_HMEM;
            domain.mr_mode |= sys::FI_MR_HMEM as i32;
        }
        // Control threads insert addresses and register memory while the worker posts.
        domain.threading = sys::FI_THREAD_SAFE;
        domain.av_type = sys::FI_AV_TABLE;
        domain.resource_mgmt = sys::FI_RM_ENABLED;
        let fabric = &mut *hints.fabric_attr;
        let efa = c"efa".as_ptr();
        fabric.prov_name = libc::strdup(if is_efa_provider(provider) { efa } else { name.as_ptr() });
        let flags = if node.is_some() { sys::FI_SOURCE } else { 0 };
        let node = node.as_ref().map_or(null(), |node| node.as_ptr());
        let version = API_VERSION.min(library.version());
        // The first call loads the providers that are libraries of their own, and initialises all providers.
        signals::keep(|| library.fi_getinfo(version, node, null(), flags, hints, &mut list))
    };
    match code {
        0 => {}
        code if code.unsigned_abs() == sys::FI_ENODATA => return Ok(Vec::new()),
        code => return Err(call_error("open libfabric", &format!("provider {provider}"), code)),
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
    found.retain(|info| !is_efa_provider(provider) || info.fabric_name() == provider);
    Ok(found)
}

//! The library, opened at run time.

use core::ffi::{c_char, c_int, c_void};

use crate::generated::*;

/// The reason why libibverbs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library cannot be opened. The text is the dynamic linker's.
    #[error("{name} cannot be opened: {words}")]
    Missing {
        /// The name that was opened.
        name: String,
        /// The text of the dynamic linker.
        words: String,
    },
    /// The library lacks a function that every libibverbs of rdma-core has.
    #[error("{name} has no {symbol}: it is not libibverbs of rdma-core 34 or later")]
    Symbol {
        /// The name that was opened.
        name: String,
        /// The function, with its version.
        symbol: &'static str,
    },
    /// libibverbs does not exist for this system.
    #[error("libibverbs is used on Linux with glibc only")]
    System,
}

/// The used functions, with the version of each symbol (libibverbs.map of rdma-core).
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal @ $version:literal:
        ($($arg:ident: $type:ty),*) $(-> $ret:ty)?;)*) => {
        /// An open libibverbs. It is never closed: its drivers may leave things behind.
        #[derive(Clone, Copy)]
        pub struct Library {
            $($name: unsafe extern "C" fn($($type),*) $(-> $ret)?,)*
            reg_dmabuf_mr: Option<RegDmabuf>,
        }

        impl Library {
            /// Opens `name`: a path, or a name that the dynamic linker finds, like `libibverbs.so.1`.
            ///
            /// # Errors
            /// The library is missing, or not libibverbs.
            ///
            /// # Safety
            /// Opening a library runs its code. The caller guarantees that the library is libibverbs.
            #[cfg(all(target_os = "linux", target_env = "gnu"))]
            pub unsafe fn open(name: &str) -> Result<Self, LoadError> {
                // SAFETY: the caller answers for the code that runs.
                let handle = unsafe { handle(name)? };
                // SAFETY: the handle is open; the functions of these names and versions have the types
                // of the fields (infiniband/verbs.h).
                unsafe {
                    Ok(Self {
                        $($name: find(handle, $symbol, $version).ok_or_else(|| LoadError::Symbol {
                            name: name.to_owned(),
                            symbol: concat!($symbol, "@", $version),
                        })?,)*
                        reg_dmabuf_mr: find(handle, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"),
                    })
                }
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// The contract is on the page of
                #[doc = concat!("`", $symbol, "`")]
                /// in libibverbs' manual: objects are open, pointers valid for as long as it says.
                #[inline]
                pub unsafe fn $name(&self, $($arg: $type),*) $(-> $ret)? {
                    // SAFETY: by the caller.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

type RegDmabuf = unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

functions! {
    /// Lists the devices, and writes their number.
    get_device_list = "ibv_get_device_list" @ "IBVERBS_1.1": (count: *mut c_int) -> *mut *mut ibv_device;
    /// Frees a list. Opened devices stay open.
    free_device_list = "ibv_free_device_list" @ "IBVERBS_1.1": (list: *mut *mut ibv_device);
    /// The name of a device.
    get_device_name = "ibv_get_device_name" @ "IBVERBS_1.1": (device: *mut ibv_device) -> *const c_char;
    /// Opens a device.
    open_device = "ibv_open_device" @ "IBVERBS_1.1": (device: *mut ibv_device) -> *mut ibv_context;
    /// Closes a device.
    close_device = "ibv_close_device" @ "IBVERBS_1.1": (context: *mut ibv_context) -> c_int;
    /// Writes the limits of a device.
    query_device = "ibv_query_device" @ "IBVERBS_1.1":
        (context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    /// Writes the state of a port. The caller zeroes the fields that came after IBVERBS_1.1, because the call does not
    /// write them.
    query_port = "ibv_query_port" @ "IBVERBS_1.1":
        (context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    /// Writes all GIDs of a device. Returns their number, or a negative errno.
    query_gid_table = "_ibv_query_gid_table" @ "IBVERBS_1.11":
        (context: *mut ibv_context, entries: *mut ibv_gid_entry, room: usize, flags: u32, size: usize) -> isize;
    /// Writes a partition key of a port.
    query_pkey = "ibv_query_pkey" @ "IBVERBS_1.1":
        (context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    /// Allocates a protection domain.
    alloc_pd = "ibv_alloc_pd" @ "IBVERBS_1.1": (context: *mut ibv_context) -> *mut ibv_pd;
    /// Frees a protection domain.
    dealloc_pd = "ibv_dealloc_pd" @ "IBVERBS_1.1": (pd: *mut ibv_pd) -> c_int;
    /// Registers memory. Peers address its first byte as `iova`.
    reg_mr_iova2 = "ibv_reg_mr_iova2" @ "IBVERBS_1.8":
        (pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: u32) -> *mut ibv_mr;
    /// Deregisters memory.
    dereg_mr = "ibv_dereg_mr" @ "IBVERBS_1.1": (mr: *mut ibv_mr) -> c_int;
    /// Creates a channel for the events of completion queues.
    create_comp_channel = "ibv_create_comp_channel" @ "IBVERBS_1.0":
        (context: *mut ibv_context) -> *mut ibv_comp_channel;
    /// Destroys a channel.
    destroy_comp_channel = "ibv_destroy_comp_channel" @ "IBVERBS_1.0": (channel: *mut ibv_comp_channel) -> c_int;
    /// Creates a completion queue.
    create_cq = "ibv_create_cq" @ "IBVERBS_1.1":
        (context: *mut ibv_context, entries: c_int, user: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int)
            -> *mut ibv_cq;
    /// Destroys a completion queue. All its events must be acknowledged.
    destroy_cq = "ibv_destroy_cq" @ "IBVERBS_1.1": (cq: *mut ibv_cq) -> c_int;
    /// Reads the next event of a channel.
    get_cq_event = "ibv_get_cq_event" @ "IBVERBS_1.1":
        (channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, user: *mut *mut c_void) -> c_int;
    /// Acknowledges events.
    ack_cq_events = "ibv_ack_cq_events" @ "IBVERBS_1.1": (cq: *mut ibv_cq, count: u32);
    /// Creates a shared receive queue.
    create_srq = "ibv_create_srq" @ "IBVERBS_1.1":
        (pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    /// Destroys a shared receive queue.
    destroy_srq = "ibv_destroy_srq" @ "IBVERBS_1.1": (srq: *mut ibv_srq) -> c_int;
    /// Creates a queue pair.
    create_qp = "ibv_create_qp" @ "IBVERBS_1.1":
        (pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    /// Modifies a queue pair.
    modify_qp = "ibv_modify_qp" @ "IBVERBS_1.1":
        (qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    /// Destroys a queue pair.
    destroy_qp = "ibv_destroy_qp" @ "IBVERBS_1.1": (qp: *mut ibv_qp) -> c_int;
    /// Reads the next event of a device other than completions.
    get_async_event = "ibv_get_async_event" @ "IBVERBS_1.1":
        (context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    /// Acknowledges such an event.
    ack_async_event = "ibv_ack_async_event" @ "IBVERBS_1.1": (event: *mut ibv_async_event);
    /// The text of a completion's status.
    wc_status_str = "ibv_wc_status_str" @ "IBVERBS_1.1": (status: ibv_wc_status) -> *const c_char;
}

impl Library {
    /// Fails: this system has no such library.
    ///
    /// # Errors
    /// Always [`LoadError::System`].
    ///
    /// # Safety
    /// The call opens nothing.
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    pub unsafe fn open(_name: &str) -> Result<Self, LoadError> {
        Err(LoadError::System)
    }

    /// Registers a part of a DMA-BUF. `None` if the library is older than rdma-core 34.
    ///
    /// # Safety
    /// As ibv_reg_mr(3).
    pub unsafe fn reg_dmabuf_mr(
        &self,
        pd: *mut ibv_pd,
        offset: u64,
        len: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> Option<*mut ibv_mr> {
        // SAFETY: by the caller.
        self.reg_dmabuf_mr.map(|register| unsafe { register(pd, offset, len, iova, fd, access) })
    }
}

/// # Safety
/// Opening the library runs its code.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn handle(name: &str) -> Result<*mut c_void, LoadError> {
    let missing = |words: String| LoadError::Missing { name: name.to_owned(), words };
    let path = std::ffi::CString::new(name).map_err(|_| missing("its name has a zero byte".to_owned()))?;
    // SAFETY: the string ends with a zero byte; the caller answers for the code that runs.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: after a failure the call returns a string, which is valid until this thread's next call.
    let words = unsafe {
        let words = libc::dlerror();
        match words.is_null() {
            true => "no reason was given".to_owned(),
            false => core::ffi::CStr::from_ptr(words).to_string_lossy().into_owned(),
        }
    };
    Err(missing(words))
}

/// A function of an open library, if the library has this version of it.
///
/// # Safety
/// `handle` is open, and `F` is the type of pointers to that function.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn find<F: Copy>(handle: *mut c_void, symbol: &str, version: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let (symbol, version) = (std::ffi::CString::new(symbol).ok()?, std::ffi::CString::new(version).ok()?);
    // SAFETY: the caller passes an open handle; the strings end with a zero byte.
    let found = unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) };
    // SAFETY: by the caller, `F` is the type of that pointer, and has its size.
    (!found.is_null()).then(|| unsafe { core::mem::transmute_copy(&found) })
}

/// Defines one inline call. It returns `EOPNOTSUPP` if the table lacks the entry, as a failed call does.
macro_rules! inline_call {
    ($(#[$doc:meta])* fn $name:ident($object:ident: *mut $kind:ty $(, $arg:ident: $type:ty)*) = $entry:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The contract is on the call's page in libibverbs' manual: the object is open, and pointers are
        /// valid for as long as that page says.
        #[inline]
        pub unsafe fn $name($object: *mut $kind $(, $arg: $type)*) -> c_int {
            // SAFETY: an open object has a device, whose table lives as long as the object; the caller upholds the
            // rest.
            unsafe {
                match (*(*$object).context).ops.$entry {
                    Some(entry) => entry($object $(, $arg)*),
                    None => EOPNOTSUPP,
                }
            }
        }
    };
}

/// The number of Linux. libibverbs' headers do not define it.
const EOPNOTSUPP: c_int = 95;

inline_call!(/// Posts a chain of requests. Returns an errno; `bad` then is the first request that was not posted.
    fn ibv_post_send(qp: *mut ibv_qp, chain: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) = post_send);
inline_call!(/// Posts a chain of receives to a shared queue. Returns as [`ibv_post_send`].
    fn ibv_post_srq_recv(srq: *mut ibv_srq, chain: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) = post_srq_recv);
inline_call!(/// Reads up to `room` completions. Returns their number, or a negative number.
    fn ibv_poll_cq(cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) = poll_cq);
inline_call!(/// Asks for an event with the next completion.
    fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) = req_notify_cq);

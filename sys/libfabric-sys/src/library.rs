//! The library, opened at run time.

use core::ffi::{c_char, c_int, c_void};

use crate::generated::*;

/// The reason why libfabric cannot be used.
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
    /// The library is older than 1.17, whose headers these bindings are made from.
    #[error("{name} is version {}.{}, and at least 1.17 is needed", found >> 16, found & 0xffff)]
    TooOld {
        /// The name that was opened.
        name: String,
        /// Its version, as `fi_version` returns it.
        found: u32,
    },
    /// The library lacks a function that every libfabric has.
    #[error("{name} has no {symbol}: it is not libfabric")]
    Symbol {
        /// The name that was opened.
        name: String,
        /// The function.
        symbol: &'static str,
    },
    /// libfabric does not exist for this system.
    #[error("libfabric is used on Linux with glibc only")]
    System,
}

/// An open libfabric. It is never closed: providers leave threads and exit handlers behind.
#[derive(Clone, Copy)]
pub struct Library {
    getinfo: GetInfo,
    freeinfo: unsafe extern "C" fn(*mut fi_info),
    dupinfo: unsafe extern "C" fn(*const fi_info) -> *mut fi_info,
    fabric: unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    version: u32,
}

type GetInfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;

impl Library {
    /// Opens `name`: a path, or a name that the dynamic linker finds, like `libfabric.so.1`.
    ///
    /// # Errors
    /// The library is missing, too old, or not libfabric.
    ///
    /// # Safety
    /// Opening a library runs its code. The caller guarantees that the library is libfabric.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    pub unsafe fn open(name: &str) -> Result<Self, LoadError> {
        let missing = |words: String| LoadError::Missing { name: name.to_owned(), words };
        let path =
            std::ffi::CString::new(name).map_err(|_| missing("its name has a zero byte".to_owned()))?;
        // SAFETY: the string ends with a zero byte; the caller answers for the code that runs.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failure the call returns a string, which is valid until this thread's next call.
            let words = unsafe {
                let words = libc::dlerror();
                match words.is_null() {
                    true => "no reason was given".to_owned(),
                    false => core::ffi::CStr::from_ptr(words).to_string_lossy().into_owned(),
                }
            };
            return Err(missing(words));
        }
        // The versions of the symbols are those whose structures begin as in 1.17, and that every
        // libfabric from 1.17 on exports (libfabric.map).
        // SAFETY: the handle is open; libfabric's functions of these names and versions have
        // the types of the fields, and `fi_version` has the stated type.
        let this = unsafe {
            let version: unsafe extern "C" fn() -> u32 = find(handle, name, c"fi_version", c"FABRIC_1.0")?;
            Self {
                getinfo: find(handle, name, c"fi_getinfo", c"FABRIC_1.3")?,
                freeinfo: find(handle, name, c"fi_freeinfo", c"FABRIC_1.3")?,
                dupinfo: find(handle, name, c"fi_dupinfo", c"FABRIC_1.3")?,
                fabric: find(handle, name, c"fi_fabric", c"FABRIC_1.1")?,
                strerror: find(handle, name, c"fi_strerror", c"FABRIC_1.0")?,
                version: version(),
            }
        };
        match this.version < crate::version(1, 17) {
            true => Err(LoadError::TooOld { name: name.to_owned(), found: this.version }),
            false => Ok(this),
        }
    }

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

    /// The version of the library, `FI_VERSION(major, minor)`.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Lists the fabrics and domains that can be opened. Returns `-FI_ENODATA` if there are none.
    ///
    /// # Safety
    /// As fi_getinfo(3).
    pub unsafe fn fi_getinfo(
        &self,
        version: u32,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const fi_info,
        info: *mut *mut fi_info,
    ) -> c_int {
        // SAFETY: by the caller.
        unsafe { (self.getinfo)(version, node, service, flags, hints, info) }
    }

    /// Frees a list of [`Library::fi_getinfo`] or a copy.
    ///
    /// # Safety
    /// As fi_freeinfo(3).
    pub unsafe fn fi_freeinfo(&self, info: *mut fi_info) {
        // SAFETY: by the caller.
        unsafe { (self.freeinfo)(info) }
    }

    /// Copies one entry. For null, allocates an empty entry, as `fi_allocinfo` does.
    ///
    /// # Safety
    /// As fi_dupinfo(3).
    pub unsafe fn fi_dupinfo(&self, info: *const fi_info) -> *mut fi_info {
        // SAFETY: by the caller.
        unsafe { (self.dupinfo)(info) }
    }

    /// Opens a fabric.
    ///
    /// # Safety
    /// As fi_fabric(3).
    pub unsafe fn fi_fabric(
        &self,
        attr: *mut fi_fabric_attr,
        fabric: *mut *mut fid_fabric,
        context: *mut c_void,
    ) -> c_int {
        // SAFETY: by the caller.
        unsafe { (self.fabric)(attr, fabric, context) }
    }

    /// The text of an error number of libfabric. The sign does not matter.
    pub fn strerror(&self, errno: c_int) -> String {
        // SAFETY: the call takes any number and returns a string that lives as long as the library.
        let words = unsafe { (self.strerror)(errno.abs()) };
        match words.is_null() {
            true => format!("error {errno}"),
            // SAFETY: as above.
            false => unsafe { core::ffi::CStr::from_ptr(words) }.to_string_lossy().into_owned(),
        }
    }
}

/// A function of an open library.
///
/// # Safety
/// `handle` is open, and `F` is the type of pointers to that function.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn find<F: Copy>(
    handle: *mut c_void,
    name: &str,
    symbol: &'static core::ffi::CStr,
    version: &core::ffi::CStr,
) -> Result<F, LoadError> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the caller passes an open handle; the strings end with a zero byte.
    let found = unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) };
    match found.is_null() {
        true => Err(LoadError::Symbol { name: name.to_owned(), symbol: symbol.to_str().unwrap_or("?") }),
        // SAFETY: by the caller, `F` is the type of that pointer, and has its size.
        false => Ok(unsafe { core::mem::transmute_copy(&found) }),
    }
}

/// The library of this machine, and files that are not libfabric.
#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use std::ptr::{null, null_mut};

    use super::*;
    use crate::{FI_EP_RDM, version};

    #[test]
    fn other_files_are_refused_with_the_reason() {
        // SAFETY: no such file exists.
        let missing = unsafe { Library::open("/nowhere/libfabric.so.1") }.err().unwrap();
        assert!(matches!(&missing, LoadError::Missing { name, .. } if name.contains("nowhere")), "{missing}");
        // SAFETY: the C library is loaded already.
        let other = unsafe { Library::open("libc.so.6") }.err().unwrap();
        assert!(matches!(other, LoadError::Symbol { symbol: "fi_version", .. }), "{other}");
        // SAFETY: no library has such a name.
        let zero = unsafe { Library::open("lib\0fabric") }.err().unwrap();
        assert!(zero.to_string().contains("zero byte"), "{zero}");
        let old = LoadError::TooOld { name: "x".into(), found: version(1, 9) };
        assert_eq!(old.to_string(), "x is version 1.9, and at least 1.17 is needed");
    }

    #[test]
    fn lists_reliable_datagrams_over_sockets() {
        // SAFETY: the name is libfabric's.
        let library = match unsafe { Library::open("libfabric.so.1") } {
            Ok(library) => library,
            Err(why) => {
                eprintln!("skipped: {why}; apt-get install libfabric1");
                return;
            }
        };
        assert!(library.version() >= version(1, 17));
        assert_eq!(library.strerror(-11), library.strerror(11));
        // SAFETY: the hints are libfabric's own and complete; both lists are freed once.
        unsafe {
            let hints = library.fi_dupinfo(null());
            (*(*hints).ep_attr).type_ = FI_EP_RDM;
            let mut list = null_mut();
            assert_eq!(library.fi_getinfo(version(1, 17), null(), null(), 0, hints, &mut list), 0);
            let (mut next, mut entries) = (list, 0);
            while !next.is_null() {
                assert_eq!((*(*next).ep_attr).type_, FI_EP_RDM);
                assert!(!(*(*next).fabric_attr).prov_name.is_null());
                (next, entries) = ((*next).next, entries + 1);
            }
            assert!(entries > 0);
            library.fi_freeinfo(list);
            library.fi_freeinfo(hints);
        }
    }
}

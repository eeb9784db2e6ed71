//! The libibverbs of this process, and its objects. Dropping an object destroys it. An object that was made from
//! another one is held by a value that also holds the other, so that they are destroyed in the right order.

use std::ptr::NonNull;
use std::sync::OnceLock;

use multirail_spi::{Error, ErrorKind, Result};
use rdma_sys as ib;
use rdma_sys::{Library, LoadError};

use crate::status::os_error;

/// An open object.
pub(crate) struct Object<T: Destroy>(NonNull<T>);

/// How an object is destroyed.
pub(crate) trait Destroy {
    /// The name of the object in messages.
    const NAME: &'static str;

    /// # Safety
    /// The object is open, every object that was made from it is destroyed, and it is not used again.
    unsafe fn destroy(library: &ib::Library, object: *mut Self) -> i32;
}

macro_rules! destroyed {
    ($($kind:ty, $name:literal, $destroy:ident;)*) => {$(
        impl Destroy for $kind {
            const NAME: &'static str = $name;

            unsafe fn destroy(library: &ib::Library, object: *mut Self) -> i32 {
                // SAFETY: by the caller.
                unsafe { library.$destroy(object) }
            }
        }
    )*};
}

destroyed! {
    ib::ibv_context, "device", close_device;
    ib::ibv_pd, "protection domain", dealloc_pd;
    ib::ibv_mr, "registration", dereg_mr;
    ib::ibv_comp_channel, "completion channel", destroy_comp_channel;
    ib::ibv_cq, "completion queue", destroy_cq;
    ib::ibv_srq, "shared receive queue", destroy_srq;
    ib::ibv_qp, "queue pair", destroy_qp;
}

// SAFETY: libibverbs' objects may be used by any thread (its manual, "Thread safety" of verbs(7) and
// of rdma-core's providers: calls lock what they share).
unsafe impl<T: Destroy> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T: Destroy> Sync for Object<T> {}

impl<T: Destroy> Object<T> {
    /// Wraps the result of a call. Returns the error of `errno` if the result is null.
    pub(crate) fn of(object: *mut T, operation: &'static str) -> Result<Self> {
        let refused = || -> Error { os_error(operation, &format!("a {}", T::NAME), last_errno()) };
        NonNull::new(object).map(Self).ok_or_else(refused)
    }

    /// Destroys the object. If libibverbs refuses, returns the object and the error.
    pub(crate) fn close(self, operation: &'static str) -> Result<(), (Self, Error)> {
        let library = match library() {
            Ok(library) => library,
            Err(error) => return Err((self, error)),
        };
        // SAFETY: the object is open; its holder destroys first what was made from it.
        match unsafe { T::destroy(library, self.as_ptr()) } {
            0 => {
                std::mem::forget(self);
                Ok(())
            }
            code => {
                let error = os_error(operation, &format!("to destroy a {}", T::NAME), code.abs());
                Err((self, error))
            }
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// The calling thread's `errno`.
pub(crate) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl<T: Destroy> Drop for Object<T> {
    fn drop(&mut self) {
        let Ok(library) = library() else { return };
        // SAFETY: the object is open and dropped once; its holder destroys first what was made from it.
        let code = unsafe { T::destroy(library, self.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "libibverbs does not destroy a {}", T::NAME);
        }
    }
}

/// The environment variable with the name of the library. The default is [`DEFAULT_NAME`].
pub(crate) const VARIABLE: &str = "MULTIRAIL_LIBIBVERBS";
const DEFAULT_NAME: &str = "libibverbs.so.1";

/// The library. The first call opens it, by the name in `MULTIRAIL_LIBIBVERBS` if that is not empty.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
    let open = || {
        let named = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty());
        let name = named.unwrap_or_else(|| DEFAULT_NAME.to_owned());
        // SAFETY: the name is the default one, or the user says that it is libibverbs.
        unsafe { Library::open(&name) }
    };
    LIBRARY
        .get_or_init(open)
        .as_ref()
        .map_err(|why| Error::new(ErrorKind::Unsupported, "open libibverbs", why.to_string()))
}

/// Checks that libibverbs can be opened, and opens it.
///
/// # Errors
/// `Unsupported`: the library is missing, or is not libibverbs.
pub fn libibverbs_opens() -> Result<()> {
    library().map(|_| ())
}

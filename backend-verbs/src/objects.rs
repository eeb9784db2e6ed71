//! libibverbs' objects, destroyed when dropped, and in the right order by who holds whom.

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
    /// What people call it.
    const NAME: &'static str;

    /// # Safety
    /// The object is open, nothing that was made of it is, and it is not used again.
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
    /// What a call gave; where that is null, the error of `errno`.
    pub(crate) fn of(object: *mut T, operation: &'static str) -> Result<Self> {
        let refused = || -> Error { os_error(operation, &format!("a {}", T::NAME), last_errno()) };
        NonNull::new(object).map(Self).ok_or_else(refused)
    }

    /// Destroys the object; gives it back with the error where libibverbs does not.
    pub(crate) fn close(self, operation: &'static str) -> Result<(), (Self, Error)> {
        let library = match library() {
            Ok(library) => library,
            Err(error) => return Err((self, error)),
        };
        // SAFETY: open; who holds it lets go of what was made of it first.
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
        // SAFETY: open, and dropped once; who holds it lets go of what was made of it first.
        let code = unsafe { T::destroy(library, self.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "libibverbs does not destroy a {}", T::NAME);
        }
    }
}

/// The environment variable that names another library than [`USUAL`].
pub(crate) const VARIABLE: &str = "MULTIRAIL_LIBIBVERBS";
const USUAL: &str = "libibverbs.so.1";

/// The library, opened at the first call; `MULTIRAIL_LIBIBVERBS` may name it, if it is not empty.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
    let open = || {
        let named = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty());
        let name = named.unwrap_or_else(|| USUAL.to_owned());
        // SAFETY: the name is the usual one, or the user's word for it.
        unsafe { Library::open(&name) }
    };
    LIBRARY
        .get_or_init(open)
        .as_ref()
        .map_err(|why| Error::new(ErrorKind::Unsupported, "open libibverbs", why.to_string()))
}

/// Whether the libibverbs of this process is there; opens it if nobody has.
///
/// # Errors
/// `Unsupported`: it is not there, or not libibverbs.
pub fn libibverbs_opens() -> Result<()> {
    library().map(|_| ())
}

//! The one libibverbs of this process.

use std::sync::OnceLock;

use multirail_spi::{Error, ErrorKind, Result};
use rdma_sys::{Library, LoadError};

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

//! Which paths bytes may take.

use crate::spi::Paths;
use crate::{Error, ErrorKind, Result};

/// Which [`Paths`] bytes may take; by default, any. A fabric, a peer and each operation may have a policy, and all of
/// them apply. An operation whose bytes would take a path that is not allowed is refused at submission: no byte falls
/// back to a slower path unnoticed.
///
/// ```
/// # use multirail_core::{FabricBuilder, PathPolicy, WriteOptions};
/// # use multirail_core::spi::Paths;
/// // Only network cards move bytes.
/// let fabric = FabricBuilder::new().path_policy(PathPolicy::only(Paths::RDMA));
/// // Or any path without intermediate buffers, for one write.
/// let options = WriteOptions::new().path_policy(PathPolicy::without(Paths::STAGED));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathPolicy {
    allowed: Paths,
}

impl PathPolicy {
    /// Any path.
    pub const ANY: Self = Self { allowed: Paths::all() };

    /// These paths alone.
    pub fn only(paths: Paths) -> Self {
        Self { allowed: paths }
    }

    /// Any path but these.
    pub fn without(paths: Paths) -> Self {
        Self { allowed: Paths::all().difference(paths) }
    }

    /// The paths that are allowed.
    pub fn allowed(self) -> Paths {
        self.allowed
    }

    /// Whether bytes may take all of these paths.
    pub fn allows(self, paths: Paths) -> bool {
        self.allowed.contains(paths)
    }

    /// The paths that both policies allow.
    #[inline]
    pub fn and(self, other: Self) -> Self {
        Self { allowed: Paths::from_bits_retain(self.allowed.bits() & other.allowed.bits()) }
    }

    /// Refuses bytes that would take `paths` over the transport with this label.
    pub(crate) fn check(self, paths: Paths, transport: &str, operation: &'static str) -> Result<()> {
        if self.allows(paths) {
            return Ok(());
        }
        let (allowed, missing) = (self.allowed, paths.difference(self.allowed));
        let why = format!(
            "bytes would go by {paths} over transport {transport}, and the path policy allows {allowed} alone; \
             allow {missing} too, or give both sides a transport that reaches the memory by {allowed}, and import \
             the region again"
        );
        Err(Error::new(ErrorKind::Unreachable, operation, why))
    }
}

impl Default for PathPolicy {
    fn default() -> Self {
        Self::ANY
    }
}

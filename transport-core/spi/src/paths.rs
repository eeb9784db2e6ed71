//! The paths that bytes take.

use std::fmt;
use std::str::FromStr;

use crate::{Error, ErrorKind};

bitflags::bitflags! {
    /// How bytes get from one side's memory to the other's. As the path of bytes, a set means that bytes take each of its
    /// paths in turn, as staged bytes do. In a policy, a set means that each path is allowed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Paths: u32 {
        /// Network cards write and read the memory: EFA, RoCE, InfiniBand.
        const RDMA = 1;
        /// A GPU copies: by a kernel or by a copy engine, over NVLink or PCIe.
        const GPU_COPY = 2;
        /// A processor of this host copies: memory that both sides map, `process_vm_writev`, libfabric's `shm`.
        const MEMORY_COPY = 4;
        /// The kernel's network stack: libfabric's `tcp`.
        const SOCKETS = 8;
        /// Intermediate buffers in host memory, because a device does not reach the memory itself.
        const STAGED = 16;
        /// Slots of both sides, in which small pages share a large work request.
        const COALESCED = 32;
    }
}

/// The name of each path, as a command line and a setting spell it.
const NAMES: [(Paths, &str); 6] = [
    (Paths::RDMA, "rdma"),
    (Paths::GPU_COPY, "gpu-copy"),
    (Paths::MEMORY_COPY, "memory-copy"),
    (Paths::SOCKETS, "sockets"),
    (Paths::STAGED, "staged"),
    (Paths::COALESCED, "coalesced"),
];

/// The names, with commas between them; `none` for the empty set.
impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> =
            NAMES.iter().filter(|(path, _)| self.contains(*path)).map(|(_, name)| *name).collect();
        f.write_str(if names.is_empty() { "none" } else { "" })?;
        f.write_str(&names.join(","))
    }
}

/// At least one name, with commas between the names.
impl FromStr for Paths {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let path = |name: &str| {
            NAMES.iter().find(|(_, known)| *known == name.trim()).map(|(path, _)| *path).ok_or_else(|| {
                let known = NAMES.map(|(_, name)| name).join(", ");
                let why = format!("there is no path {name:?}; the paths are {known}");
                Error::new(ErrorKind::InvalidRequest, "paths", why)
            })
        };
        text.split(',').map(path).try_fold(Self::empty(), |paths, path| Ok(paths | path?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() -> Result<(), Error> {
        for bits in 1..=Paths::all().bits() {
            let paths = Paths::from_bits_retain(bits);
            assert_eq!(paths.to_string().parse::<Paths>()?, paths);
        }
        assert_eq!(Paths::empty().to_string(), "none");
        assert_eq!("rdma, staged".parse::<Paths>()?, Paths::RDMA | Paths::STAGED);
        let refused = "rdma,nvlink".parse::<Paths>().unwrap_err();
        assert!(refused.to_string().contains("gpu-copy"), "{refused}");
        Ok(())
    }
}

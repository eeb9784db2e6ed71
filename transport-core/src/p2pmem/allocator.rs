//! The allocator of p2pmem: from which device it takes memory, and how much must stay available.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use topology::p2p::{PeerToPeer, forwards_peers};
use topology::p2pmem::{Provider, nearest, providers};
use topology::{Address, Machine, sysfs};

use super::P2pMemory;
use crate::spi::page_size;
use crate::{Error, ErrorKind, Result};

const ALLOCATE: &str = "allocate p2pmem";

/// Allocates memory of PCI devices: of one given device, of the device nearest to another device, or of any device.
///
/// ```no_run
/// # fn main() -> multirail_core::Result<()> {
/// use multirail_core::P2pAllocator;
///
/// // Memory that the NIC at 4f:00.0 reaches best; 16 MiB of each provider stay available to others.
/// let allocator = P2pAllocator::this_host()?.near("0000:4f:00.0".parse().unwrap()).reserve(16 << 20);
/// let memory = allocator.allocate(1 << 20)?;
/// println!("1 MiB of {}", memory.provider());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct P2pAllocator {
    sysfs: PathBuf,
    machine: Machine,
    forwards: bool,
    provider: Option<Address>,
    device: Option<Address>,
    reserve: u64,
}

impl P2pAllocator {
    /// An allocator for this host. It reads the host's PCI functions now, and the available memory at each call.
    ///
    /// # Errors
    /// `Io`: sysfs cannot be read.
    pub fn this_host() -> Result<Self> {
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self::of(Path::new("/sys"), forwards_peers(&cpus))
    }

    /// An allocator for the host whose `/sys` lies at `sysfs`. `forwards` says whether its root complex is known to
    /// forward peer-to-peer requests: [`forwards_peers`].
    ///
    /// # Errors
    /// Those of [`P2pAllocator::this_host`].
    pub fn of(sysfs: &Path, forwards: bool) -> Result<Self> {
        let machine = sysfs::read(sysfs).map_err(unread)?;
        let sysfs = sysfs.to_owned();
        Ok(Self { sysfs, machine, forwards, provider: None, device: None, reserve: 0 })
    }

    /// Takes memory of this provider only.
    pub fn provider(mut self, provider: Address) -> Self {
        self.provider = Some(provider);
        self
    }

    /// Takes memory that `device` can reach. Tries the nearest provider first, by the kernel's distance, and the next
    /// one if a provider does not have enough. Without this setting, providers are tried in order of their addresses.
    pub fn near(mut self, device: Address) -> Self {
        self.device = Some(device);
        self
    }

    /// Leaves at least so many bytes of each provider available to others.
    pub fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = bytes;
        self
    }

    /// The providers in the order in which they are tried, each with the path from the device of [`near`](Self::near).
    /// The providers that the device does not reach come last.
    ///
    /// # Errors
    /// - `NotFound`: there is no such device, or no provider, or the named device is no provider.
    /// - `Io`: sysfs cannot be read.
    pub fn candidates(&self) -> Result<Vec<(Provider, Option<PeerToPeer>)>> {
        let missing = |why: String| Err(Error::new(ErrorKind::NotFound, ALLOCATE, why));
        let mut found = providers(&self.sysfs).map_err(unread)?;
        if found.is_empty() {
            return missing(
                "no PCI device here has p2pmem: Linux must be built with CONFIG_PCI_P2PDMA, and a \
                 device's driver must publish some (nvme: a controller memory buffer)"
                    .to_owned(),
            );
        }
        if let Some(provider) = self.provider {
            let all: Vec<String> = found.iter().map(|one| one.address.to_string()).collect();
            found.retain(|one| one.address == provider);
            if found.is_empty() {
                return missing(format!("{provider} has no p2pmem; these have: {}", all.join(", ")));
            }
        }
        let Some(device) = self.device else {
            return Ok(found.into_iter().map(|one| (one, None)).collect());
        };
        if self.machine.function(device).is_none() {
            return missing(format!("there is no PCI function {device}; lspci -D lists them"));
        }
        let paths = nearest(&self.machine, &found, device, self.forwards);
        Ok(paths.into_iter().map(|(one, path)| (one, Some(path))).collect())
    }

    /// Allocates `len` bytes, zeroed. They take whole pages of the available memory.
    ///
    /// # Errors
    /// Each error says what was found, and what to do.
    /// - `InvalidRequest`: `len` is 0.
    /// - `NotFound`: as [`P2pAllocator::candidates`].
    /// - `Exhausted`: no provider has so many contiguous bytes besides the reserve.
    /// - `Unsupported`: the device does not reach the memory; the driver does not publish it; Linux is older than 6.2.
    /// - `Permission`: only root may allocate it.
    /// - `Io`: all other errors.
    pub fn allocate(&self, len: usize) -> Result<P2pMemory> {
        let whole = len.checked_next_multiple_of(page_size()).filter(|whole| isize::try_from(*whole).is_ok());
        let Some(whole) = whole.filter(|_| len > 0) else {
            let why = format!("the request is for {len} bytes; ask for 1 to {}", isize::MAX);
            return Err(Error::new(ErrorKind::InvalidRequest, ALLOCATE, why));
        };
        let mut refusals: Vec<Error> = Vec::new();
        for (provider, pci_path) in self.candidates()? {
            match self.allocate_from(&provider, pci_path.as_ref(), len, whole as u64) {
                Err(why) if [ErrorKind::Exhausted, ErrorKind::Unsupported].contains(&why.kind()) => {
                    refusals.push(why);
                }
                done => return done,
            }
        }
        let exhausted = refusals.iter().find(|why| why.kind() == ErrorKind::Exhausted);
        let kind = exhausted.map_or(ErrorKind::Unsupported, Error::kind);
        let whys: Vec<&str> = refusals.iter().map(Error::context).collect();
        Err(Error::new(kind, ALLOCATE, whys.join("; ")))
    }

    /// Allocates `len` bytes of one provider; `whole` is the length in whole pages.
    fn allocate_from(
        &self,
        provider: &Provider,
        pci_path: Option<&PeerToPeer>,
        len: usize,
        whole: u64,
    ) -> Result<P2pMemory> {
        let Provider { address, available, published, .. } = *provider;
        let unsupported =
            |why: String| Err(Error::new(ErrorKind::Unsupported, ALLOCATE, format!("{address}: {why}")));
        if let (Some(refused), Some(device)) = (pci_path.filter(|path| !path.is_possible()), self.device) {
            return unsupported(format!("peer to peer from {device} is {refused}"));
        }
        if !published {
            return unsupported("its driver keeps its p2pmem to itself: take another's".to_owned());
        }
        let short = |available: u64| {
            let reserve = self.reserve;
            format!(
                "{address}: {whole} bytes asked for and {reserve} to stay, where {available} are available, \
                 maybe not contiguous: ask for less, or let other programs give some back"
            )
        };
        let exhausted = |available: u64| Err(Error::new(ErrorKind::Exhausted, ALLOCATE, short(available)));
        if whole.checked_add(self.reserve).is_none_or(|needed| needed > available) {
            return exhausted(available);
        }
        let path = self.sysfs.join(format!("bus/pci/devices/{address}/p2pmem/allocate"));
        let file = match open(&path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                return unsupported(format!(
                    "there is no {}: Linux 6.2 and later give p2pmem to programs",
                    path.display()
                ));
            }
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                let remedy = "it is root's alone: run as root, or have root change its owner, group or mode (chown, chmod)";
                return Err(Error::os(ALLOCATE, format!("{}: {remedy}", path.display()), why));
            }
            opened => opened.map_err(|why| Error::os(ALLOCATE, path.display().to_string(), why))?,
        };
        let memory = P2pMemory::map(file.as_fd(), len, address).map_err(|why| {
            let now = self.available(address).unwrap_or(available);
            match why.kind() {
                io::ErrorKind::OutOfMemory => Error::os(ALLOCATE, short(now), why),
                _ => Error::os(ALLOCATE, format!("{} is not mapped", path.display()), why),
            }
        })?;
        // Other programs may have taken some in the meantime.
        match self.available(address)? {
            left if left < self.reserve => {
                drop(memory);
                exhausted(left.saturating_add(whole))
            }
            _ => Ok(memory),
        }
    }

    /// The bytes of a provider that are free now.
    fn available(&self, provider: Address) -> Result<u64> {
        let found = providers(&self.sysfs).map_err(unread)?;
        Ok(found.iter().find(|one| one.address == provider).map_or(0, |one| one.available))
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn unread(why: topology::Error) -> Error {
    Error::new(ErrorKind::Io, ALLOCATE, format!("{why}; the list of p2pmem providers comes from there"))
}

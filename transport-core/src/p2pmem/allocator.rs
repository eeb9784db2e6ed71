//! From which device memory is taken, and how much of it must stay.

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

/// Takes memory of PCI devices: of one, of the one nearest to another device, or of any.
///
/// ```no_run
/// # fn main() -> multirail_core::Result<()> {
/// use multirail_core::P2pAllocator;
///
/// // What the card at 4f:00.0 reaches best; 16 MiB of each provider stay for others.
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
    /// Of this host, whose PCI functions are read now; what is available, at each call.
    ///
    /// # Errors
    /// `Io`: sysfs cannot be read.
    pub fn this_host() -> Result<Self> {
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self::of(Path::new("/sys"), forwards_peers(&cpus))
    }

    /// Of the host whose `/sys` lies at `sysfs`. Whether its root complex is known to forward peers'
    /// requests: [`forwards_peers`].
    ///
    /// # Errors
    /// As [`P2pAllocator::this_host`].
    pub fn of(sysfs: &Path, forwards: bool) -> Result<Self> {
        let machine = sysfs::read(sysfs).map_err(unread)?;
        let sysfs = sysfs.to_owned();
        Ok(Self { sysfs, machine, forwards, provider: None, device: None, reserve: 0 })
    }

    /// Of this provider alone.
    pub fn provider(mut self, provider: Address) -> Self {
        self.provider = Some(provider);
        self
    }

    /// Of what `device` can reach, the nearest first by the kernel's count: the next one is taken where
    /// one has not enough. Otherwise providers are tried by address.
    pub fn near(mut self, device: Address) -> Self {
        self.device = Some(device);
        self
    }

    /// So many bytes of each provider must stay available to others.
    pub fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = bytes;
        self
    }

    /// The providers in the order of their turn, each with the way from the device of
    /// [`near`](Self::near); those that it does not reach last.
    ///
    /// # Errors
    /// - `NotFound`: no such device, or no provider; the named one is none.
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
        let ways = nearest(&self.machine, &found, device, self.forwards);
        Ok(ways.into_iter().map(|(one, way)| (one, Some(way))).collect())
    }

    /// Takes `len` bytes, zeroed; whole pages of them are gone from what is available.
    ///
    /// # Errors
    /// Each says what there is, and what would mend it.
    /// - `InvalidRequest`: no bytes.
    /// - `NotFound`: as [`P2pAllocator::candidates`].
    /// - `Exhausted`: nobody has so much in one piece beside the reserve.
    /// - `Unsupported`: the device does not reach it; not published; Linux before 6.2.
    /// - `Permission`: it is root's.
    /// - `Io`: anything else.
    pub fn allocate(&self, len: usize) -> Result<P2pMemory> {
        let whole = len.checked_next_multiple_of(page_size()).filter(|whole| isize::try_from(*whole).is_ok());
        let Some(whole) = whole.filter(|_| len > 0) else {
            let why = format!("{len} bytes asked for; ask for 1 to {}", isize::MAX);
            return Err(Error::new(ErrorKind::InvalidRequest, ALLOCATE, why));
        };
        let mut refusals: Vec<Error> = Vec::new();
        for (provider, way) in self.candidates()? {
            match self.of_provider(&provider, way.as_ref(), len, whole as u64) {
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

    fn of_provider(
        &self,
        provider: &Provider,
        way: Option<&PeerToPeer>,
        len: usize,
        whole: u64,
    ) -> Result<P2pMemory> {
        let Provider { address, available, published, .. } = *provider;
        let unsupported =
            |why: String| Err(Error::new(ErrorKind::Unsupported, ALLOCATE, format!("{address}: {why}")));
        if let (Some(way), Some(device)) = (way.filter(|way| !way.is_possible()), self.device) {
            return unsupported(format!("peer to peer from {device} is {way}"));
        }
        if !published {
            return unsupported("its driver keeps its p2pmem to itself: take another's".to_owned());
        }
        let short = |available: u64| {
            let reserve = self.reserve;
            format!(
                "{address}: {whole} bytes asked for and {reserve} to stay, where {available} are available, \
                 maybe not in one piece: ask for less, or have others give some back"
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
        // Others may have taken some meanwhile.
        match self.available(address)? {
            left if left < self.reserve => {
                drop(memory);
                exhausted(left.saturating_add(whole))
            }
            _ => Ok(memory),
        }
    }

    /// Bytes of a provider that nobody has now.
    fn available(&self, provider: Address) -> Result<u64> {
        let found = providers(&self.sysfs).map_err(unread)?;
        Ok(found.iter().find(|one| one.address == provider).map_or(0, |one| one.available))
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn unread(why: topology::Error) -> Error {
    Error::new(ErrorKind::Io, ALLOCATE, format!("{why}: providers are listed there"))
}

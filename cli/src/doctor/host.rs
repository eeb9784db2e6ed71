//! The files that describe the host, all of them read below one root directory.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::failure::printable;

use super::limits::Limits;

/// The most bytes read of a file, more than any file of `/proc` and `/sys` that the checks read.
const MAX_BYTES: u64 = 16 << 20;

/// Bit numbers of capabilities (linux/capability.h).
pub const CAP_IPC_LOCK: u32 = 14;
pub const CAP_SYS_PTRACE: u32 = 19;

/// The PCI vendor id of AWS.
pub const AMAZON: u32 = 0x1d0f;

/// The host that the checks examine.
pub struct ExaminedHost {
    root: PathBuf,
    pub limits: Limits,
}

/// A file that exists, but cannot be read or parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    path: String,
    why: String,
}

impl Unreadable {
    /// A file with malformed content.
    pub fn malformed(path: &str, content: &str) -> Self {
        const SHOWN: usize = 60;
        let content: String = printable(content.trim()).chars().take(SHOWN).collect();
        Self { path: path.to_owned(), why: format!("cannot parse {content:?}") }
    }

    fn failed(path: &str, error: &io::Error) -> Self {
        Self { path: path.to_owned(), why: error.to_string() }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {}: {}", self.path, self.why)
    }
}

impl ExaminedHost {
    /// This host.
    pub fn here() -> Self {
        Self { root: PathBuf::from("/"), limits: Limits::of_this_process() }
    }

    /// The path of the host's file `path`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns true if `path` exists.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Reads a file, at most 16 MiB. Returns `None` if it does not exist.
    pub fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>, Unreadable> {
        read(&self.path(path)).map_err(|error| Unreadable::failed(path, &error))
    }

    /// Reads a text file.
    pub fn text(&self, path: &str) -> Result<Option<String>, Unreadable> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(error) => Err(Unreadable::malformed(path, &String::from_utf8_lossy(error.as_bytes()))),
        }
    }

    /// Reads and parses a file.
    pub fn parsed<T>(
        &self,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Unreadable> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        parse(text.trim()).map(Some).ok_or_else(|| Unreadable::malformed(path, &text))
    }

    /// Reads a file with one number.
    pub fn number(&self, path: &str) -> Result<Option<u64>, Unreadable> {
        self.parsed(path, |text| text.parse().ok())
    }

    /// The sorted names in a directory, or none if it does not exist.
    pub fn names(&self, directory: &str) -> Result<Vec<String>, Unreadable> {
        let entries = match std::fs::read_dir(self.path(directory)) {
            Ok(entries) => entries,
            Err(error) if is_absence(&error) => return Ok(Vec::new()),
            Err(error) => return Err(Unreadable::failed(directory, &error)),
        };
        let named = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names =
            named.collect::<io::Result<Vec<_>>>().map_err(|error| Unreadable::failed(directory, &error))?;
        names.sort();
        Ok(names)
    }

    /// Returns true if the kernel has an RDMA device, in hardware or software.
    pub fn has_cards(&self) -> bool {
        !self.vendors().is_empty()
    }

    /// Returns true if an RDMA device is on a bus.
    pub fn has_hardware(&self) -> bool {
        self.vendors().iter().any(Option::is_some)
    }

    /// Returns true if `backend` can use an RDMA device: `efa` uses EFA cards, `verbs` uses all others.
    pub fn has_cards_for(&self, backend: &str) -> bool {
        self.vendors().iter().any(|vendor| match backend {
            "efa" => *vendor == Some(AMAZON),
            "verbs" => *vendor != Some(AMAZON),
            _ => false,
        })
    }

    /// The vendor of each RDMA device, or `None` for a device that is not on a bus.
    fn vendors(&self) -> Vec<Option<u32>> {
        let cards = self.names("/sys/class/infiniband").unwrap_or_default().into_iter();
        let vendor = |card| self.parsed(&format!("/sys/class/infiniband/{card}/device/vendor"), hex).ok()?;
        cards.map(|card: String| vendor(card)).collect()
    }

    /// Returns true if NVIDIA's driver is loaded.
    pub fn has_gpu(&self) -> bool {
        self.has("/proc/driver/nvidia/version") || self.has("/dev/nvidiactl")
    }

    /// The value of a line of `/proc/self/status`, or `None` if there is no such line.
    pub fn status(&self, name: &str) -> Result<Option<String>, Unreadable> {
        let text = self.text("/proc/self/status")?.unwrap_or_default();
        let mut lines = text.lines();
        Ok(lines
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|rest| rest.trim().to_owned()))
    }

    /// Returns true if this process has a capability.
    pub fn has_capability(&self, capability: u32) -> Result<bool, Unreadable> {
        let Some(mask) = self.status("CapEff")? else { return Ok(false) };
        let mask = u64::from_str_radix(&mask, 16)
            .map_err(|_| Unreadable::malformed("/proc/self/status", &format!("CapEff: {mask}")))?;
        Ok(mask >> capability & 1 == 1)
    }

    /// Returns true if this process is in the initial user namespace, where capabilities count for the whole system.
    pub fn is_first_namespace(&self) -> Result<bool, Unreadable> {
        let map = self.text("/proc/self/uid_map")?.unwrap_or_default();
        Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
    }
}

/// Parses a number as sysfs writes PCI ids: `0x1d0f`.
pub fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Hosts for tests, made of a directory.
#[cfg(test)]
pub mod fake {
    use std::ops::{Deref, DerefMut};

    use super::*;

    /// A host with a few files. Dropping it removes them.
    pub struct Fake {
        host: ExaminedHost,
        root: tempfile::TempDir,
    }

    impl Deref for Fake {
        type Target = ExaminedHost;

        fn deref(&self) -> &ExaminedHost {
            &self.host
        }
    }

    impl DerefMut for Fake {
        fn deref_mut(&mut self) -> &mut ExaminedHost {
            &mut self.host
        }
    }

    impl Fake {
        /// A host with these files.
        pub fn new(files: &[(&str, &str)]) -> Self {
            let root = tempfile::tempdir().expect("a directory");
            let host = ExaminedHost { root: root.path().to_owned(), limits: Limits::default() };
            files
                .iter()
                .fold(Self { host, root }, |fake, (path, content)| fake.with(path, content.as_bytes()))
        }

        /// Adds a file.
        pub fn with(self, path: &str, content: &[u8]) -> Self {
            let path = self.root.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("make it");
            std::fs::write(path, content).expect("write it");
            self
        }

        /// Adds a Mellanox card with an active port.
        pub fn card(self, name: &str) -> Self {
            self.soft(name).with(&format!("/sys/class/infiniband/{name}/device/vendor"), b"0x15b3\n")
        }

        /// Adds an EFA card.
        pub fn efa(self, name: &str) -> Self {
            self.soft(name).with(&format!("/sys/class/infiniband/{name}/device/vendor"), b"0x1d0f\n")
        }

        /// Adds a software RDMA device.
        pub fn soft(self, name: &str) -> Self {
            let port = format!("/sys/class/infiniband/{name}/ports/1");
            self.with(&format!("{port}/state"), b"4: ACTIVE\n")
                .with(&format!("{port}/link_layer"), b"Ethernet\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::Fake;
    use super::*;

    #[test]
    fn missing_files_are_no_error_and_malformed_ones_are_named() {
        let fake = Fake::new(&[("/proc/n", "12\n"), ("/proc/word", "twelve\u{1b}[1m"), ("/proc/d/x", "")]);
        let host = fake.with("/proc/bytes", &[0xff, 0xfe]);
        assert_eq!(host.number("/proc/n"), Ok(Some(12)));
        assert_eq!(host.number("/proc/none"), Ok(None));
        assert_eq!(host.number("/proc/n/below"), Ok(None));
        assert_eq!(host.names("/proc/none"), Ok(vec![]));
        for path in ["/proc/word", "/proc/bytes", "/proc/d"] {
            let said = host.number(path).unwrap_err().to_string();
            assert!(said.contains(path) && !said.contains('\u{1b}'), "{said}");
        }
    }

    #[test]
    fn cards_belong_to_backends() {
        let of = |fake: Fake| {
            let host = fake;
            [host.has_cards(), host.has_hardware(), host.has_cards_for("efa"), host.has_cards_for("verbs")]
        };
        assert_eq!(of(Fake::new(&[])), [false; 4]);
        assert_eq!(of(Fake::new(&[]).soft("rxe0")), [true, false, false, true]);
        assert_eq!(of(Fake::new(&[]).card("mlx5_0")), [true, true, false, true]);
        assert_eq!(of(Fake::new(&[]).efa("rdmap0s6")), [true, true, true, false]);
    }

    #[test]
    fn capabilities_are_bits() {
        let status = |mask: &str| format!("Name:\tx\nCapEff:\t{mask}\n");
        let host = Fake::new(&[("/proc/self/status", &status("0000000000004000"))]);
        assert_eq!(
            (host.has_capability(CAP_IPC_LOCK), host.has_capability(CAP_SYS_PTRACE)),
            (Ok(true), Ok(false))
        );
        assert!(Fake::new(&[("/proc/self/status", &status("all"))]).has_capability(14).is_err());
        assert_eq!(Fake::new(&[]).has_capability(14), Ok(false));
    }
}

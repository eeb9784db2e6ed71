//! The host as its files tell of it, all of them read below one root.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::failure::printable;

use super::limits::Limits;

/// More than any file of `/proc` and `/sys` that is read here has.
const LONGEST: u64 = 16 << 20;

/// Bit numbers of capabilities (linux/capability.h).
pub const CAP_IPC_LOCK: u32 = 14;
pub const CAP_SYS_PTRACE: u32 = 19;

/// AWS' number as a vendor of PCI devices.
pub const AMAZON: u32 = 0x1d0f;

/// What the checks look at.
pub struct Host {
    root: PathBuf,
    pub limits: Limits,
}

/// A file that is there and does not tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    path: String,
    why: String,
}

impl Unreadable {
    /// One whose content is not what it should be.
    pub fn malformed(path: &str, content: &str) -> Self {
        const SHOWN: usize = 60;
        let content: String = printable(content.trim()).chars().take(SHOWN).collect();
        Self { path: path.to_owned(), why: format!("{content:?} is not understood") }
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

impl Host {
    /// This one.
    pub fn here() -> Self {
        Self { root: PathBuf::from("/"), limits: Limits::of_this_process() }
    }

    /// Where `path` of the host lies.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Whether there is something at `path`.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// A whole file, cut after 16 MiB; `None` if it is not there.
    pub fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>, Unreadable> {
        read(&self.path(path)).map_err(|error| Unreadable::failed(path, &error))
    }

    /// A file of text.
    pub fn text(&self, path: &str) -> Result<Option<String>, Unreadable> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(error) => Err(Unreadable::malformed(path, &String::from_utf8_lossy(error.as_bytes()))),
        }
    }

    /// A file that `parse` understands.
    pub fn parsed<T>(
        &self,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Unreadable> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        parse(text.trim()).map(Some).ok_or_else(|| Unreadable::malformed(path, &text))
    }

    /// A file with one number.
    pub fn number(&self, path: &str) -> Result<Option<u64>, Unreadable> {
        self.parsed(path, |text| text.parse().ok())
    }

    /// The names in a directory, sorted; none if it is not there.
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

    /// Whether the kernel knows an RDMA device, in hardware or software.
    pub fn has_cards(&self) -> bool {
        !self.vendors().is_empty()
    }

    /// Whether one of them is on the bus.
    pub fn has_hardware(&self) -> bool {
        self.vendors().iter().any(Option::is_some)
    }

    /// Whether one of them is for `backend`: EFA cards are libfabric's, all others libibverbs'.
    pub fn has_cards_for(&self, backend: &str) -> bool {
        self.vendors().iter().any(|vendor| match backend {
            "efa" => *vendor == Some(AMAZON),
            "verbs" => *vendor != Some(AMAZON),
            _ => false,
        })
    }

    /// Of each RDMA device who made it, if it is on a bus.
    fn vendors(&self) -> Vec<Option<u32>> {
        let cards = self.names("/sys/class/infiniband").unwrap_or_default().into_iter();
        let vendor = |card| self.parsed(&format!("/sys/class/infiniband/{card}/device/vendor"), hex).ok()?;
        cards.map(|card: String| vendor(card)).collect()
    }

    /// Whether NVIDIA's driver is there.
    pub fn has_gpu(&self) -> bool {
        self.has("/proc/driver/nvidia/version") || self.has("/dev/nvidiactl")
    }

    /// A line of `/proc/self/status`, without its name; `None` if there is none.
    pub fn status(&self, name: &str) -> Result<Option<String>, Unreadable> {
        let text = self.text("/proc/self/status")?.unwrap_or_default();
        let mut lines = text.lines();
        Ok(lines
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|rest| rest.trim().to_owned()))
    }

    /// Whether this process holds a capability.
    pub fn has_capability(&self, capability: u32) -> Result<bool, Unreadable> {
        let Some(held) = self.status("CapEff")? else { return Ok(false) };
        let held = u64::from_str_radix(&held, 16)
            .map_err(|_| Unreadable::malformed("/proc/self/status", &format!("CapEff: {held}")))?;
        Ok(held >> capability & 1 == 1)
    }

    /// Whether capabilities count in the whole system: the user namespace is the first one.
    pub fn is_first_namespace(&self) -> Result<bool, Unreadable> {
        let map = self.text("/proc/self/uid_map")?.unwrap_or_default();
        Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
    }
}

/// A number as sysfs writes those of PCI: `0x1d0f`.
pub fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Hosts made of a directory.
#[cfg(test)]
pub mod fake {
    use std::ops::{Deref, DerefMut};

    use super::*;

    /// A host of a few files, gone with this value.
    pub struct Fake {
        host: Host,
        root: tempfile::TempDir,
    }

    impl Deref for Fake {
        type Target = Host;

        fn deref(&self) -> &Host {
            &self.host
        }
    }

    impl DerefMut for Fake {
        fn deref_mut(&mut self) -> &mut Host {
            &mut self.host
        }
    }

    impl Fake {
        /// Of these files.
        pub fn new(files: &[(&str, &str)]) -> Self {
            let root = tempfile::tempdir().expect("a directory");
            let host = Host { root: root.path().to_owned(), limits: Limits::default() };
            files
                .iter()
                .fold(Self { host, root }, |fake, (path, content)| fake.with(path, content.as_bytes()))
        }

        /// One more.
        pub fn with(self, path: &str, content: &[u8]) -> Self {
            let path = self.root.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("make it");
            std::fs::write(path, content).expect("write it");
            self
        }

        /// An RDMA card of Mellanox' whose port is active.
        pub fn card(self, name: &str) -> Self {
            self.soft(name).with(&format!("/sys/class/infiniband/{name}/device/vendor"), b"0x15b3\n")
        }

        /// An EFA card.
        pub fn efa(self, name: &str) -> Self {
            self.soft(name).with(&format!("/sys/class/infiniband/{name}/device/vendor"), b"0x1d0f\n")
        }

        /// An RDMA device in software.
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
    fn absent_is_no_error_and_nonsense_names_its_file() {
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
    fn cards_are_of_backends() {
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

//! Members of a directory, and the limits of what a directory may say about them.

use std::collections::BTreeMap;
use std::time::Duration;

use multirail::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The longest name in bytes.
pub const MAX_NAME: usize = 256;
/// The most addresses of a member.
pub const MAX_ADDRESSES: usize = 16;
/// The longest address in bytes.
pub const MAX_ADDRESS: usize = 300;
/// The most bytes of a member's attributes, keys and values together.
pub const MAX_ATTRIBUTES: usize = 8 << 10;
/// The most bytes of a member's record. JSON may write a byte as six.
pub const MAX_RECORD: usize = 6 * (MAX_NAME + MAX_ADDRESSES * MAX_ADDRESS + MAX_ATTRIBUTES);
/// The most members that a watch follows. More are refused with a warning.
pub const MAX_MEMBERS: usize = 1 << 16;
/// The longest lease.
pub const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);

/// The version of the record that this library writes and reads.
const RECORD_VERSION: u32 = 1;

/// A process that a directory lists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The name, which no other member has: 1 to 256 bytes without control characters.
    pub name: String,
    /// Where the member listens, in the order of preference: `host:port`.
    pub addresses: Vec<String>,
    /// The number of this start of the member: [`Fabric::incarnation`](multirail::Fabric::incarnation). 0 if the
    /// directory does not know it.
    pub incarnation: u64,
    /// What the member says about itself, at most 8 KiB.
    pub attributes: BTreeMap<String, String>,
    /// How long the directory lists the member after its last renewal. Zero if the member renews nothing, as in a
    /// static list.
    pub lease: Duration,
}

impl Member {
    /// A member without addresses and attributes.
    pub fn new(name: impl Into<String>, incarnation: u64) -> Self {
        Self {
            name: name.into(),
            addresses: Vec::new(),
            incarnation,
            attributes: BTreeMap::new(),
            lease: Duration::ZERO,
        }
    }

    /// Adds an address, as [`Listener::local_addr`](multirail::Listener::local_addr) returns it.
    pub fn address(mut self, address: impl Into<String>) -> Self {
        self.addresses.push(address.into());
        self
    }

    /// Sets an attribute.
    pub fn attribute(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes.insert(key.into(), value.into());
        self
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// `InvalidRequest`, with the limit.
    pub fn check(&self) -> Result<()> {
        self.fault().map_or(Ok(()), |why| Err(Error::new(ErrorKind::InvalidRequest, "member", why)))
    }

    fn fault(&self) -> Option<String> {
        if let Some(why) = name_fault(&self.name) {
            return Some(why);
        }
        let count = self.addresses.len();
        if count == 0 || count > MAX_ADDRESSES {
            return Some(format!("it has {count} addresses; 1 to {MAX_ADDRESSES} are allowed"));
        }
        let is_bad = |address: &&String| {
            address.is_empty() || address.len() > MAX_ADDRESS || address.chars().any(char::is_control)
        };
        if let Some(bad) = self.addresses.iter().find(is_bad) {
            return Some(format!(
                "its address {:?} is none: 1 to {MAX_ADDRESS} bytes without control characters are allowed",
                shortened(bad)
            ));
        }
        let bytes: usize = self.attributes.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > MAX_ATTRIBUTES {
            return Some(format!("its attributes have {bytes} bytes; {MAX_ATTRIBUTES} are allowed"));
        }
        let lease = self.lease;
        (lease > MAX_LEASE).then(|| format!("its lease of {lease:?} is longer than {MAX_LEASE:?}"))
    }

    /// The bytes that a directory keeps. `claim` is a number that no other membership has: entries of the same member
    /// differ.
    pub(crate) fn to_record(&self, claim: u64) -> Vec<u8> {
        let record = Record {
            version: RECORD_VERSION,
            name: self.name.clone(),
            addresses: self.addresses.clone(),
            incarnation: self.incarnation,
            attributes: self.attributes.clone(),
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            claim,
        };
        // Strings and numbers: their serialization does not fail.
        serde_json::to_vec(&record).unwrap_or_default()
    }

    /// Reads a record whose key is `name`. The error is the fault in words.
    pub(crate) fn from_record(name: &str, bytes: &[u8]) -> std::result::Result<Self, String> {
        let member = Self::parse(bytes)?;
        if member.name != name {
            return Err(format!("its record is that of {:?}", shortened(&member.name)));
        }
        Ok(member)
    }

    /// Reads a record. The error is the fault in words.
    pub(crate) fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        if bytes.len() > MAX_RECORD {
            return Err(format!("its record has {} bytes; {MAX_RECORD} are allowed", bytes.len()));
        }
        let record: Record =
            serde_json::from_slice(bytes).map_err(|error| format!("its record does not parse: {error}"))?;
        if record.version != RECORD_VERSION {
            return Err(format!(
                "its record has version {}; this library reads {RECORD_VERSION}",
                record.version
            ));
        }
        let member = Self {
            name: record.name,
            addresses: record.addresses,
            incarnation: record.incarnation,
            attributes: record.attributes,
            lease: Duration::from_millis(record.lease_ms),
        };
        member.fault().map_or(Ok(member), Err)
    }
}

/// The fault of a name, in words.
pub(crate) fn name_fault(name: &str) -> Option<String> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Some(format!("its name has {} bytes; 1 to {MAX_NAME} are allowed", name.len()));
    }
    name.chars().any(char::is_control).then(|| "its name has control characters".to_owned())
}

/// The begin of a text of any length, for messages.
pub(crate) fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// A member as JSON.
#[derive(Serialize, Deserialize)]
struct Record {
    version: u32,
    name: String,
    addresses: Vec<String>,
    incarnation: u64,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    #[serde(default)]
    lease_ms: u64,
    #[serde(default)]
    claim: u64,
}

/// What a directory lists at one moment.
#[derive(Debug, Default)]
pub struct Listing {
    members: BTreeMap<String, Member>,
    refused: Vec<(String, String)>,
}

impl Listing {
    /// Adds a record with its key, if it is valid.
    pub fn add_record(&mut self, key: &str, bytes: &[u8]) {
        match Member::from_record(key, bytes) {
            Ok(member) => self.add(member),
            Err(why) => self.refuse(key, why),
        }
    }

    /// Adds a member, if it is valid and its name is not in the list.
    pub fn add(&mut self, member: Member) {
        if let Some(why) = member.fault() {
            self.refuse(&member.name, why);
        } else if self.members.len() >= MAX_MEMBERS {
            self.refuse(&member.name, format!("the directory lists more than {MAX_MEMBERS} members"));
        } else if self.members.contains_key(&member.name) {
            self.refuse(&member.name, "another entry has its name".to_owned());
        } else {
            self.members.insert(member.name.clone(), member);
        }
    }

    /// Notes an entry that is not valid, and why.
    pub fn refuse(&mut self, key: &str, why: String) {
        const MOST: usize = 1024;
        if self.refused.len() < MOST {
            self.refused.push((shortened(key), why));
        }
    }

    /// The valid members, by name.
    pub fn members(&self) -> &BTreeMap<String, Member> {
        &self.members
    }

    /// The keys of the entries that are not valid, and their faults. At most 1024.
    pub fn refused(&self) -> &[(String, String)] {
        &self.refused
    }

    pub(crate) fn into_members(self) -> BTreeMap<String, Member> {
        self.members
    }

    /// Warns of each entry that is not valid.
    pub(crate) fn warn(&self, directory: &str) {
        for (key, why) in &self.refused {
            tracing::warn!(directory, entry = ?key, "this side skips an entry of the directory: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> Member {
        Member::new("worker 1/ä", 7).address("10.0.0.1:7411").address("[::1]:7").attribute("role", "decode")
    }

    #[test]
    fn a_record_keeps_everything() {
        let mut member = member();
        member.incarnation = u64::MAX;
        member.lease = Duration::from_millis(2500);
        assert_eq!(Member::from_record("worker 1/ä", &member.to_record(7)), Ok(member));
    }

    #[test]
    fn limits_hold() {
        let long = |len| "x".repeat(len);
        let bad = [
            Member::new("", 0).address("a"),
            Member::new(long(MAX_NAME + 1), 0).address("a"),
            Member::new("a\nb", 0).address("a"),
            Member::new("a", 0),
            Member::new("a", 0).address(""),
            Member::new("a", 0).address("a\0"),
            Member::new("a", 0).address(long(MAX_ADDRESS + 1)),
            Member::new("a", 0).address("a").attribute("k", long(MAX_ATTRIBUTES)),
            (0..=MAX_ADDRESSES).fold(Member::new("a", 0), |member, _| member.address("a")),
        ];
        for member in bad {
            assert_eq!(member.check().unwrap_err().kind(), ErrorKind::InvalidRequest, "{member:?}");
            let mut listing = Listing::default();
            listing.add_record(&member.name, &member.to_record(7));
            assert_eq!((listing.members().len(), listing.refused().len()), (0, 1), "{member:?}");
        }
        let mut largest =
            Member::new("\u{1F980}".repeat(MAX_NAME / 4), 0).attribute("k", long(MAX_ATTRIBUTES - 1));
        for _ in 0..MAX_ADDRESSES {
            largest = largest.address("\"".repeat(MAX_ADDRESS));
        }
        largest.check().unwrap();
        assert!(largest.to_record(u64::MAX).len() <= MAX_RECORD);
        assert_eq!(Member::from_record(&largest.name, &largest.to_record(u64::MAX)), Ok(largest.clone()));
    }

    #[test]
    fn foreign_bytes_are_refused_by_their_key() {
        let record = member().to_record(7);
        let other_version =
            String::from_utf8(record.clone()).unwrap().replace("\"version\":1", "\"version\":2");
        for bytes in
            [&b""[..], b"{}", b"\xff", b"[1,2]", other_version.as_bytes(), &vec![b' '; MAX_RECORD + 1]]
        {
            let mut listing = Listing::default();
            listing.add_record("worker 1/ä", bytes);
            assert!(listing.members().is_empty());
            assert_eq!(listing.refused()[0].0, "worker 1/ä");
        }
        // The record of one member under the key of another.
        let mut listing = Listing::default();
        listing.add_record("worker 2", &record);
        assert_eq!(listing.refused()[0].0, "worker 2");
        // The second of one name.
        listing.add(member());
        listing.add(member());
        assert_eq!((listing.members().len(), listing.refused().len()), (1, 2));
    }

    /// Records that are cut or changed anywhere are read or refused, and a name is never another's.
    #[test]
    fn damaged_records_do_not_break_the_reader() {
        let record = member().to_record(7);
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let mut bytes = record.clone();
            bytes.truncate(random.usize(..=record.len()));
            for _ in 0..random.usize(..3) {
                if !bytes.is_empty() {
                    let at = random.usize(..bytes.len());
                    bytes[at] = random.u8(..);
                }
            }
            if let Ok(read) = Member::from_record("worker 1/ä", &bytes) {
                assert_eq!(read.name, "worker 1/ä");
                read.check().unwrap();
            }
        }
    }
}

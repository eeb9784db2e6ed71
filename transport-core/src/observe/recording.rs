//! Recordings: dumps as bytes.

use super::Dump;
use crate::{Error, ErrorKind, Result};

/// The largest recording that [`Recording::from_bytes`] reads, in bytes.
pub const MAX_RECORDING: usize = 32 << 20;

/// The first bytes of a recording. The last one is the version of the format.
const HEADER: [u8; 8] = *b"mr-dump\x01";

/// Dumps of one fabric, or of several, in the order in which they were taken.
///
/// A recording is a header of 8 bytes (`mr-dump`, version 1), and then one frame per dump: the length in 4 bytes,
/// little endian, and the dump in postcard. To add a dump to a file, append [`Dump::to_bytes`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// The dumps.
    pub dumps: Vec<Dump>,
    /// Whether the last frame is incomplete, because the writer was stopped while it wrote.
    pub cut_off: bool,
}

impl Recording {
    /// The first bytes of a new file.
    pub fn header() -> &'static [u8] {
        &HEADER
    }

    /// Reads a recording. The bytes need not be trusted: the function never panics, and its memory is bounded by
    /// [`MAX_RECORDING`].
    ///
    /// # Errors
    /// `TooLarge` for more than [`MAX_RECORDING`] bytes, `Protocol` if the bytes are no recording, `Version` if another
    /// version of this crate wrote it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > MAX_RECORDING {
            let why = format!("the recording has {} bytes; the limit is {MAX_RECORDING}", bytes.len());
            return Err(Error::new(ErrorKind::TooLarge, "read recording", why));
        }
        let (name, version) = HEADER.split_at(HEADER.len() - 1);
        let Some(rest) = bytes.strip_prefix(name) else {
            return Err(broken("this is no recording of multirail; write one with --dump FILE"));
        };
        let Some(mut rest) = rest.strip_prefix(version) else {
            let why = format!(
                "the recording has version {:?}, this reader {version:?}; read it with the version of multirail that wrote it",
                rest.first()
            );
            return Err(Error::new(ErrorKind::Version, "read recording", why));
        };
        let mut dumps = Vec::new();
        while let Some((frame, after)) = frame(rest) {
            match postcard::take_from_bytes(frame) {
                Ok((dump, [])) => dumps.push(dump),
                _ => return Err(broken(format!("dump {} does not parse", dumps.len()))),
            }
            rest = after;
        }
        Ok(Self { dumps, cut_off: !rest.is_empty() })
    }
}

/// The first frame and the bytes after it. `None` if the frame is incomplete.
fn frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, after) = bytes.split_first_chunk()?;
    after.split_at_checked(u32::from_le_bytes(*length) as usize)
}

/// A dump as one frame of a recording.
pub(super) fn to_frame(dump: &Dump) -> Result<Vec<u8>> {
    let body = postcard::to_stdvec(dump).map_err(|e| broken(format!("the dump cannot be written: {e}")))?;
    let length = u32::try_from(body.len()).map_err(|_| broken("the dump is larger than 4 GiB"))?;
    Ok([&length.to_le_bytes(), &body[..]].concat())
}

#[cold]
fn broken(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, "read recording", why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Time;

    fn dump(host: String) -> Dump {
        let time = Time::from_nanos(5);
        Dump { host, process: 7, incarnation: u64::MAX, time, transports: Vec::new(), peers: Vec::new() }
    }

    fn recording() -> Vec<u8> {
        let frames = ["a", "b"].map(|host| dump(host.into()).to_bytes().unwrap()).concat();
        [Recording::header(), &frames].concat()
    }

    #[test]
    fn dumps_are_appended() {
        let read = Recording::from_bytes(&recording()).unwrap();
        assert_eq!(read, Recording { dumps: vec![dump("a".into()), dump("b".into())], cut_off: false });
        let none = Recording::from_bytes(Recording::header()).unwrap();
        assert_eq!(none, Recording { dumps: vec![], cut_off: false });
    }

    #[test]
    fn dumps_before_a_cut_are_read() {
        let whole = recording();
        let first = Recording::header().len() + dump("a".into()).to_bytes().unwrap().len();
        for end in first + 1..whole.len() {
            let read = Recording::from_bytes(&whole[..end]).unwrap();
            assert_eq!(read, Recording { dumps: vec![dump("a".into())], cut_off: true });
        }
    }

    #[test]
    fn errors_have_their_kinds() {
        let kind = |bytes: &[u8]| Recording::from_bytes(bytes).unwrap_err().kind();
        assert_eq!(kind(b""), ErrorKind::Protocol);
        assert_eq!(kind(b"mr-dump\x02"), ErrorKind::Version);
        assert_eq!(kind(&vec![0; MAX_RECORDING + 1]), ErrorKind::TooLarge);
        assert_eq!(kind(&[Recording::header(), &[0; 4]].concat()), ErrorKind::Protocol);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..2000), at in 0_usize..200, flip in 1_u8..) {
            let _ = Recording::from_bytes(&body);
            let framed = [Recording::header(), &(body.len() as u32).to_le_bytes(), &body].concat();
            let _ = Recording::from_bytes(&framed);
            let mut bent = recording();
            let place = at % bent.len();
            bent[place] ^= flip;
            if let Ok(read) = Recording::from_bytes(&bent) {
                read.dumps.iter().for_each(|dump| drop(dump.to_string()));
            }
        }
    }
}

//! How the two processes of a connection exchange the keys of their staging buffers: as an appendix to the inner
//! device's connection offer. A peer that does not stage reads the inner offer and ignores the appendix.

use multirail_spi::{Error, ErrorKind, RemoteKey, Result};

use crate::staging_buffer::{BUFFER_LEN, SLOT_COUNT, SLOT_LEN};
use crate::wire::ImmTag;

/// What a process offers to a peer that stages.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct StagingOffer {
    /// The key of its staging buffer.
    pub buffer: RemoteKey,
    /// The tag of the slot imms that it takes. `None` if it neither takes nor sends slot imms.
    pub imms: Option<ImmTag>,
    /// Whether imms wake its worker: then all that is written into its buffer carries one.
    pub is_woken: bool,
    /// Whether peers may coalesce pages of its registered regions.
    pub coalesces: bool,
}

/// The appendix, as it is encoded behind the inner offer.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Appendix {
    version: u8,
    offer: StagingOffer,
    slot_count: u32,
    slot_len: u32,
}

const VERSION: u8 = 7;
/// The last bytes of an offer with an appendix. The two bytes before them are the length of the appendix.
const MARK: [u8; 8] = *b"mrstaged";

/// Appends a staging offer to the inner device's offer.
pub(crate) fn append(mut inner: Vec<u8>, offer: StagingOffer) -> Result<Vec<u8>> {
    let appendix =
        Appendix { version: VERSION, offer, slot_count: SLOT_COUNT as u32, slot_len: SLOT_LEN as u32 };
    let failed = |why: postcard::Error| Error::new(ErrorKind::Io, "connect", why.to_string());
    let bytes = postcard::to_stdvec(&appendix).map_err(failed)?;
    inner.extend_from_slice(&bytes);
    inner.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    inner.extend_from_slice(&MARK);
    Ok(inner)
}

/// Splits a peer's offer into the inner device's offer and the staging offer, if there is one.
pub(crate) fn split(offer: &[u8]) -> Result<(&[u8], Option<StagingOffer>)> {
    let Some((rest, len)) = offer.strip_suffix(&MARK).and_then(<[u8]>::split_last_chunk) else {
        return Ok((offer, None));
    };
    let malformed = |why: &str| {
        Error::new(ErrorKind::Protocol, "connect", format!("the peer's staging offer is malformed: {why}"))
    };
    let inner_len = rest.len().checked_sub(u16::from_le_bytes(*len).into());
    let (inner, bytes) =
        rest.split_at(inner_len.ok_or_else(|| malformed("it is longer than the whole offer"))?);
    // The version is checked before the rest is decoded: other versions may encode the rest differently.
    if let Some(version) = bytes.first().filter(|version| **version != VERSION) {
        let why = format!(
            "the peer uses version {version} of the staging protocol, this process version {VERSION}: use the same \
             multirail in both"
        );
        return Err(Error::new(ErrorKind::Version, "connect", why));
    }
    let appendix: Appendix = postcard::from_bytes(bytes).map_err(|why| malformed(&why.to_string()))?;
    if (appendix.slot_count, appendix.slot_len) != (SLOT_COUNT as u32, SLOT_LEN as u32) {
        let Appendix { slot_count, slot_len, .. } = appendix;
        let why = format!(
            "the peer stages with {slot_count} slots of {slot_len} bytes, this process with {SLOT_COUNT} of \
             {SLOT_LEN}: use the same multirail in both"
        );
        return Err(Error::new(ErrorKind::Version, "connect", why));
    }
    if appendix.offer.buffer.len != BUFFER_LEN as u64 || appendix.offer.buffer.is_staged() {
        return Err(malformed("its staging buffer has the wrong length, or is staged itself"));
    }
    if appendix.offer.imms.is_some_and(|tag| !tag.is_valid()) {
        return Err(malformed("it has a tag that does not exist"));
    }
    Ok((inner, Some(appendix.offer)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::IMM_TAGS;

    const KEY: RemoteKey = RemoteKey { base: 1 << 40, key: 77, len: BUFFER_LEN as u64 };

    proptest! {
        #[test]
        fn an_offer_is_split_as_it_was_appended(
            inner: Vec<u8>, tag in 0..2 * IMM_TAGS, flipped: (prop::sample::Index, u8), cut: prop::sample::Index,
        ) {
            let imms = ImmTag::new(tag);
            let (is_woken, coalesces) = (imms.is_none(), imms.is_some());
            let offer = StagingOffer { buffer: KEY, imms, is_woken, coalesces };
            let whole = append(inner.clone(), offer).unwrap();
            prop_assert_eq!(split(&whole).unwrap(), (&inner[..], Some(offer)));
            // No input makes `split` panic.
            let mut other = whole.clone();
            other[flipped.0.index(whole.len())] ^= flipped.1;
            let _ = split(&other);
            let _ = split(&whole[cut.index(whole.len())..]);
            prop_assert_eq!(split(&whole[..whole.len() - 1]).unwrap().1, None);
        }
    }

    #[test]
    fn an_offer_that_does_not_fit_is_refused() {
        let append = |inner, buffer| {
            append(inner, StagingOffer { buffer, imms: ImmTag::new(0), is_woken: true, coalesces: true })
                .unwrap()
        };
        let refused = |buffer| split(&append(vec![1], buffer)).unwrap_err().kind();
        assert_eq!(refused(RemoteKey { len: 1, ..KEY }), ErrorKind::Protocol);
        assert_eq!(refused(RemoteKey { base: RemoteKey::STAGED, ..KEY }), ErrorKind::Protocol);
        assert!(postcard::from_bytes::<ImmTag>(&[127]).is_ok_and(ImmTag::is_valid));
        assert!(postcard::from_bytes::<ImmTag>(&[128]).is_ok_and(|tag| !tag.is_valid()));
        let mut other = append(Vec::new(), KEY);
        other[0] = VERSION + 1;
        assert_eq!(split(&other).unwrap_err().kind(), ErrorKind::Version);
    }
}

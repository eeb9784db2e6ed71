//! The receiver's side of the notifications of one peer.

use std::collections::BTreeMap;

use super::{Header, PAYLOAD};

/// The most fragments that may arrive before one with a smaller number: 32 MiB of them. A sender has at most half as many
/// numbers under way.
pub(crate) const MAX_EARLY: usize = (32 << 20) / PAYLOAD;

/// Puts the fragments of one peer in order, and joins them.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    /// The number of the fragment that comes next.
    next: u64,
    /// Fragments that came before it, by their number.
    early: BTreeMap<u64, (Header, Vec<u8>)>,
    /// The first bytes of a notification.
    begun: Vec<u8>,
}

impl Assembly {
    /// For a peer that is gone, and whose assembly was dropped: what came before this message was taken, or lost.
    pub fn from_message(header: Header) -> Self {
        Self { next: header.number, ..Self::default() }
    }

    /// Adds a message; calls `deliver` with the notifications that are complete with it, and whether they begin with a trace
    /// context. The error says how the peer has broken the protocol.
    pub fn add(
        &mut self,
        header: Header,
        payload: Vec<u8>,
        mut deliver: impl FnMut(Vec<u8>, bool) -> Result<(), String>,
    ) -> Result<(), String> {
        if header.total != Header::SKIP && header.number >= self.next {
            if header.number == self.next {
                self.join(header, payload, &mut deliver)?;
            } else if self.early.len() == MAX_EARLY {
                return Err(format!("{MAX_EARLY} fragments came before number {}", self.next));
            } else {
                self.early.insert(header.number, (header, payload));
            }
        }
        // The sender has given up the fragments below the floor that have not arrived.
        loop {
            if let Some((early, payload)) = self.early.remove(&self.next) {
                self.join(early, payload, &mut deliver)?;
                continue;
            }
            match self.early.first_key_value() {
                Some((&number, _)) if number <= header.floor => self.skip_to(number),
                _ => break,
            }
        }
        if self.next < header.floor {
            self.skip_to(header.floor);
        }
        Ok(())
    }

    /// Gives up the fragments before this one, and the notification that they belong to.
    fn skip_to(&mut self, number: u64) {
        self.next = number;
        self.begun.clear();
    }

    /// Joins the next fragment to the ones before it.
    fn join(
        &mut self,
        header: Header,
        payload: Vec<u8>,
        deliver: &mut impl FnMut(Vec<u8>, bool) -> Result<(), String>,
    ) -> Result<(), String> {
        self.next = header.number.checked_add(1).ok_or("a fragment has the last of all numbers")?;
        if header.offset == 0 {
            // The rest of the one that was begun has failed.
            self.begun.clear();
        }
        if payload.len() == header.total as usize {
            // The usual case: one fragment is all of it.
            return deliver(payload, header.is_traced);
        }
        if self.begun.len() != header.offset as usize {
            // A fragment before it has failed.
            return Ok(());
        }
        self.begun.extend_from_slice(&payload);
        if self.begun.len() == header.total as usize {
            return deliver(std::mem::take(&mut self.begun), header.is_traced);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{MAX_LEN, NotificationBytes, SendSequence};
    use super::*;
    use crate::TraceContext;

    fn add(assembly: &mut Assembly, message: &[u8], into: &mut Vec<Vec<u8>>) -> Result<(), String> {
        let header = Header::parse(message, message.len())?;
        assembly.add(header, message[Header::LEN..].to_vec(), |bytes, _| {
            into.push(bytes);
            Ok(())
        })
    }

    fn bytes_of(index: usize, len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 7 + index) as u8).collect()
    }

    /// A fragment: its message, and which notification it is of.
    fn fragments(sequence: &mut SendSequence, index: usize, len: usize) -> Vec<(u64, Vec<u8>)> {
        let bytes = bytes_of(index, len);
        let pieces: Vec<&[u8]> = if len == 0 { vec![&[]] } else { bytes.chunks(PAYLOAD).collect() };
        let (first, floor) = sequence.begin(pieces.len());
        let message = |(at, piece): (usize, &&[u8])| {
            let (number, offset) = (first + at as u64, (at * PAYLOAD) as u32);
            let header = Header { number, floor, offset, total: len as u32, is_traced: false };
            (number, [&header.to_bytes(), *piece].concat())
        };
        pieces.iter().enumerate().map(message).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]

        /// Some fragments fail, and all others come in any order. Every notification whose fragments have all arrived
        /// is delivered, in order, and no other.
        #[test]
        fn all_arrive_once_and_in_order(
            lens in prop::collection::vec(prop_oneof![0..20_usize, 0..if cfg!(miri) { 50 } else { 4 * PAYLOAD }], 1..12),
            failing in prop::collection::vec(0..40_u64, 0..4),
            seed: u64,
        ) {
            let (mut sequence, mut random) = (SendSequence::default(), fastrand::Rng::with_seed(seed));
            let (mut messages, mut want) = (Vec::new(), Vec::new());
            for (index, len) in lens.iter().enumerate() {
                let all = fragments(&mut sequence, index, *len);
                if all.iter().all(|(number, _)| !failing.contains(number)) {
                    want.push(bytes_of(index, *len));
                }
                messages.extend(all);
            }
            let failed: Vec<_> = messages.extract_if(.., |(number, _)| failing.contains(number)).collect();
            random.shuffle(&mut messages);
            let (mut assembly, mut got) = (Assembly::default(), Vec::new());
            for (number, message) in messages {
                add(&mut assembly, &message, &mut got).unwrap();
                sequence.end(number, true);
            }
            failed.iter().for_each(|(number, _)| sequence.end(*number, false));
            // One more comes before the peer is told.
            let (number, floor) = sequence.begin(1);
            let more = Header { number, floor, offset: 0, total: 0, is_traced: false };
            add(&mut assembly, &more.to_bytes(), &mut got).unwrap();
            want.push(Vec::new());
            if let Some(floor) = sequence.begin_telling() {
                let skip = Header::skip(floor);
                add(&mut assembly, &skip.to_bytes(), &mut got).unwrap();
            }
            let lens = |all: &[Vec<u8>]| all.iter().map(Vec::len).collect::<Vec<_>>();
            prop_assert!(got == want, "got {:?}, want {:?}", lens(&got), lens(&want));
        }
    }

    /// The last fragment says whether a trace context comes first; one that has no room for it breaks the protocol.
    #[test]
    fn flags_of_fragments_may_differ_and_a_context_may_be_cut() {
        let deliver = |fragments: &[(u64, usize, usize, bool)]| {
            let (mut assembly, mut got) = (Assembly::default(), Vec::new());
            for (number, offset, total, is_traced) in fragments.iter().copied() {
                let header =
                    Header { number, floor: 0, offset: offset as u32, total: total as u32, is_traced };
                let payload = vec![1; (total - offset).min(PAYLOAD)];
                assembly.add(header, payload, |bytes, is_traced| {
                    got.push(NotificationBytes::parse(bytes, is_traced)?);
                    Ok(())
                })?;
            }
            Ok::<_, String>(got)
        };
        let trace = TraceContext::new([1; 16], [1; 8], 1).ok();
        let (two, len) = (PAYLOAD + 9, PAYLOAD + 9 - TraceContext::LEN);
        assert_eq!(deliver(&[(0, 0, two, false), (1, PAYLOAD, two, true)]), Ok(vec![(trace, vec![1; len])]));
        assert_eq!(deliver(&[(0, 0, two, true), (1, PAYLOAD, two, false)]), Ok(vec![(None, vec![1; two])]));
        assert_eq!(deliver(&[(0, 0, 25, true)]), Ok(vec![(trace, Vec::new())]));
        for short in [0, 1, 24] {
            assert!(deliver(&[(0, 0, short, true)]).unwrap_err().contains("shorter"));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "thousands of interpreted fragments")]
    fn a_peer_cannot_fill_the_memory() {
        let (mut assembly, mut got) = (Assembly::default(), Vec::new());
        let header = |number| Header { number, floor: 0, offset: 0, total: 0, is_traced: false }.to_bytes();
        for number in 1..=MAX_EARLY as u64 {
            add(&mut assembly, &header(number), &mut got).unwrap();
        }
        assert!(
            add(&mut assembly, &header(MAX_EARLY as u64 + 1), &mut got)
                .unwrap_err()
                .contains("before number 0")
        );
        add(&mut assembly, &header(0), &mut got).unwrap();
        assert_eq!(got.len(), MAX_EARLY + 1);
        let last =
            Header { number: u64::MAX, floor: u64::MAX, offset: 0, total: MAX_LEN as u32, is_traced: false };
        let whole = [&last.to_bytes()[..], &[0; PAYLOAD]].concat();
        assembly.next = u64::MAX;
        assert!(add(&mut assembly, &whole, &mut got).is_err());
    }
}

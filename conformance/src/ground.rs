//! Memory that knows what it should contain: every trial checks whole regions, so
//! a byte that strays anywhere inside them is found.

use std::ops::Range;

use transport_core::spi::Revocation;
use transport_core::{Access, ErrorKind, Region, RemoteRegion, TransportInfo};

use crate::check::{Failure, Verdict};
use crate::end::End;
use crate::process::LIMIT;

/// Anything a peer may do.
pub(crate) const OPEN: Access = Access::all();

/// Bytes that are compared at a time.
const PIECE: usize = 32 << 10;

/// A region and its expected bytes.
pub(crate) struct Ground {
    pub region: Region,
    expected: Vec<u8>,
}

impl Ground {
    /// `len` bytes of that end's memory, filled by `seed`.
    #[track_caller]
    pub(crate) fn new(end: &End, len: usize, access: Access, seed: u64) -> Verdict<Self> {
        let region = end.region(len, access)?;
        let expected = content(seed, len);
        region.copy_in(0, &expected)?;
        Ok(Self { region, expected })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.expected.len()
    }

    /// What should be in `range`.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.expected[range]
    }

    /// From now on `bytes` should be at `at`.
    pub(crate) fn expect(&mut self, at: usize, bytes: &[u8]) {
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// From now on what `from` has in `range` should be at `at`.
    pub(crate) fn expect_from(&mut self, at: usize, from: &Self, range: Range<usize>) {
        self.expect(at, &from.expected[range]);
    }

    /// Writes new content by `seed`, as the owner.
    #[track_caller]
    pub(crate) fn fill(&mut self, seed: u64) -> Verdict {
        self.expected = content(seed, self.len());
        Ok(self.region.copy_in(0, &self.expected)?)
    }

    /// Takes what is there now for what should be there.
    #[track_caller]
    pub(crate) fn accept(&mut self) -> Verdict {
        Ok(self.region.copy_out(0, &mut self.expected)?)
    }

    /// Whether all is as it should be.
    pub(crate) fn is_right(&self) -> bool {
        self.first_wrong().is_ok_and(|wrong| wrong.is_none())
    }

    /// An error that names the first wrong byte.
    #[track_caller]
    pub(crate) fn check(&self, what: &str) -> Verdict {
        let Some((at, got)) = self.first_wrong()? else { return Ok(()) };
        let (want, len) = (self.expected[at], self.len());
        Err(Failure::new(format!("{what}: byte {at} of {len} is {got}, want {want}")))
    }

    /// The place and value of the first byte that is not as it should be. A piece at a time:
    /// fresh memory for a copy of all of it would cost more than the copy.
    #[track_caller]
    fn first_wrong(&self) -> Verdict<Option<(usize, u8)>> {
        let mut actual = [0; PIECE];
        for (number, expected) in self.expected.chunks(PIECE).enumerate() {
            let actual = &mut actual[..expected.len()];
            self.region.copy_out(number * PIECE, actual)?;
            if actual != expected {
                let wrong = actual.iter().zip(expected).position(|(got, want)| got != want);
                return Ok(wrong.map(|at| (number * PIECE + at, actual[at])));
            }
        }
        Ok(None)
    }

    /// Takes the region back from `fabric`'s peers, in real time. Where late bytes may land, that must be said.
    #[track_caller]
    pub(crate) fn take_back(&self, fabric: &End) -> Verdict {
        let is_late = |info: &TransportInfo| info.capabilities.revocation == Revocation::Late;
        match self.region.revoke()?.wait(LIMIT) {
            Err(error)
                if error.kind() == ErrorKind::Unsupported && fabric.transports().iter().any(is_late) =>
            {
                Ok(())
            }
            result => Ok(result.map(drop)?),
        }
    }

    /// Imports it through a peer.
    #[track_caller]
    pub(crate) fn import(&self, by: &transport_core::Peer) -> Verdict<RemoteRegion> {
        Ok(by.import(&self.region.descriptor())?)
    }
}

/// `len` bytes, always the same for one seed.
pub(crate) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

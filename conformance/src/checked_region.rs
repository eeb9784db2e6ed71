//! Regions with their expected bytes.
//!
//! Every trial compares whole regions, so that it finds each byte that landed in a wrong place.

use std::ops::Range;

use transport_core::spi::Revocation;
use transport_core::{Access, ErrorKind, Region, RemoteRegion, TransportInfo};

use crate::check::{TestResult, TrialFailure};
use crate::process::LIMIT;
use crate::trial::TrialFabric;

/// All access rights for a peer.
pub(crate) const FULL_ACCESS: Access = Access::all();

/// The number of bytes that are compared at a time.
const PIECE: usize = 32 << 10;

/// A region and its expected bytes.
pub(crate) struct CheckedRegion {
    pub region: Region,
    expected: Vec<u8>,
}

impl CheckedRegion {
    /// Allocates `len` bytes of the fabric's kind of memory and fills them with the content of `seed`.
    #[track_caller]
    pub(crate) fn new(fabric: &TrialFabric, len: usize, access: Access, seed: u64) -> TestResult<Self> {
        Self::filled(fabric.region(None, len, access)?, seed)
    }

    /// As [`CheckedRegion::new`]. Registers the memory near one rail group only.
    #[track_caller]
    pub(crate) fn near(
        fabric: &TrialFabric,
        group: usize,
        len: usize,
        access: Access,
        seed: u64,
    ) -> TestResult<Self> {
        Self::filled(fabric.region(Some(group), len, access)?, seed)
    }

    #[track_caller]
    fn filled(region: Region, seed: u64) -> TestResult<Self> {
        let len = region.len();
        let expected = content(seed, len);
        region.copy_in(0, &expected)?;
        Ok(Self { region, expected })
    }

    /// The region's length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.expected.len()
    }

    /// The expected bytes of `range`.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.expected[range]
    }

    /// Expects `bytes` at `at` from now on.
    pub(crate) fn expect(&mut self, at: usize, bytes: &[u8]) {
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Expects the bytes that `from` has in `range` at `at` from now on.
    pub(crate) fn expect_from(&mut self, at: usize, from: &Self, range: Range<usize>) {
        self.expect(at, &from.expected[range]);
    }

    /// Fills the region, as its owner, with the content of `seed`.
    #[track_caller]
    pub(crate) fn fill(&mut self, seed: u64) -> TestResult {
        self.expected = content(seed, self.len());
        Ok(self.region.copy_in(0, &self.expected)?)
    }

    /// Expects the bytes that the region has now.
    #[track_caller]
    pub(crate) fn accept(&mut self) -> TestResult {
        Ok(self.region.copy_out(0, &mut self.expected)?)
    }

    /// Returns true if the region has the expected bytes.
    pub(crate) fn matches(&self) -> bool {
        self.first_mismatch().is_ok_and(|wrong| wrong.is_none())
    }

    /// Fails with the first wrong byte, if there is one.
    #[track_caller]
    pub(crate) fn check(&self, what: &str) -> TestResult {
        let Some((at, got)) = self.first_mismatch()? else { return Ok(()) };
        let (want, len) = (self.expected[at], self.len());
        Err(TrialFailure::new(format!("{what}: byte {at} of {len} is {got}, want {want}")))
    }

    /// Returns the offset and the value of the first wrong byte.
    ///
    /// Compares one piece at a time: to allocate memory for the whole region would cost more than the copy.
    #[track_caller]
    fn first_mismatch(&self) -> TestResult<Option<(usize, u8)>> {
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

    /// Revokes the region, in real time, and waits for the result. `Unsupported` is accepted where a
    /// transport states that late bytes may land.
    #[track_caller]
    pub(crate) fn revoke_and_wait(&self, fabric: &TrialFabric) -> TestResult {
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

    /// Imports the region through `peer`.
    #[track_caller]
    pub(crate) fn import(&self, peer: &transport_core::Peer) -> TestResult<RemoteRegion> {
        Ok(peer.import(&self.region.descriptor())?)
    }
}

/// Returns `len` bytes, which are always the same for one seed.
pub(crate) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

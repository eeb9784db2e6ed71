//! A peer as its session sees it.

use std::time::Instant;

use multirail_spi::{Allowance, Error, Result};

use super::Peer;
use crate::control::SessionPeer;

impl SessionPeer for Peer {
    fn connected(&self, address: String) {
        let _ = self.0.address.set(address);
    }

    fn heard(&self, now: Instant) {
        self.0.is_heard(now);
    }

    fn grants(&self) -> Vec<(String, Allowance)> {
        self.grants().map(|(label, allowance)| (label.to_owned(), allowance)).collect()
    }

    fn note_grant(&self, label: &str, allowance: &Allowance) -> Result<()> {
        self.note_grant(label, allowance)
    }

    fn note_revoked(&self, incarnation: u64, region: u64) {
        self.note_revoked(incarnation, region);
    }

    fn note_barrier(&self, name: &str) -> std::result::Result<(), String> {
        self.0.barriers.arrived(name).map_err(Into::into)
    }

    fn note_relocation(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>> {
        self.note_move(label, pair, offer)
    }

    fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()> {
        self.note_followed(label, pair, answer)
    }

    fn closed(&self) -> impl Future<Output = Error> + Send + Unpin {
        self.closed()
    }

    fn fail(&self, error: Error) {
        self.fail(error);
    }

    fn disconnect(&self) {
        self.disconnect();
    }
}

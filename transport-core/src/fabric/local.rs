//! Connecting two fabrics of this process.

use std::sync::Arc;

use super::FabricInner;
use crate::control::SessionHandle;
use crate::{Peer, Result};

/// Hands the offers over in memory.
pub(super) fn connect_local(ours: &Arc<FabricInner>, theirs: &Arc<FabricInner>) -> Result<(Peer, Peer)> {
    let mut a = ours.prepare(None, true)?;
    let offer_a = a.offers();
    let mut b = theirs.prepare(Some(&offer_a), true)?;
    let offer_b = b.offers();
    let report_a = a.complete(&offer_b, &[]);
    let report_b = b.complete(&offer_a, &report_a);
    let there = a.admit(&report_b, theirs.identity().clone(), SessionHandle::detached())?;
    let here = b.admit(&report_a, ours.identity().clone(), SessionHandle::detached())?;
    let _ = there.0.in_process_peer.set(Arc::downgrade(&here.0));
    let _ = here.0.in_process_peer.set(Arc::downgrade(&there.0));
    // Known before anybody can send.
    there.grants().try_for_each(|(label, allowance)| here.note_grant(label, &allowance))?;
    here.grants().try_for_each(|(label, allowance)| there.note_grant(label, &allowance))?;
    Ok((there, here))
}

//! What a peer may send us, and we it.

use super::Peer;
use crate::engine::Control;
use crate::engine::flow_control::Allowance;
use crate::index::TransportIndex;
use crate::{Error, ErrorKind, Result};

impl Peer {
    /// Asks the fabric's [`GrantPolicy`](crate::GrantPolicy) anew how much this peer may send,
    /// and tells it: after the policy, or what it decides by, has changed.
    pub fn regrant(&self) {
        for link in self.0.leads().filter(|link| link.is_up()) {
            link.engine.control(Control::RenewGrant { link: link.index, peer: self.0.id });
        }
    }

    /// What it was granted, by the transport's label.
    pub(crate) fn grants(&self) -> impl Iterator<Item = (&str, Allowance)> {
        let up = self.0.leads().filter(|link| link.is_up());
        up.filter_map(|link| Some((&*link.label, link.engine.receiver_credits.state(self.0.id)?.allowance)))
    }

    /// Tells the other side what it may send over one of our transports.
    pub(crate) fn tell_grant(&self, transport: TransportIndex, allowance: Allowance) {
        let label = &self.0.lead(transport).label;
        self.0.session.grant(label, allowance);
        if let Some(twin) = self.twin()
            && let Err(error) = twin.note_grant(label, &allowance)
        {
            tracing::error!(%error, "a grant within this process was refused");
        }
    }

    /// The other side says what we may send.
    pub(crate) fn note_grant(&self, label: &str, allowance: &Allowance) -> Result<()> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Protocol, "take a grant", why));
        let Some(link) = self.0.links.iter().find(|link| link.is_up() && link.label == label) else {
            return refuse(format!("a grant for {label:?}, which is no transport between us"));
        };
        if !link.credit.raise(allowance) {
            return refuse("a grant below the one before: imms and messages only add up".into());
        }
        if link.credit.should_notify() {
            for link in self.0.route(link.engine.transport) {
                link.engine.control(Control::GrantReceived { link: link.index });
            }
        }
        Ok(())
    }
}

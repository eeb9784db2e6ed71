//! The error detail for two fabrics that have no transport in common.

use std::fmt;

/// The transports that each side offers, if none of them connects the two sides. It is the source of the `Unreachable`
/// error of [`Fabric::connect`](crate::Fabric::connect).
///
/// ```
/// use std::error::Error;
/// use multirail_core::NoCommonTransport;
///
/// fn offers(error: &multirail_core::Error) -> Option<&NoCommonTransport> {
///     let chain = std::iter::successors(error.source(), |error| (*error).source());
///     chain.filter_map(|error| error.downcast_ref()).next()
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoCommonTransport {
    /// The transports of this side.
    pub ours: Vec<OfferedTransport>,
    /// The transports of the peer.
    pub theirs: Vec<OfferedTransport>,
}

/// A transport as the other side learns of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OfferedTransport {
    /// The transport's label in its fabric.
    pub label: String,
    /// The name of the transport's backend.
    pub backend: String,
}

impl NoCommonTransport {
    pub(crate) fn new(ours: Vec<OfferedTransport>, theirs: Vec<OfferedTransport>) -> Self {
        Self { ours, theirs }
    }
}

impl OfferedTransport {
    pub(crate) fn new(label: &str, backend: &str) -> Self {
        Self { label: label.to_owned(), backend: backend.to_owned() }
    }
}

impl fmt::Display for OfferedTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.label)?;
        if self.label == self.backend { Ok(()) } else { write!(f, " (backend {})", self.backend) }
    }
}

impl fmt::Display for NoCommonTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |offers: &[OfferedTransport]| {
            let names: Vec<String> = offers.iter().map(ToString::to_string).collect();
            if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
        };
        write!(f, "this side offers {}; the peer offers {}", list(&self.ours), list(&self.theirs))
    }
}

impl std::error::Error for NoCommonTransport {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_named() {
        let ours = vec![OfferedTransport::new("loopback", "loopback")];
        let theirs = vec![OfferedTransport::new("cards", "efa"), OfferedTransport::new("verbs", "verbs")];
        let words = NoCommonTransport::new(ours, theirs).to_string();
        assert_eq!(words, "this side offers loopback; the peer offers cards (backend efa), verbs");
        let none = NoCommonTransport::new(Vec::new(), Vec::new()).to_string();
        assert_eq!(none, "this side offers nothing; the peer offers nothing");
    }
}

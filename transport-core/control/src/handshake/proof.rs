//! What shows that a side has the token, without showing the token.
//!
//! HMAC-SHA256, keyed by the token, over a label, the role of the prover, both
//! hellos as they were on the wire (that of the side that connected first) and the
//! channel's binding, each behind its length. The nonces in the hellos make every
//! proof new, so a recorded one is worth nothing; the role keeps one side's proof
//! from being sent back as the other's; the binding keeps a proof made on one TLS
//! connection from being used on another.

use crate::frame::Code;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::handshake::token::Token;

/// Says what is authenticated. Another use of the token has another label.
const LABEL: &[u8] = b"multirail control 1 proof";

/// A side of the conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connected. It says hello, proves and offers first.
    Connecting,
    /// It listened and accepted.
    Accepting,
}

/// What both sides have seen.
pub struct Transcript {
    /// The hello of the side that connected.
    pub connecting: Vec<u8>,
    /// The hello of the side that accepted.
    pub accepting: Vec<u8>,
    /// Of the channel below; empty without TLS.
    pub binding: Vec<u8>,
}

impl Transcript {
    /// The proof that `role` gives.
    pub fn prove(&self, token: &Token, role: Role) -> Code {
        self.mac(token, role).finalize().into_bytes().into()
    }

    /// Whether `code` is that proof. Takes as long wherever it differs.
    pub fn verify(&self, token: &Token, role: Role, code: &Code) -> bool {
        self.mac(token, role).verify_slice(code).is_ok()
    }

    fn mac(&self, token: &Token, role: Role) -> Hmac<Sha256> {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(token.bytes()) else {
            unreachable!("HMAC takes keys of any length")
        };
        let role = match role {
            Role::Connecting => b'C',
            Role::Accepting => b'A',
        };
        for part in [LABEL, &[role], &self.connecting, &self.accepting, &self.binding] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript(connecting: &[u8], accepting: &[u8], binding: &[u8]) -> Transcript {
        Transcript {
            connecting: connecting.to_vec(),
            accepting: accepting.to_vec(),
            binding: binding.to_vec(),
        }
    }

    #[test]
    fn depends_on_everything() {
        let token = Token::new("a token of many bytes").unwrap();
        let good = transcript(b"client", b"server", b"tls");
        let code = good.prove(&token, Role::Connecting);
        assert!(good.verify(&token, Role::Connecting, &code));
        assert!(!good.verify(&token, Role::Accepting, &code), "reflected");
        assert!(!good.verify(&Token::new("a token of many bites").unwrap(), Role::Connecting, &code));
        for other in [
            transcript(b"server", b"client", b"tls"),
            transcript(b"Client", b"server", b"tls"),
            transcript(b"client", b"Server", b"tls"),
            transcript(b"client", b"server", b""),
            // The borders count: no part can lend bytes to its neighbour.
            transcript(b"clients", b"erver", b"tls"),
            transcript(b"client", b"servert", b"ls"),
        ] {
            assert!(!other.verify(&token, Role::Connecting, &code));
        }
        let mut flipped = code;
        flipped[31] ^= 1;
        assert!(!good.verify(&token, Role::Connecting, &flipped));
    }

    /// As computed by another implementation over the same bytes:
    /// `openssl dgst -sha256 -mac HMAC -macopt hexkey:...`.
    #[test]
    fn is_the_one_written_down() {
        let token = Token::new("0123456789abcdef").unwrap();
        let code = transcript(b"hello C", b"hello A", b"").prove(&token, Role::Accepting);
        let hex: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "d48a215dbe2dce2f91d05957e717d6cd0be91552e156b54c83d1a205ef5e454a");
    }
}

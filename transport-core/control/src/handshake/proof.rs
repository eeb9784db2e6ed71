//! The proof that a side has the token. The proof does not reveal the token.
//!
//! The proof is an HMAC-SHA256, keyed by the token, over a label, the prover's role, both hellos
//! as sent (the hello of the side that connected comes first) and the channel binding. The length
//! of each part precedes it. The nonces in the hellos make every proof new, so an attacker cannot
//! replay a recorded proof. The role prevents an attacker from sending one side's proof back as the
//! other's. The binding prevents the use of a proof of one TLS connection on another connection.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::frame::Code;
use crate::handshake::token::Token;

/// Identifies the purpose of the code. Any other use of the token must have another label.
const LABEL: &[u8] = b"multirail control 1 proof";

/// A side of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The side that connected. This side proves, offers and reports first.
    Connecting,
    /// The side that listened and accepted.
    Accepting,
}

/// The bytes that both sides have seen, which a proof covers.
pub struct Transcript {
    /// The hello of the side that connected.
    pub connecting: Vec<u8>,
    /// The hello of the side that accepted.
    pub accepting: Vec<u8>,
    /// The binding of the channel; empty without TLS.
    pub binding: Vec<u8>,
}

impl Transcript {
    /// The proof of the side with `role`.
    pub fn prove(&self, token: &Token, role: Role) -> Code {
        self.mac(token, role).finalize().into_bytes().into()
    }

    /// Whether `code` is the proof of the side with `role`. The time is constant: it does not depend on which bytes
    /// differ.
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
    fn depends_on_every_input() {
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
            // The lengths of the parts count: bytes cannot move from one part to the next.
            transcript(b"clients", b"erver", b"tls"),
            transcript(b"client", b"servert", b"ls"),
        ] {
            assert!(!other.verify(&token, Role::Connecting, &code));
        }
        let mut flipped = code;
        flipped[31] ^= 1;
        assert!(!good.verify(&token, Role::Connecting, &flipped));
    }

    /// The code, as computed by another implementation over the same bytes:
    /// `openssl dgst -sha256 -mac HMAC -macopt hexkey:...`.
    #[test]
    fn matches_the_code_computed_by_openssl() {
        let token = Token::new("0123456789abcdef").unwrap();
        let code = transcript(b"hello C", b"hello A", b"").prove(&token, Role::Accepting);
        let hex: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "d48a215dbe2dce2f91d05957e717d6cd0be91552e156b54c83d1a205ef5e454a");
    }
}

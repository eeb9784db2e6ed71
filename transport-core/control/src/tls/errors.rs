//! Converts TLS failures to our errors. No other module reads the errors of rustls.

use std::io;

use rustls::{AlertDescription as Alert, CertificateError as Certificate, Error as Tls};

use crate::framing::connection_lost;
use multirail_spi::{Error, ErrorKind};

/// The error for a failed TLS handshake with the peer at `address`.
pub(super) fn handshake_error(error: io::Error, address: &str) -> Error {
    let (kind, why) = match tls(&error) {
        Some(tls) => explain(tls),
        None => (
            ErrorKind::PeerDied,
            "the connection was closed during the TLS handshake: does the other side speak TLS \
             (TlsBootstrap, or --tls-cert)?"
                .into(),
        ),
    };
    Error::new(kind, "connect", format!("{address}: {why}")).with_source(error)
}

/// The error for a failed receive. In TLS 1.3 a client learns only here that the server rejects its
/// certificate.
pub(super) fn receive_error(error: io::Error) -> Error {
    match tls(&error).map(explain) {
        Some((kind, why)) => Error::new(kind, "control", why).with_source(error),
        None => connection_lost(error),
    }
}

fn tls(error: &io::Error) -> Option<&Tls> {
    error.get_ref()?.downcast_ref()
}

fn explain(error: &Tls) -> (ErrorKind, String) {
    use ErrorKind::{Permission, Protocol};
    let (kind, why) = match error {
        Tls::NoCertificatesPresented => (
            Permission,
            "the client presented no certificate: give it one (TlsBootstrap::new, or --tls-cert)",
        ),
        Tls::InvalidCertificate(certificate) => match certificate {
            Certificate::Expired | Certificate::ExpiredContext { .. } => {
                (Permission, "the peer's certificate has expired: renew it there, or check the clocks")
            }
            Certificate::NotValidYet | Certificate::NotValidYetContext { .. } => {
                (Permission, "the peer's certificate is not valid yet: check the clocks of both hosts")
            }
            Certificate::UnknownIssuer | Certificate::BadSignature => (
                Permission,
                "the peer's certificate is not signed by our roots: give both sides the same CA (--tls-ca)",
            ),
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => (
                Permission,
                "the peer's certificate is for another name: connect to it by that name, set \
                 TlsBootstrap::server_name, or certify the address",
            ),
            _ => (Permission, "the peer's certificate is not accepted: make a new one"),
        },
        Tls::AlertReceived(alert) => match alert {
            Alert::CertificateRequired => (
                Permission,
                "the peer asks for a certificate: TlsBootstrap::new, or --tls-cert and --tls-key",
            ),
            Alert::UnknownCA | Alert::DecryptError => (
                Permission,
                "the peer does not accept our certificate, which is not signed by its roots: give both sides \
                 the same CA (--tls-ca)",
            ),
            Alert::CertificateExpired => (Permission, "our certificate has expired: renew it"),
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::AccessDenied => {
                (Permission, "the peer does not accept our certificate: see its log, and make a new one")
            }
            Alert::ProtocolVersion => {
                (Protocol, "the peer does not speak TLS 1.3: use one release on both sides")
            }
            _ => (Protocol, "the peer ended the TLS connection: see its log"),
        },
        Tls::InvalidMessage(_) | Tls::InappropriateMessage { .. } | Tls::PeerSentOversizedRecord => (
            Protocol,
            "the other side does not speak TLS: use TLS on both sides or on neither (TlsBootstrap, or \
             --tls-cert, --tls-key and --tls-ca)",
        ),
        Tls::PeerIncompatible(_) => {
            (Protocol, "the peer's TLS settings have nothing in common with ours: both sides need TLS 1.3")
        }
        _ => (Protocol, "the TLS connection failed"),
    };
    (kind, why.to_owned())
}

//! TLS to the API server, by the cluster's own certificate authority.

use std::sync::Arc;

use multirail::{Error, ErrorKind, Result};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The certificates that the API server's must come from.
pub struct TlsTrust(TlsConnector);

impl TlsTrust {
    /// Trusts the authorities in a PEM file's bytes.
    pub fn new(pem: &[u8]) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate = certificate
                .map_err(|error| failed("the cluster's certificate is damaged").with_source(error))?;
            roots
                .add(certificate)
                .map_err(|error| failed("the cluster's certificate is of no use").with_source(error))?;
        }
        if roots.is_empty() {
            return Err(failed("the cluster's file of certificates has none"));
        }
        let config = ClientConfig::builder_with_provider(provider()?)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed("TLS 1.3 is not available").with_source(error))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Connects to the server of this name or address.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| failed(format!("{host:?} is no name of a server")).with_source(error))?;
        self.0.connect(name, stream).await.map_err(|error| {
            Error::new(ErrorKind::Unreachable, "kubernetes", format!("TLS to {host} failed"))
                .with_source(error)
        })
    }
}

/// The provider aborts the process on a processor without the instructions that it needs.
#[cfg(target_arch = "x86_64")]
fn provider() -> Result<Arc<CryptoProvider>> {
    let has_all = std::is_x86_feature_detected!("aes")
        && std::is_x86_feature_detected!("pclmulqdq")
        && std::is_x86_feature_detected!("bmi1")
        && std::is_x86_feature_detected!("bmi2")
        && std::is_x86_feature_detected!("adx")
        && std::is_x86_feature_detected!("avx")
        && std::is_x86_feature_detected!("avx2");
    match has_all {
        true => Ok(Arc::new(rustls_graviola::default_provider())),
        false => Err(unsupported()),
    }
}

#[cfg(target_arch = "aarch64")]
fn provider() -> Result<Arc<CryptoProvider>> {
    let has_all = std::arch::is_aarch64_feature_detected!("neon")
        && std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull")
        && std::arch::is_aarch64_feature_detected!("sha2");
    match has_all {
        true => Ok(Arc::new(rustls_graviola::default_provider())),
        false => Err(unsupported()),
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn provider() -> Result<Arc<CryptoProvider>> {
    Err(unsupported())
}

#[cold]
fn unsupported() -> Error {
    let why = "this processor lacks instructions that multirail's TLS needs; use `kubectl proxy` and ?api=http://...";
    Error::new(ErrorKind::Unsupported, "kubernetes", why)
}

#[cold]
fn failed(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidRequest, "kubernetes", why.into())
}

//! Certificates, keys and roots: reads them from PEM and builds the configurations of rustls.

use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use multirail_spi::{Error, ErrorKind, Result};

/// The certificate that a side presents, and the roots that it trusts.
#[derive(Clone)]
pub(super) struct Credentials {
    identity: Option<(Vec<CertificateDer<'static>>, Arc<PrivateKeyDer<'static>>)>,
    roots: Arc<RootCertStore>,
    client: Arc<ClientConfig>,
    pub anonymous_clients: bool,
}

impl Credentials {
    pub fn new(certificates: &[u8], key: &[u8], roots: &[u8]) -> Result<Self> {
        let chain = parse_certificates("certificate chain", certificates)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|e| invalid("the PEM of the private key holds none".into()).with_source(e))?;
        Self::of(Some((chain, Arc::new(key))), roots)
    }

    pub fn anonymous(roots: &[u8]) -> Result<Self> {
        Self::of(None, roots)
    }

    fn of(
        identity: Option<(Vec<CertificateDer<'static>>, Arc<PrivateKeyDer<'static>>)>,
        roots: &[u8],
    ) -> Result<Self> {
        let mut store = RootCertStore::empty();
        for root in parse_certificates("roots", roots)? {
            store.add(root).map_err(|e| invalid("a root is not a CA certificate".into()).with_source(e))?;
        }
        let roots = Arc::new(store);
        let builder = ClientConfig::builder_with_provider(provider()?)
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| {
                Error::new(ErrorKind::Unsupported, "set up TLS", "the TLS provider does not support TLS 1.3")
                    .with_source(e)
            })?
            .with_root_certificates(Arc::clone(&roots));
        let mut client = match &identity {
            Some((chain, key)) => {
                builder.with_client_auth_cert(chain.clone(), key.clone_key()).map_err(mismatch)?
            }
            None => builder.with_no_client_auth(),
        };
        client.resumption = Resumption::disabled();
        Ok(Self { identity, roots, client: Arc::new(client), anonymous_clients: false })
    }

    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    pub fn server(&self) -> Result<Arc<ServerConfig>> {
        let Some((chain, key)) = &self.identity else {
            let why =
                "listening needs a certificate and its key: TlsBootstrap::new, or --tls-cert and --tls-key";
            return Err(Error::new(ErrorKind::InvalidRequest, "listen", why));
        };
        let provider = provider()?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| {
                Error::new(ErrorKind::Unsupported, "set up TLS", "the TLS provider does not support TLS 1.3")
                    .with_source(e)
            })?;
        let builder = if self.anonymous_clients {
            builder.with_no_client_auth()
        } else {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&self.roots), provider)
                .build()
                .map_err(|e| invalid("the roots cannot verify clients".into()).with_source(e))?;
            builder.with_client_cert_verifier(verifier)
        };
        let mut server = builder.with_single_cert(chain.clone(), key.clone_key()).map_err(mismatch)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Arc::new(server))
    }
}

/// Reads a PEM file.
pub(super) fn read_pem(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::os("set up TLS", format!("{}", path.display()), e))
}

fn parse_certificates(what: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match parsed {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(invalid(format!("the PEM of the {what} holds no certificate"))),
        Err(e) => Err(invalid(format!("the PEM of the {what} is damaged")).with_source(e)),
    }
}

fn mismatch(error: rustls::Error) -> Error {
    invalid("certificate and private key do not belong together".into()).with_source(error)
}

fn invalid(why: String) -> Error {
    Error::new(ErrorKind::InvalidRequest, "set up TLS", why)
}

/// The cryptography provider. It aborts the process on a processor that lacks an instruction it
/// needs, so this function checks the processor first.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn provider() -> Result<Arc<CryptoProvider>> {
    #[cfg(target_arch = "x86_64")]
    let features = [
        ("aes", std::is_x86_feature_detected!("aes")),
        ("pclmulqdq", std::is_x86_feature_detected!("pclmulqdq")),
        ("bmi1", std::is_x86_feature_detected!("bmi1")),
        ("bmi2", std::is_x86_feature_detected!("bmi2")),
        ("adx", std::is_x86_feature_detected!("adx")),
        ("avx", std::is_x86_feature_detected!("avx")),
        ("avx2", std::is_x86_feature_detected!("avx2")),
    ];
    #[cfg(target_arch = "aarch64")]
    let features = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("aes", std::arch::is_aarch64_feature_detected!("aes")),
        ("pmull", std::arch::is_aarch64_feature_detected!("pmull")),
        ("sha2", std::arch::is_aarch64_feature_detected!("sha2")),
    ];
    match features.iter().find(|(_, present)| !present) {
        None => Ok(Arc::new(rustls_graviola::default_provider())),
        Some((feature, _)) => {
            let why = format!(
                "this processor has no {feature}, which multirail's TLS needs: use a token over an encrypted network"
            );
            Err(Error::new(ErrorKind::Unsupported, "set up TLS", why))
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn provider() -> Result<Arc<CryptoProvider>> {
    let why = "TLS is available on x86_64 and aarch64 only: use a token over an encrypted network";
    Err(Error::new(ErrorKind::Unsupported, "set up TLS", why))
}

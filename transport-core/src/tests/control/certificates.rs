//! A certificate authority and its certificates, for tests; made without a C compiler.

use graviola::hashing::Sha256;
use graviola::signing::ecdsa::{P256, SigningKey};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber, SignatureAlgorithm, date_time_ymd,
};

/// A certificate and its key, as PEM.
pub struct Certified {
    pub certificate: String,
    pub key: String,
}

/// A new certificate authority.
pub struct Authority {
    issuer: Issuer<'static, Key>,
    /// The authority's certificate, as PEM.
    pub root: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = params(name, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = Key::new();
        let root = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), root }
    }

    /// A certificate for these names and addresses that is valid now.
    pub fn certify(&self, names: &[&str]) -> Certified {
        self.sign(params("peer", names))
    }

    /// The same certificate, but expired long ago.
    pub fn certify_expired(&self, names: &[&str]) -> Certified {
        let mut params = params("peer", names);
        params.not_after = date_time_ymd(2001, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Certified {
        let key = Key::new();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Certified { certificate, key: key.pem() }
    }
}

fn params(name: &str, names: &[&str]) -> CertificateParams {
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2000, 1, 1);
    params.not_after = date_time_ymd(3000, 1, 1);
    params.serial_number = Some(SerialNumber::from(1_u64));
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params
}

struct Key {
    key: SigningKey<P256>,
    point: Vec<u8>,
}

impl Key {
    fn new() -> Self {
        let key = SigningKey::<P256>::generate().unwrap();
        let mut der = [0; 256];
        // The point is the last 65 bytes of a public key of this curve.
        let public = key.to_spki_der(&mut der).unwrap();
        let point = public[public.len() - 65..].to_vec();
        Self { key, point }
    }

    fn pem(&self) -> String {
        let mut der = [0; 256];
        let der = self.key.to_pkcs8_der(&mut der).unwrap();
        pem::encode(&pem::Pem::new("PRIVATE KEY", der))
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.point
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let mut signature = [0; 128];
        Ok(self.key.sign_asn1::<Sha256>(&[message], &mut signature).unwrap().to_vec())
    }
}

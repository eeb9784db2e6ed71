//! The options for tokens and TLS of every command that opens a fabric.

use std::ffi::OsString;
use std::path::PathBuf;

use multirail::{FabricBuilder, Token};

#[cfg(feature = "tls")]
use crate::failure::CommandFailure;
use crate::failure::CommandResult;

/// The environment variable that replaces `--token-file`.
const TOKEN_FILE: &str = "MULTIRAIL_TOKEN_FILE";

/// The options that decide which peers may connect.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Security")]
pub struct Security {
    /// Connect only to peers that have the token in this file; make one with
    /// `openssl rand -hex 32` [default: $MULTIRAIL_TOKEN_FILE, or any peer]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Encrypt control connections with TLS: this side's certificate chain, PEM
    #[cfg(feature = "tls")]
    #[arg(long, global = true, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,

    /// The private key of that certificate, PEM
    #[cfg(feature = "tls")]
    #[arg(long, global = true, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,

    /// The authorities that sign peers' certificates, PEM
    #[cfg(feature = "tls")]
    #[arg(long, global = true, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
}

impl Security {
    /// Applies the options to a fabric builder.
    pub fn apply(&self, mut builder: FabricBuilder) -> CommandResult<FabricBuilder> {
        if let Some(path) = self.token_file() {
            builder = builder.token(Token::from_file(path)?);
        }
        #[cfg(feature = "tls")]
        match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (None, None, None) => {}
            (Some(certificate), Some(key), Some(roots)) => {
                let bootstrap = multirail::TlsBootstrap::from_files(certificate, key, roots)?;
                builder = builder.bootstrap(std::sync::Arc::new(bootstrap));
            }
            // A forgotten option must not turn encryption off.
            _ => {
                return Err(CommandFailure::new("--tls-cert, --tls-key and --tls-ca must be given together"));
            }
        }
        Ok(builder)
    }

    /// Returns true if an option is given. The environment does not count.
    pub fn is_given(&self) -> bool {
        #[cfg(feature = "tls")]
        if self.tls_cert.is_some() || self.tls_key.is_some() || self.tls_ca.is_some() {
            return true;
        }
        self.token_file.is_some()
    }

    /// The arguments that give another process of this program the same options.
    pub fn arguments(&self) -> Vec<OsString> {
        let options = [
            ("--token-file", self.token_file()),
            #[cfg(feature = "tls")]
            ("--tls-cert", self.tls_cert.clone()),
            #[cfg(feature = "tls")]
            ("--tls-key", self.tls_key.clone()),
            #[cfg(feature = "tls")]
            ("--tls-ca", self.tls_ca.clone()),
        ];
        let given = options.into_iter().filter_map(|(name, file)| Some([name.into(), file?.into()]));
        given.flatten().collect()
    }

    fn token_file(&self) -> Option<PathBuf> {
        let set = || std::env::var_os(TOKEN_FILE).filter(|path| !path.is_empty()).map(PathBuf::from);
        self.token_file.clone().or_else(set)
    }
}

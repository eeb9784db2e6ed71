//! The token: the secret that two fabrics share and authenticate each other with.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use multirail_spi::{Error, ErrorKind, Result};

/// The fewest bytes of a token: 128 bits, if they are random.
const MIN_BYTES: usize = 16;
/// The most bytes of a token. A longer file is probably not a token file.
const MAX_BYTES: usize = 4096;

/// A shared secret: only fabrics with the same token connect.
///
/// The token is never sent: each side proves that it has the token (see
/// `FabricBuilder::token`). An attacker can test guesses against a recorded proof offline, so the
/// token must be random, not a word: make one by `openssl rand -hex 32`. Clones share the bytes;
/// dropping the last clone wipes them.
#[derive(Clone)]
pub struct Token(Arc<Zeroizing<Vec<u8>>>);

impl Token {
    /// Creates a token from `bytes`.
    ///
    /// # Errors
    /// `InvalidRequest` for fewer than 16 bytes, or more than 4096.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        let why = match bytes.len() {
            MIN_BYTES..=MAX_BYTES => return Ok(Self(Arc::new(Zeroizing::new(bytes.to_vec())))),
            len if len < MIN_BYTES => {
                format!(
                    "the token has {len} bytes and can be guessed; it needs at least {MIN_BYTES}: make one by `openssl rand -hex 32`"
                )
            }
            _ => format!("the token has more than {MAX_BYTES} bytes: is this the right file?"),
        };
        Err(Error::new(ErrorKind::InvalidRequest, "read a token", why))
    }

    /// Reads the token from a file and removes line ends after it.
    ///
    /// If other users may read the file, this logs a warning and reads it all the same.
    ///
    /// # Errors
    /// The error of the system if it cannot read the file, and the errors of [`Token::new`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let fail = |e| {
            let how = "make one by `openssl rand -hex 32` and give it to both sides";
            Error::os("read a token", format!("{}: {how}", path.display()), e)
        };
        let file = std::fs::File::open(path).map_err(fail)?;
        if others_may_read(&file.metadata().map_err(fail)?) {
            tracing::warn!(path = %path.display(), "other users may read this token: chmod 600 it");
        }
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES + 3));
        file.take(MAX_BYTES as u64 + 3).read_to_end(&mut bytes).map_err(fail)?;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        Self::new(&bytes[..end])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether both tokens have the same bytes. The time depends on how many leading bytes are equal, so use
    /// this only to compare tokens of our own settings.
    pub fn is(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

#[cfg(unix)]
fn others_may_read(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.mode() & 0o077 != 0
}

#[cfg(not(unix))]
fn others_may_read(_: &std::fs::Metadata) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_tokens_are_refused_with_advice_and_no_token_is_printed() {
        let error = Token::new("fifteen letters").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(error.context().contains("openssl rand -hex 32"), "{error}");
        assert!(Token::new([7; MAX_BYTES + 1]).is_err());
        let token = Token::new("sixteen letters!").unwrap();
        assert_eq!(format!("{token:?}"), "Token(secret)");
        assert!(token.is(&token.clone()) && !token.is(&Token::new([0; 16]).unwrap()));
    }

    #[test]
    fn files_are_trimmed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "sixteen letters!\r\n").unwrap();
        assert!(Token::from_file(&path).unwrap().is(&Token::new("sixteen letters!").unwrap()));
        std::fs::write(&path, "\n".repeat(40)).unwrap();
        assert_eq!(Token::from_file(&path).unwrap_err().kind(), ErrorKind::InvalidRequest);
        std::fs::write(&path, [7; 1 << 20]).unwrap();
        assert!(Token::from_file(&path).unwrap_err().context().contains("right file"));
        let error = Token::from_file(directory.path().join("none")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.context().contains("none: make one"), "{error}");
    }
}

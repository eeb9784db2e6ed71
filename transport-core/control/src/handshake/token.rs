//! The secret that two fabrics share, and that proves one to the other.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use multirail_spi::{Error, ErrorKind, Result};

/// Bytes of the shortest token: 128 bits, if they are random.
const SHORTEST: usize = 16;
/// Bytes of the longest; a longer file is something else.
const LONGEST: usize = 4096;

/// A shared secret: only fabrics that have the same one meet.
///
/// It never travels: each side proves that it has it (see
/// `FabricBuilder::token`). A recorded proof can be
/// tried against guesses offline, so it must be random, not a word: make one by
/// `openssl rand -hex 32`. Clones share the bytes, which are wiped with the last.
#[derive(Clone)]
pub struct Token(Arc<Zeroizing<Vec<u8>>>);

impl Token {
    /// A token of these bytes.
    ///
    /// # Errors
    /// `InvalidRequest` for fewer than 16 bytes, or more than 4096.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        let why = match bytes.len() {
            SHORTEST..=LONGEST => return Ok(Self(Arc::new(Zeroizing::new(bytes.to_vec())))),
            len if len < SHORTEST => {
                format!(
                    "{len} bytes can be guessed, at least {SHORTEST} are needed: make one by `openssl rand -hex 32`"
                )
            }
            _ => format!("more than {LONGEST} bytes: is this the right file?"),
        };
        Err(Error::new(ErrorKind::InvalidRequest, "read a token", why))
    }

    /// The token in a file; line ends behind it do not count.
    ///
    /// A file that other users may read is taken, with a warning in the log.
    ///
    /// # Errors
    /// As the system says, and as [`Token::new`].
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
        let mut bytes = Zeroizing::new(Vec::with_capacity(LONGEST + 3));
        file.take(LONGEST as u64 + 3).read_to_end(&mut bytes).map_err(fail)?;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        Self::new(&bytes[..end])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether both are one secret. For our own settings only: it takes as long as
    /// the bytes agree.
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
    fn short_ones_are_refused_with_advice_and_none_is_printed() {
        let error = Token::new("fifteen letters").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(error.context().contains("openssl rand -hex 32"), "{error}");
        assert!(Token::new([7; LONGEST + 1]).is_err());
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

//! What to do with an entry that the server has judged.

use crate::files::{CHUNK, Entry, FileHash, Kind, PieceHash, ToSender, ToServer, Verdict};

use super::sender::Sender;
use super::source::Source;
use super::talk::{Stop, unexpected};

/// What becomes of an entry.
pub enum Plan {
    /// Something of its name stays at the server.
    Skip,
    /// It is at the server already.
    Have,
    /// It is there too, but for mode and time.
    Same,
    /// No file: made there.
    Make,
    /// A file that goes in one item.
    Whole,
    /// A file that goes in pieces.
    Pieces(Pieces),
}

/// From where a file in pieces goes on.
#[derive(Default)]
pub struct Pieces {
    /// Pieces that the server keeps.
    pub keep: u64,
    /// Bytes of them.
    pub kept: u64,
    /// Where they end.
    pub end: u64,
    /// Bytes the server stored before, but that are sent again.
    pub again: u64,
    /// Over the pieces kept.
    pub hash: FileHash,
}

impl Sender {
    /// Plans one entry, comparing with what the server has.
    pub fn plan(
        &mut self,
        index: u32,
        entry: &Entry,
        verdict: Verdict,
        source: impl Fn() -> Result<Source, Stop>,
    ) -> Result<Plan, Stop> {
        let Kind::File { size, data } = entry.kind else {
            return Ok(match verdict {
                Verdict::Skip => Plan::Skip,
                Verdict::Have => Plan::Have,
                _ => Plan::Make,
            });
        };
        match verdict {
            Verdict::Skip => return Ok(Plan::Skip),
            Verdict::Have => return Ok(Plan::Have),
            Verdict::Compare { digest, skip } => {
                let source = source()?;
                let same = source.digest(|| self.working())? == digest;
                source.is_unchanged()?;
                if same {
                    return Ok(Plan::Same);
                }
                if skip {
                    return Ok(Plan::Skip);
                }
                let found = self.go_on(index, &source)?;
                if found.keep > 0 || found.again > 0 {
                    return Ok(Plan::Pieces(found));
                }
            }
            Verdict::Partial => return self.go_on(index, &source()?).map(Plan::Pieces),
            Verdict::Send => {}
        }
        let whole = size <= CHUNK && data == size;
        Ok(if whole { Plan::Whole } else { Plan::Pieces(Pieces::default()) })
    }

    /// Finds out which pieces of a partial file are those of the source.
    fn go_on(&mut self, index: u32, source: &Source) -> Result<Pieces, Stop> {
        let (mut found, mut ours, mut part) = (Pieces::default(), source.pieces(self.sparse), Vec::new());
        loop {
            self.outbox.say(&ToServer::Resume { index, first: found.keep })?;
            let (pieces, last, bytes) = match self.talk.hear()? {
                ToSender::Have { pieces, last, bytes } => (pieces, last, bytes),
                other => return Err(Stop::Answered(unexpected(other))),
            };
            let done = last || pieces.is_empty();
            for piece in pieces {
                let range = ours.next().map_err(|error| source.unreadable(&error))?;
                found.again = bytes.saturating_sub(found.kept);
                if range != Some(piece.offset..piece.end()) {
                    return Ok(found);
                }
                self.working()?;
                let mut hash = PieceHash::new(piece.offset);
                source.read(piece.offset, piece.len as usize, &mut part, |bytes| {
                    hash.update(bytes);
                    Ok(())
                })?;
                if hash.finish() != piece.hash {
                    return Ok(found);
                }
                found.hash.push(&piece);
                found.keep += 1;
                found.kept += u64::from(piece.len);
                found.end = piece.end();
            }
            found.again = bytes.saturating_sub(found.kept);
            if done {
                return Ok(found);
            }
        }
    }
}

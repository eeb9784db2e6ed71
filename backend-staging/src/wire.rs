//! What the two sides of a connection write into each other's ring: asks, and answers to them.
//!
//! Where both sides' devices wake a worker at an imm, each of these writes carries one, [`KNOCK`], that is nobody's
//! arrival. The users' own of that value goes as an ask ([`Verb::Tell`]).

use multirail_spi::ErrorKind;

/// The imm of what is written into a ring: any value, as good as another.
pub(crate) const KNOCK: u32 = 0x6b6e_6f63;

/// What is asked of the target for one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ask {
    /// The slot's turn; never 0, and never that of the turn before.
    pub turn: u32,
    pub verb: Verb,
    /// The region's.
    pub key: u64,
    /// First byte of the region.
    pub offset: u64,
    pub len: u64,
    /// To be reported once the bytes are there; not with `Read`.
    pub imm: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    /// The slot's bytes into the region.
    Write,
    /// The region's bytes into the initiator's slot.
    Read,
    /// The imm alone.
    Tell,
    /// Only an answer: what was asked before in this turn is given up, if it is not done.
    Nothing,
}

/// Words of an ask as it travels: a cache line. The last one seals the others, since a line that is being written
/// may be seen in part.
pub(crate) const WORDS: usize = 8;

impl Ask {
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let verb = match self.verb {
            Verb::Write => 0,
            Verb::Read => 1,
            Verb::Nothing => 2,
            Verb::Tell => 3,
        };
        let first = u64::from(self.turn) | verb << 32 | u64::from(self.imm.is_some()) << 40;
        let imm = u64::from(self.imm.unwrap_or_default());
        let mut words = [first, self.key, self.offset, self.len, imm, 0, 0, 0];
        words[WORDS - 1] = seal(&words);
        words
    }

    /// What the words say; `None` where they are not whole, or nonsense.
    pub(crate) fn from_words(words: &[u64; WORDS]) -> Option<Self> {
        if words[WORDS - 1] != seal(words) {
            return None;
        }
        let verb = match words[0] >> 32 & 0xff {
            0 => Verb::Write,
            1 => Verb::Read,
            2 => Verb::Nothing,
            3 => Verb::Tell,
            _ => return None,
        };
        let imm = (words[0] >> 40 & 1 != 0).then_some(words[4] as u32);
        let turn = words[0] as u32;
        let ask = Self { turn, verb, key: words[1], offset: words[2], len: words[3], imm };
        (turn != 0).then_some(ask)
    }
}

/// Of all words but the last. It tells a line that is whole from one that is not, no more: who writes it may write
/// anything anyway. Each word is mixed in as by splitmix64 (Steele, Lea, Flood 2014).
fn seal(words: &[u64; WORDS]) -> u64 {
    words[..WORDS - 1].iter().fold(0x5a_1e_d0_5e_a1, |seal, word| {
        let mut mixed = (seal ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    })
}

/// What became of an ask; its number in an answer is its place.
const OUTCOMES: [Result<(), ErrorKind>; 6] = [
    Ok(()),
    Err(ErrorKind::RemoteAccess),
    Err(ErrorKind::Revoked),
    Err(ErrorKind::DeviceLost),
    Err(ErrorKind::Exhausted),
    Err(ErrorKind::Io),
];

/// The word that answers turn `turn` of a slot.
pub(crate) fn answer(turn: u32, outcome: Result<(), ErrorKind>) -> u64 {
    let known = OUTCOMES.iter().position(|known| *known == outcome).unwrap_or(OUTCOMES.len() - 1);
    u64::from(turn) | (known as u64) << 32
}

/// What a word says of turn `turn`; `None` where it answers another one. Nonsense is `Protocol`.
pub(crate) fn answered(word: u64, turn: u32) -> Option<Result<(), ErrorKind>> {
    let outcome = OUTCOMES.get((word >> 32) as usize).copied().unwrap_or(Err(ErrorKind::Protocol));
    (word as u32 == turn).then_some(outcome)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_ask_comes_back_as_it_went_or_not_at_all(
            turn in 1_u32.., verb in 0..4_usize, key: u64, offset: u64, len: u64, imm: Option<u32>,
            torn in prop::collection::vec(any::<bool>(), WORDS), before: [u64; WORDS],
        ) {
            let verb = [Verb::Write, Verb::Read, Verb::Nothing, Verb::Tell][verb];
            let ask = Ask { turn, verb, key, offset, len, imm };
            let words = ask.to_words();
            prop_assert_eq!(Ask::from_words(&words), Some(ask));
            // Words of what was there before shine through.
            let mut seen = words;
            seen.iter_mut().zip(torn).zip(before).filter(|((_, old), _)| *old).for_each(|((word, _), old)| *word = old);
            prop_assert!(Ask::from_words(&seen).is_none() || seen == words);
        }

        #[test]
        fn an_answer_is_of_its_turn(turn: u32, other: u32, place in 0..OUTCOMES.len(), word: u64) {
            let said = answer(turn, OUTCOMES[place]);
            prop_assert_eq!(answered(said, turn), Some(OUTCOMES[place]));
            prop_assert!(other == turn || answered(said, other).is_none());
            // Any word is read.
            let _ = answered(word, turn);
        }
    }

    #[test]
    fn memory_of_zeroes_asks_nothing() {
        assert_eq!(Ask::from_words(&[0; WORDS]), None);
        let silent = Ask { turn: 0, verb: Verb::Write, key: 1, offset: 2, len: 3, imm: None };
        assert_eq!(Ask::from_words(&silent.to_words()), None);
        assert_eq!(answered(answer(1, Err(ErrorKind::Busy)), 1), Some(Err(ErrorKind::Io)));
        assert_eq!(answered(1 | 77 << 32, 1), Some(Err(ErrorKind::Protocol)));
    }
}

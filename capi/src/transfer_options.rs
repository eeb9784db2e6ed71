//! The options of transfers.

use std::time::Duration;

use multirail::spi::Paths;
use multirail::{CoalescePolicy, ImmMode, Locality, PathPolicy, ReadOptions, SendOptions, WriteOptions};

use crate::abi::*;
use crate::arguments::{Input, notification};
use crate::failure::Failure;

const COALESCE: u32 = MR_TRANSFER_COALESCE_NEVER | MR_TRANSFER_COALESCE_AUTO | MR_TRANSFER_COALESCE_ALWAYS;
/// The flags besides those of an imm and a notification.
const OTHER: u32 = MR_TRANSFER_IMM_PER_REQUEST | MR_TRANSFER_COLD | COALESCE | MR_TRANSFER_NO_REPLAY;
const FLAGS: u32 = MR_TRANSFER_IMM | MR_TRANSFER_NOTIFY | OTHER;

/// The options that a program has given, checked.
pub struct TransferOptions(mr_transfer_options);

impl TransferOptions {
    /// `None` for NULL.
    #[inline]
    pub fn read(input: Input<mr_transfer_options>) -> Result<Option<Self>, Failure> {
        if input.is_null() {
            return Ok(None);
        }
        Self::given(input).map(Some)
    }

    fn given(input: Input<mr_transfer_options>) -> Result<Self, Failure> {
        let given = input.read_versioned("options")?;
        if given.flags & !FLAGS != 0 {
            let why = format!(
                "options.flags is {:#x}; the flags are MR_TRANSFER_..., {FLAGS:#x} together",
                given.flags
            );
            return Err(Failure::invalid(why));
        }
        if given.flags & MR_TRANSFER_IMM_PER_REQUEST != 0 && given.flags & MR_TRANSFER_IMM == 0 {
            return Err(Failure::invalid("MR_TRANSFER_IMM_PER_REQUEST needs MR_TRANSFER_IMM, and an imm"));
        }
        if (given.flags & COALESCE).count_ones() > 1 {
            return Err(Failure::invalid("options.flags has several of MR_TRANSFER_COALESCE_...; give one"));
        }
        if given.paths & !Paths::all().bits() != 0 {
            let why = format!(
                "options.paths is {:#x}; the paths are MR_PATH_..., {:#x} together",
                given.paths,
                Paths::all()
            );
            return Err(Failure::invalid(why));
        }
        Ok(Self(given))
    }

    fn has(&self, flag: u32) -> bool {
        self.0.flags & flag != 0
    }

    pub fn imm(&self) -> Option<u32> {
        self.has(MR_TRANSFER_IMM).then_some(self.0.imm)
    }

    pub fn notification(&self) -> Result<Option<&[u8]>, Failure> {
        self.has(MR_TRANSFER_NOTIFY).then(|| notification(&self.0)).transpose()
    }

    fn deadline(&self) -> Option<Duration> {
        (self.0.deadline_ns != 0).then(|| limit(self.0.deadline_ns))
    }

    fn path_policy(&self) -> PathPolicy {
        match self.0.paths {
            0 => PathPolicy::ANY,
            bits => PathPolicy::only(Paths::from_bits_truncate(bits)),
        }
    }

    fn locality(&self) -> Locality {
        if self.has(MR_TRANSFER_COLD) { Locality::Cold } else { Locality::Auto }
    }

    fn coalesce(&self) -> Option<CoalescePolicy> {
        match self.0.flags & COALESCE {
            MR_TRANSFER_COALESCE_NEVER => Some(CoalescePolicy::Never),
            MR_TRANSFER_COALESCE_AUTO => Some(CoalescePolicy::Auto),
            MR_TRANSFER_COALESCE_ALWAYS => Some(CoalescePolicy::Always),
            _ => None,
        }
    }

    /// Whether the options say anything but an imm or a notification.
    pub fn says_more(&self) -> bool {
        self.has(OTHER) || self.0.deadline_ns != 0 || self.0.paths != 0
    }

    pub fn write(&self) -> Result<WriteOptions, Failure> {
        let mut options = WriteOptions::new();
        options.imm = self.imm();
        if self.has(MR_TRANSFER_IMM_PER_REQUEST) {
            options.imm_mode = ImmMode::PerWr;
        }
        (options.deadline, options.path_policy) = (self.deadline(), self.path_policy());
        (options.locality, options.coalesce) = (self.locality(), self.coalesce());
        options.no_replay = self.has(MR_TRANSFER_NO_REPLAY);
        Ok(match self.notification()? {
            Some(bytes) => options.notify(bytes),
            None => options,
        })
    }

    pub fn read_options(&self) -> Result<ReadOptions, Failure> {
        if self.has(MR_TRANSFER_IMM) {
            let why =
                "a read delivers no imm; use MR_TRANSFER_NOTIFY to tell the target that its memory was read";
            return Err(Failure::invalid(why));
        }
        let mut options = ReadOptions::new();
        (options.deadline, options.path_policy) = (self.deadline(), self.path_policy());
        (options.locality, options.coalesce) = (self.locality(), self.coalesce());
        options.no_replay = self.has(MR_TRANSFER_NO_REPLAY);
        Ok(match self.notification()? {
            Some(bytes) => options.notify(bytes),
            None => options,
        })
    }

    pub fn send(&self) -> Result<SendOptions, Failure> {
        if self.has(FLAGS & !MR_TRANSFER_IMM) {
            return Err(Failure::invalid("of the flags, MR_TRANSFER_IMM alone applies to a message"));
        }
        let mut options = SendOptions::new();
        options.imm = self.imm();
        (options.deadline, options.path_policy) = (self.deadline(), self.path_policy());
        Ok(options)
    }
}

/// The options of a write; the default ones for NULL.
pub fn write_options(input: Input<mr_transfer_options>) -> Result<WriteOptions, Failure> {
    TransferOptions::read(input)?.map_or_else(|| Ok(WriteOptions::new()), |options| options.write())
}

/// The options of a read; the default ones for NULL.
pub fn read_options(input: Input<mr_transfer_options>) -> Result<ReadOptions, Failure> {
    TransferOptions::read(input)?.map_or_else(|| Ok(ReadOptions::new()), |options| options.read_options())
}

/// A time in nanoseconds. Without an end, it is longer than any process runs.
pub fn limit(nanoseconds: u64) -> Duration {
    match nanoseconds {
        MR_FOREVER => Duration::from_secs(u64::from(u32::MAX)),
        other => Duration::from_nanos(other),
    }
}

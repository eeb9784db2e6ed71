//! Sizes and durations in options and output.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `4096`, `64KiB`, `1MiB`, `2GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = split(text);
        let factor = match unit {
            "" | "B" => 1,
            "K" | "KiB" => KIB,
            "M" | "MiB" => MIB,
            "G" | "GiB" => GIB,
            _ => return Err(format!("unknown size unit {unit:?}; use B, KiB, MiB or GiB")),
        };
        let number: u64 = digits.parse().map_err(|_| "write a size like 4096, 64KiB or 1MiB".to_owned())?;
        number.checked_mul(factor).map(Self).ok_or_else(|| "the size exceeds 2^64 bytes".to_owned())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
            if self.0 >= unit {
                return match self.0.is_multiple_of(unit) {
                    true => write!(f, "{} {name}", self.0 / unit),
                    false => write!(f, "{:.2} {name}", self.0 as f64 / unit as f64),
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Parses `500ms`, `0.5s`, `1m`, or a plain number of seconds. The result is at most a day, in milliseconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (digits, unit) = split(text);
    let millis = match unit {
        "ms" => 1.0,
        "" | "s" => 1000.0,
        "m" | "min" => 60_000.0,
        _ => return Err(format!("unknown time unit {unit:?}; use ms, s or min")),
    };
    let number: f64 = digits.parse().map_err(|_| "write a duration like 500ms, 2s or 1min".to_owned())?;
    let total = (number * millis).round();
    if !(1.0..=24.0 * 3600.0 * 1000.0).contains(&total) {
        return Err("a duration must be between 1ms and a day".to_owned());
    }
    Ok(Duration::from_millis(total as u64))
}

/// Parses a share: a number between 0 and 1.
pub fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a share between 0 and 1, like 0.5".to_owned())
}

/// Splits a text into its number and its unit.
fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let digits = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    (&text[..digits], text[digits..].trim_start())
}

/// Decimal gigabytes per second.
pub fn gbytes_per_s(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9
}

/// Rounds to four decimals; more would be noise.
pub fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [("4096", 4096), ("64KiB", 65536), ("1 MiB", MIB), ("3G", 3 * GIB), ("8B", 8)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
        for text in ["", "KiB", "-1", "1KB", "1.5MiB", "99999999999GiB", "١KiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        assert_eq!(Size(65536).to_string(), "64 KiB");
        assert_eq!(Size(1536).to_string(), "1.50 KiB");
        assert_eq!(Size(8).to_string(), "8 B");
    }

    #[test]
    fn shares() {
        assert_eq!(["0", "0.25", "1"].map(share), [Ok(0.0), Ok(0.25), Ok(1.0)]);
        for text in ["", "-0.1", "1.01", "NaN", "inf", "50%"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("1min"), Ok(Duration::from_secs(60)));
        assert_eq!(duration("0.5s"), Ok(Duration::from_millis(500)));
        for text in ["", "0s", "0.4ms", ".", "1.2.3s", "2h", "s", "99999999min", "18446744073709551615min"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}

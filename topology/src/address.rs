//! Addresses on the PCI bus.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function, `0000:4f:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// 16 bits on most hosts; 32 behind some virtual host bridges (`VMD`).
    pub domain: u32,
    /// 8 bits.
    pub bus: u8,
    /// 5 bits.
    pub device: u8,
    /// 3 bits.
    pub function: u8,
}

/// A host bridge, named by its domain and the first bus below it, as in sysfs's `pci0000:44`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Root {
    /// The domain, as in [`Address`].
    pub domain: u32,
    /// The first bus.
    pub bus: u8,
}

/// A text that is not an [`Address`] or a [`Root`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address; an example is 0000:4f:00.0")]
pub struct InvalidAddress(pub String);

impl Address {
    /// Whether `other` is another function of the same card.
    pub fn shares_card(&self, other: &Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let read = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                domain: hexadecimal(domain, u32::MAX)?,
                bus: hexadecimal(bus, 0xff)? as u8,
                device: hexadecimal(device, 0x1f)? as u8,
                function: hexadecimal(function, 7)? as u8,
            })
        };
        read().ok_or_else(|| InvalidAddress(text.to_owned()))
    }
}

impl FromStr for Root {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let read = || {
            let (domain, bus) = text.split_once(':')?;
            Some(Self { domain: hexadecimal(domain, u32::MAX)?, bus: hexadecimal(bus, 0xff)? as u8 })
        };
        read().ok_or_else(|| InvalidAddress(text.to_owned()))
    }
}

/// Parses hexadecimal digits. `from_str_radix` alone would also accept a sign.
fn hexadecimal(digits: &str, max: u32) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u32::from_str_radix(digits, 16).ok().filter(|_| is_number)?;
    (number <= max).then_some(number)
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(out, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl fmt::Display for Root {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:04x}:{:02x}", self.domain, self.bus)
    }
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl serde::Serialize for Root {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["0000:4f:00.0", "10000:e1:1f.7", "0001:00:03.2"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("0000:44".parse::<Root>().unwrap().to_string(), "0000:44");
        for wrong in
            ["", "4f:00.0", "0000:4f:00", "0000:4f:20.0", "0000:4f:00.8", "0000:+f:00.0", "0000:1ff:00.0"]
        {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
        assert!("0000".parse::<Root>().is_err());
    }
}

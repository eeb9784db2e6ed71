//! Access control services (ACS): whether a bridge sends requests between its devices up to the root complex, instead
//! of directly to the other device.

/// The bytes of a function's configuration that every user may read. Only root may read more.
const USER_READABLE: usize = 64;
/// The beginning and the end of extended capabilities in the configuration (PCI Express base specification, 7.6).
const EXTENDED: usize = 0x100;
const END: usize = 0x1000;
/// The ID of the extended capability ACS (7.7.11).
const ACS: u32 = 0x000d;
/// Bits of its control register: the bridge redirects peers' requests or completions, or controls egress. The kernel
/// tests the same bits (`pci_bridge_has_acs_redir`).
const REDIRECTS: u16 = 0x04 | 0x08 | 0x20;

/// Whether a bridge redirects, by its configuration (the file `config` of sysfs). `None` if this user may not read that
/// part of the configuration.
///
/// # Errors
/// The list of capabilities is cut off, or has no end.
pub fn redirects(config: &[u8]) -> Result<Option<bool>, &'static str> {
    if config.len() <= USER_READABLE {
        return Ok(None);
    }
    let word = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
    let mut at = EXTENDED;
    // Capabilities do not overlap, so no list is longer than this.
    for _ in 0..(END - EXTENDED) / 4 {
        let header = word(at).unwrap_or(0);
        if header == 0 || header == u32::MAX {
            return Ok(Some(false));
        }
        if header & 0xffff == ACS {
            // The word's lower half is the capability register, its upper half the control register.
            let control = word(at + 4).ok_or("the capability ACS is cut off")? >> 16;
            return Ok(Some(control as u16 & REDIRECTS != 0));
        }
        at = (header >> 20) as usize & !3;
        if at < EXTENDED {
            return Ok(Some(false));
        }
    }
    Err("the list of extended capabilities has no end")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration with these capabilities: the offset, the ID, the offset of the next one, and the content.
    fn config(capabilities: &[(usize, u32, u32, u32)]) -> Vec<u8> {
        let mut config = vec![0; END];
        for (at, id, next, content) in capabilities {
            config[*at..at + 4].copy_from_slice(&(id | 1 << 16 | next << 20).to_le_bytes());
            config[at + 4..at + 8].copy_from_slice(&content.to_le_bytes());
        }
        config
    }

    #[test]
    fn acs_is_found_behind_other_capabilities() {
        for (bits, expected) in [(0x1d, true), (0x20, true), (0x51, false)] {
            let bridge = config(&[(0x100, 0x0001, 0x148, 0), (0x148, ACS, 0, bits << 16 | 0x7f)]);
            assert_eq!(redirects(&bridge), Ok(Some(expected)), "{bits:#x}");
        }
    }

    #[test]
    fn short_and_strange_configurations() {
        assert_eq!(redirects(&[0; 64]), Ok(None));
        assert_eq!(redirects(&[0; 256]), Ok(Some(false)));
        assert_eq!(redirects(&[0xff; END]), Ok(Some(false)));
        assert_eq!(
            redirects(&config(&[(0x100, 1, 0x40, 0)])),
            Ok(Some(false)),
            "the next offset is no extended capability"
        );
        assert!(redirects(&config(&[(0x100, 1, 0xffc, 0), (0xff8, 1, 0, ACS)])).is_err());
        assert!(redirects(&config(&[(0x100, 1, 0x200, 0), (0x200, 1, 0x100, 0)])).is_err());
    }
}

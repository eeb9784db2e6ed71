//! Access control services: whether a bridge sends what its devices say to each other up to the
//! root complex.

/// What everybody may read of a function's configuration; the rest is root's.
const OPEN_BYTES: usize = 64;
/// Where extended capabilities begin, and the end of them (PCI Express base specification, 7.6).
const EXTENDED: usize = 0x100;
const SPACE: usize = 0x1000;
/// The extended capability of access control services (7.7.11).
const ACS: u32 = 0x000d;
/// Its control register: requests or completions of peers are redirected, or egress controlled. What
/// the kernel asks too (`pci_bridge_has_acs_redir`).
const REDIRECTS: u16 = 0x04 | 0x08 | 0x20;

/// What a bridge's configuration, the file `config` of sysfs, says; `None` where it is not shown.
///
/// # Errors
/// A list of capabilities that is cut off or has no end.
pub fn redirects(config: &[u8]) -> Result<Option<bool>, &'static str> {
    if config.len() <= OPEN_BYTES {
        return Ok(None);
    }
    let word = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
    let mut at = EXTENDED;
    // Capabilities do not overlap: there are no more than fit.
    for _ in 0..(SPACE - EXTENDED) / 4 {
        let header = word(at).unwrap_or(0);
        if header == 0 || header == u32::MAX {
            return Ok(Some(false));
        }
        if header & 0xffff == ACS {
            // Capabilities in the lower half, control in the upper.
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

    /// Capabilities: where, which, where the next one is, its content.
    fn config(capabilities: &[(usize, u32, u32, u32)]) -> Vec<u8> {
        let mut config = vec![0; SPACE];
        for (at, id, next, content) in capabilities {
            config[*at..at + 4].copy_from_slice(&(id | 1 << 16 | next << 20).to_le_bytes());
            config[at + 4..at + 8].copy_from_slice(&content.to_le_bytes());
        }
        config
    }

    #[test]
    fn control_is_found_behind_other_capabilities() {
        for (bits, expected) in [(0x1d, true), (0x20, true), (0x51, false)] {
            let bridge = config(&[(0x100, 0x0001, 0x148, 0), (0x148, ACS, 0, bits << 16 | 0x7f)]);
            assert_eq!(redirects(&bridge), Ok(Some(expected)), "{bits:#x}");
        }
    }

    #[test]
    fn short_and_strange_configurations() {
        assert_eq!(redirects(&[0; 64]), Ok(None));
        assert_eq!(redirects(&[0; 256]), Ok(Some(false)));
        assert_eq!(redirects(&[0xff; SPACE]), Ok(Some(false)));
        assert_eq!(redirects(&config(&[(0x100, 1, 0x40, 0)])), Ok(Some(false)), "points out of the space");
        assert!(redirects(&config(&[(0x100, 1, 0xffc, 0), (0xff8, 1, 0, ACS)])).is_err());
        assert!(redirects(&config(&[(0x100, 1, 0x200, 0), (0x200, 1, 0x100, 0)])).is_err());
    }
}

//! The cards of a p5.48xlarge, from the project's description of one, and their sysfs tree.

use std::fs::{create_dir_all, write};
use std::io::Result;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::OnceLock;

use topology::{Description, Function, Kind};

/// The most cards of a host.
pub(crate) const CARDS: usize = 32;

/// A card of a p5.48xlarge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct P5Card(&'static Function);

fn all() -> &'static [Function] {
    static ALL: OnceLock<Vec<Function>> = OnceLock::new();
    ALL.get_or_init(|| {
        let machine = Description::p5().machine();
        machine.map(|machine| machine.of_kind(Kind::Nic).cloned().collect()).unwrap_or_default()
    })
}

impl P5Card {
    /// Card `index` of the host, which is below [`CARDS`].
    pub(crate) fn new(index: usize) -> Self {
        Self(&all()[index])
    }

    /// The name in rdma-core, which contains the bus number in decimal.
    pub(crate) fn name(&self) -> &'static str {
        self.0.rdma.first().map_or("", String::as_str)
    }

    /// The PCI address.
    pub(crate) fn address(&self) -> String {
        self.0.address.to_string()
    }

    /// The path below sysfs's `devices`.
    pub(crate) fn path(&self) -> String {
        self.0.sysfs_path()
    }

    /// The names and contents of its files in sysfs.
    pub(crate) fn files(&self) -> [(&'static str, String); 4] {
        let Function { vendor, device, class, node, .. } = self.0;
        [
            ("vendor", format!("{vendor:#06x}")),
            ("device", format!("{device:#06x}")),
            ("class", format!("{class:#06x}00")),
            ("numa_node", node.map_or(-1, i64::from).to_string()),
        ]
    }
}

/// Kernel and library agree on version 6 of the uverbs interface (rdma-core's `ABI` files).
const ABI_VERSION: &str = "6\n";

/// Writes the part of a sysfs tree that libfabric and libibverbs read, for `cards`, below the folder `root`.
pub(crate) fn write_tree(root: &Path, cards: &[P5Card]) -> Result<()> {
    let driver = root.join("bus/pci/drivers/efa");
    create_dir_all(&driver)?;
    create_dir_all(root.join("bus/pci/devices"))?;
    for class in ["infiniband", "infiniband_verbs"] {
        create_dir_all(root.join("class").join(class))?;
    }
    write(root.join("class/infiniband_verbs/abi_version"), ABI_VERSION)?;
    for (index, card) in cards.iter().enumerate() {
        let device = root.join("devices").join(card.path());
        let ibdev = device.join("infiniband").join(card.name());
        create_dir_all(&ibdev)?;
        for (name, value) in card.files() {
            write(device.join(name), value + "\n")?;
        }
        symlink(&driver, device.join("driver"))?;
        symlink(&device, ibdev.join("device"))?;
        symlink(&ibdev, root.join("class/infiniband").join(card.name()))?;
        symlink(&device, root.join("bus/pci/devices").join(card.address()))?;
        let uverbs = root.join(format!("class/infiniband_verbs/uverbs{index}"));
        create_dir_all(&uverbs)?;
        symlink(&device, uverbs.join("device"))?;
        write(uverbs.join("ibdev"), format!("{}\n", card.name()))?;
        write(uverbs.join("abi_version"), "1\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_where_a_p5_has_them() {
        assert_eq!(all().len(), CARDS);
        let card = |index| P5Card::new(index);
        assert_eq!((card(0).name(), card(0).address()), ("rdmap79s0", "0000:4f:00.0".into()));
        assert_eq!((card(31).address(), card(31).files()[3].1.clone()), ("0000:c9:00.0".into(), "1".into()));
        assert_eq!((card(15).address(), card(15).files()[3].1.clone()), ("0000:85:00.0".into(), "0".into()));
        assert_eq!(card(1).path(), "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.1/0000:50:00.0");
        assert_eq!(card(0).files()[2], ("class", "0x020000".into()));
    }
}

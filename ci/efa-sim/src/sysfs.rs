//! The part of sysfs that libfabric and libibverbs read, below a folder of our own.

use std::fs::{create_dir_all, write};
use std::io::Result;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::p5::P5Card;

/// Kernel and library agree on version 6 of the uverbs interface (rdma-core's `ABI` files).
const ABI_VERSION: &str = "6\n";

/// Writes the tree of `cards` below `root`.
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

//! The files of a real p5. The project may not publish them, so the tests are skipped where they are missing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use multirail_topology::{Address, RailGroup, Root, fixture, sysfs};

/// The path of a file of a p5, if the file exists.
fn file(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures/p5");
    let path = folder.join(name);
    if !path.exists() {
        println!("skipped: there is no {}", path.display());
    }
    path.exists().then_some(path)
}

fn assert_as_described(groups: &[RailGroup]) {
    let described = super::groups(&super::p5());
    assert_eq!(groups, described);
    let cores: Vec<u32> = described.iter().filter_map(|group| group.core).collect();
    assert_eq!(cores.len(), 8);
    assert!(described.iter().all(|group| group.cards.len() == 4 && group.gpus.len() == 1));
}

#[test]
#[cfg(feature = "hwloc")]
fn the_hwloc_file_of_a_p5_is_as_described() {
    let Some(path) = file("hwloc-p5.48xlarge.xml") else { return };
    let machine = multirail_topology::hwloc::read(&path).unwrap();
    let described = super::p5();
    assert_eq!((&machine.nodes, &machine.cores), (&described.nodes, &described.cores));
    assert_eq!(machine.allowed, described.allowed);
    for function in &described.functions {
        assert_eq!(machine.function(function.address), Some(function));
    }
    assert_as_described(&multirail_topology::rail_groups(&machine));
}

#[test]
fn the_device_listing_of_a_p5_is_as_described() {
    let Some(path) = file("ls_sys_bus_pci_devices.txt") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (root, described) = (folder.path(), super::p5());
    let mut bare = described.clone();
    bare.functions.clear();
    fixture::write_sysfs(&bare, root).unwrap();
    let mut count = 0;
    for line in fs::read_to_string(path).unwrap().lines() {
        let Some((before, target)) = line.split_once(" -> ") else { continue };
        let name = before.split(' ').next_back().unwrap();
        let place = root.join("bus/pci/devices").join(target);
        fs::create_dir_all(&place).unwrap();
        let host: Root = target.split('/').find_map(|step| step.strip_prefix("pci")?.parse().ok()).unwrap();
        let known = described.function(name.parse::<Address>().unwrap());
        let (class, vendor, device) =
            known.map_or((0x0604, 0, 0), |function| (function.class, function.vendor, function.device));
        let node = described.functions.iter().find(|function| function.root == host).and_then(|of| of.node);
        for (file, text) in [
            ("class", format!("0x{class:04x}00\n")),
            ("vendor", format!("0x{vendor:04x}\n")),
            ("device", format!("0x{device:04x}\n")),
            ("numa_node", format!("{}\n", node.map_or(-1, i64::from))),
        ] {
            fs::write(place.join(file), text).unwrap();
        }
        symlink(target, root.join("bus/pci/devices").join(name)).unwrap();
        count += 1;
    }
    let machine = sysfs::read(root).unwrap();
    assert!(count > 200 && machine.functions.len() == count, "{count}");
    for function in &described.functions {
        let listed = machine.function(function.address).unwrap();
        assert_eq!((listed.root, &listed.bridges), (function.root, &function.bridges));
    }
    assert_as_described(&multirail_topology::rail_groups(&machine));
}

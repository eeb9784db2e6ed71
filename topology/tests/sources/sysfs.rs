//! A machine that is written to a sysfs tree, and read from it.

use multirail_topology::{fixture, sysfs};

#[test]
fn sysfs_keeps_all_of_a_machine() {
    for machine in [super::p5(), super::rich(), super::nodeless()] {
        let folder = tempfile::tempdir().unwrap();
        fixture::write_sysfs(&machine, folder.path()).unwrap();
        let read = sysfs::read(folder.path()).unwrap();
        assert_eq!(read, machine);
        assert_eq!(super::groups(&read), super::groups(&machine));
    }
}

#[test]
fn an_empty_folder_is_a_machine_without_anything() {
    let folder = tempfile::tempdir().unwrap();
    let read = sysfs::read(folder.path()).unwrap();
    assert!(read.functions.is_empty() && read.nodes.is_empty() && read.cores.is_empty());
    assert!(multirail_topology::rail_groups(&read).is_empty());
}

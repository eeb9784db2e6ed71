//! A malformed source is an error that names the file.

use std::path::Path;

use multirail_topology::{Description, Error};

fn assert_names<T>(result: Result<T, Error>, path: &Path) -> String {
    let why = result.map(drop).unwrap_err().to_string();
    assert!(why.contains(&*path.to_string_lossy()), "{why:?} does not name {}", path.display());
    why
}

#[test]
fn descriptions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machine.toml");
    assert_names(Description::read(&path), &path);
    for text in ["name", "name = \"x\"\nunknown = 1", "\0"] {
        std::fs::write(&path, text).unwrap();
        assert_names(Description::read(&path), &path);
    }
}

#[cfg(unix)]
mod sysfs {
    use std::fs;
    use std::os::unix::fs::symlink;

    use multirail_topology::{fixture, sysfs};

    use super::assert_names;

    /// A part of a p5's sysfs tree.
    fn tree() -> tempfile::TempDir {
        let mut machine = crate::p5();
        machine.functions.truncate(20);
        machine.cores.truncate(8);
        machine.allowed = "0-7".parse().unwrap();
        let folder = tempfile::tempdir().unwrap();
        fixture::write_sysfs(&machine, folder.path()).unwrap();
        sysfs::read(folder.path()).unwrap();
        folder
    }

    #[test]
    fn links() {
        let folder = tree();
        let path = folder.path().join("bus/pci/devices/0000:00:1f.0");
        for target in ["0000:00:1f.0", "nowhere", "../../../devices", "../../../devices/pci0000:44"] {
            symlink(target, &path).unwrap();
            assert_names(sysfs::read(folder.path()), &path);
            fs::remove_file(&path).unwrap();
        }
        sysfs::read(folder.path()).unwrap();
    }

    #[test]
    fn files() {
        let folder = tree();
        // Errors name where links lead.
        let root = folder.path().canonicalize().unwrap();
        let gpu = "devices/pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.4/0000:53:00.0";
        for (file, texts) in [
            (format!("{gpu}/class"), &["", "0x", "x", "0x1ffffffff", "-1"][..]),
            (format!("{gpu}/vendor"), &["", "nvidia"]),
            (format!("{gpu}/device"), &["", "0x-1"]),
            (format!("{gpu}/numa_node"), &["", "x", "99999999999"]),
            ("devices/system/node/node1/cpulist".into(), &["x", "7-3", "0-4294967295"]),
            ("devices/system/cpu/online".into(), &["all"]),
            ("devices/system/cpu/cpu7/topology/core_cpus_list".into(), &["7-"]),
        ] {
            let path = root.join(file);
            let whole = fs::read(&path).unwrap();
            for text in texts {
                fs::write(&path, text).unwrap();
                assert_names(sysfs::read(&root), &path);
            }
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            assert_names(sysfs::read(&root), &path);
            fs::remove_dir(&path).unwrap();
            fs::write(&path, whole).unwrap();
        }
        sysfs::read(&root).unwrap();
    }

    #[test]
    fn places() {
        let folder = tree();
        let missing = folder.path().join("nothing");
        assert_names(sysfs::read(&missing), &missing);
        let devices = folder.path().join("bus/pci/devices");
        fs::remove_dir_all(&devices).unwrap();
        fs::write(&devices, "").unwrap();
        assert_names(sysfs::read(folder.path()), &devices);
    }
}

#[cfg(feature = "hwloc")]
mod hwloc {
    use multirail_topology::{fixture, hwloc};

    use super::assert_names;

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.xml");
        assert_names(hwloc::read(&path), &path);
        assert_names(hwloc::read(folder.path()), folder.path());
        let whole = fixture::hwloc_xml(&crate::p5());
        let without_root = whole.replace("bridge_type=\"0-1\"", "bridge_type=\"0-0\"");
        let without_nodes = whole.replace("type=\"NUMANode\"", "type=\"Misc\"");
        for text in [
            "",
            "\n",
            "no XML",
            "<",
            "\0",
            "<topology/>",
            "<topology version=\"2.0\"/>",
            "<topology version=\"2.0\"></topology>",
            "<topology version=\"9.0\"><object type=\"Machine\"/></topology>",
            "<html><body/></html>",
            "<?xml version=\"1.0\" encoding=\"UTF-16\"?><topology version=\"2.0\">\u{e9}</topology>",
            &whole[..whole.len() / 2],
            &whole[..whole.len() - 12],
            &whole.replace("cpuset=\"", "cpuset=\"x"),
            &without_root,
            &whole.replace("0000:50:00.0", "0000:4f:00.0"),
            &without_nodes,
        ] {
            std::fs::write(&path, text).unwrap();
            assert_names(hwloc::read(&path), &path);
        }
        // A version that this libhwloc does not read: the error names the version that it needs.
        std::fs::write(&path, whole.replace("version=\"2.0\"", "version=\"3.0\"")).unwrap();
        let said = assert_names(hwloc::read(&path), &path);
        assert!(said.contains("needs libhwloc 3 or newer") && said.contains("this is libhwloc 2:"), "{said}");
        std::fs::write(&path, b"<topology version=\"2.0\">\xff</topology>").unwrap();
        assert_names(hwloc::read(&path), &path);
        let long = std::fs::File::create(&path).unwrap();
        long.set_len(3 << 30).unwrap();
        assert!(assert_names(hwloc::read(&path), &path).contains("too many"));
    }
}

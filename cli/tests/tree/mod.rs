//! Trees of files for tests, and their comparison.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The facts of one entry: kind and mode, time, content or target.
type Facts = (u32, (i64, i64), Vec<u8>);

/// Every entry below `root` by its relative name, without a server's own files.
pub fn facts(root: &Path) -> BTreeMap<Vec<u8>, Facts> {
    let mut facts = BTreeMap::new();
    for entry in walkdir::WalkDir::new(root).min_depth(1) {
        let entry = entry.expect("walk");
        let name = entry.path().strip_prefix(root).expect("below").as_os_str().as_bytes().to_vec();
        if name.starts_with(b".multirail") {
            continue;
        }
        let metadata = entry.metadata().expect("metadata");
        let content = match metadata.file_type() {
            sort if sort.is_file() => {
                blake3::hash(&fs::read(entry.path()).expect("read")).as_bytes().to_vec()
            }
            sort if sort.is_symlink() => {
                fs::read_link(entry.path()).expect("a target").into_os_string().into_encoded_bytes()
            }
            _ => Vec::new(),
        };
        facts.insert(name, (metadata.mode(), (metadata.mtime(), metadata.mtime_nsec()), content));
    }
    facts
}

/// Asserts that two trees have the same names, contents, modes, times and links.
pub fn assert_identical(one: &Path, other: &Path) {
    let (one, other) = (facts(one), facts(other));
    for (name, facts) in &one {
        assert_eq!(Some(facts), other.get(name), "{}", String::from_utf8_lossy(name));
    }
    assert_eq!(one.len(), other.len(), "nothing more is there");
}

/// Sets mode and time of a file. The time follows from `seed`.
pub fn set_mode_and_time(path: &Path, mode: u32, seed: u64) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode");
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000 + seed * 1000, 123_456_789);
    fs::File::open(path).and_then(|file| file.set_modified(time)).expect("time");
}

/// Writes a file of `bytes` random bytes.
pub fn random(path: &Path, bytes: usize) {
    let mut content = vec![0; bytes];
    fastrand::Rng::with_seed(bytes as u64 + 1).fill(&mut content);
    fs::write(path, content).expect("write");
}

/// Makes a directory `tree` with `files` small files in directories, links, an empty directory, names that are not
/// UTF-8, and a file `large` with `data` bytes.
pub fn build(root: &Path, files: usize, data: usize) -> PathBuf {
    let tree = root.join("tree");
    let mut rng = fastrand::Rng::with_seed(7);
    fs::create_dir(&tree).unwrap();
    for n in 0..files {
        let directory = tree.join(format!("d{}/s{}", n % 10, n / 10 % 10));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("file {n} ✓"));
        let mut content = vec![0; rng.usize(0..8192)];
        rng.fill(&mut content);
        fs::write(&path, content).unwrap();
        set_mode_and_time(&path, [0o644, 0o600, 0o755, 0o400][n % 4], n as u64);
    }
    fs::create_dir_all(tree.join("empty/inside")).unwrap();
    fs::write(tree.join(std::ffi::OsStr::from_bytes(b"not \xff UTF-8")), "x").unwrap();
    std::os::unix::fs::symlink("d0/s0", tree.join("link")).unwrap();
    std::os::unix::fs::symlink("../link", tree.join("empty/up")).unwrap();
    std::os::unix::fs::symlink("nowhere", tree.join("dangling")).unwrap();
    sparse(&tree.join("large"), data);
    set_mode_and_time(&tree.join("large"), 0o640, 5);
    for (n, directory) in ["empty/inside", "empty", "d0/s0", "d0", ""].iter().enumerate() {
        set_mode_and_time(&tree.join(directory), [0o755, 0o500, 0o711][n % 3], n as u64);
    }
    tree
}

/// Writes a file of `data` random bytes with holes of the same length before, in and after them.
pub fn sparse(path: &Path, data: usize) {
    let mut content = vec![0; data / 2];
    fastrand::Rng::with_seed(9).fill(&mut content);
    let file = fs::File::create(path).unwrap();
    file.set_len(4 * data as u64).unwrap();
    file.write_all_at(&content, data as u64).unwrap();
    file.write_all_at(&content, 2 * data as u64 + data as u64 / 2).unwrap();
}

/// The disk use of a file in bytes.
pub fn allocated(path: &Path) -> u64 {
    fs::metadata(path).expect("metadata").blocks() * 512
}

/// The partial files in a server's directory, with the lengths of their journals.
pub fn partials(into: &Path) -> Vec<(PathBuf, u64)> {
    let Ok(entries) = fs::read_dir(into.join(".multirail")) else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("entry").path());
    let journal = |path: &PathBuf| Some(fs::metadata(format!("{}.journal", path.display())).ok()?.len());
    paths.filter_map(|path| journal(&path).map(|len| (path, len))).collect()
}

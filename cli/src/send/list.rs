//! The list of all entries under the paths to send, in the order of sending.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::files::{EntryKind, Mtime, OfferedEntry, TreePath, check_link};
use walkdir::WalkDir;

use crate::content;
use crate::failure::{CommandFailure, CommandResult};

/// The rules of listing.
#[derive(Debug, Default, Clone, Copy)]
pub struct ListRules {
    /// Skip files that cannot be sent, instead of failing.
    pub skip_special: bool,
    /// Do not count holes as bytes.
    pub sparse: bool,
}

/// One path of the command line.
pub struct SourcePath {
    path: PathBuf,
    /// The name under which the path is sent.
    pub name: TreePath,
    /// The index after its last entry.
    pub end: usize,
}

/// All entries. A directory comes before its content, and its end comes after it. Names of a directory are in the order
/// of their bytes. An entry needs about 150 bytes of memory.
#[derive(Default)]
pub struct List {
    /// The entries to send.
    pub entries: Vec<OfferedEntry>,
    /// The paths of the command line, in the same order.
    pub roots: Vec<SourcePath>,
    /// The bytes of all files, without holes.
    pub total: u64,
    /// The number of files with setuid, setgid or sticky bits, which are not sent.
    pub special_bits: u64,
    /// The skipped files, with the reason.
    pub skipped: Vec<String>,
    rules: ListRules,
}

impl List {
    /// Lists everything under `paths`.
    pub fn new(paths: &[PathBuf], rules: ListRules) -> CommandResult<Self> {
        let (mut list, mut names) = (Self { rules, ..Self::default() }, HashSet::new());
        for path in paths {
            let name = root_name(path)?;
            if !names.insert(name.clone()) {
                return Err(CommandFailure::new(format!(
                    "two of the paths would be stored as {name}; send them separately to different directories"
                )));
            }
            list.root(path, &name)?;
            list.roots.push(SourcePath { path: path.clone(), name, end: list.entries.len() });
        }
        Ok(list)
    }

    /// The local path of entry `index`.
    pub fn path(&self, index: usize) -> PathBuf {
        let root = &self.roots[self.root_of(index)];
        let below = &self.entries[index].path.as_bytes()[root.name.as_bytes().len()..];
        match below {
            [] => root.path.clone(),
            [_slash, below @ ..] => root.path.join(OsStr::from_bytes(below)),
        }
    }

    /// The root of entry `index`.
    pub fn root_of(&self, index: usize) -> usize {
        self.roots.partition_point(|root| root.end <= index)
    }

    /// Lists the file of entry `index` again, with its current state.
    pub fn refresh(&mut self, index: usize) -> CommandResult {
        let (local, entry) = (self.path(index), &self.entries[index]);
        let metadata = match entry.path.is_top() {
            true => std::fs::metadata(&local),
            false => std::fs::symlink_metadata(&local),
        };
        let metadata = metadata.map_err(|error| missing(&local, &error))?;
        if !metadata.is_file() {
            return Err(CommandFailure::new(format!(
                "{} is no longer a regular file; send it again",
                local.display()
            )));
        }
        let kind = kind(&local, &metadata, &entry.path, self.rules)
            .map_err(|why| CommandFailure::new(format!("{}: {why}", local.display())))?;
        let (path, before) = (entry.path.clone(), entry.data());
        let entry = OfferedEntry { path, kind, mode: permissions(&metadata), mtime: mtime(&metadata) };
        self.total = self.total - before + entry.data();
        self.entries[index] = entry;
        Ok(())
    }

    fn root(&mut self, path: &Path, name: &TreePath) -> CommandResult {
        let rules = self.rules;
        // The directories that are not complete.
        let mut open: Vec<OfferedEntry> = Vec::new();
        // A link on the command line is followed.
        let walk = WalkDir::new(path).follow_root_links(true).sort_by_file_name();
        for found in walk.max_depth(TreePath::DEEPEST) {
            let found = found.map_err(|error| unreadable(&error))?;
            open.drain(found.depth().min(open.len())..).rev().for_each(|entry| self.entries.push(entry));
            let metadata = match found.depth() {
                0 => std::fs::metadata(path).map_err(|error| missing(path, &error))?,
                _ => found.metadata().map_err(|error| unreadable(&error))?,
            };
            let below = found.path().strip_prefix(path).unwrap_or(Path::new("")).as_os_str().as_bytes();
            let bytes = match below {
                [] => name.as_bytes().to_vec(),
                below => [name.as_bytes(), b"/", below].concat(),
            };
            let sent = TreePath::new(&bytes)
                .and_then(|path| Ok((kind(found.path(), &metadata, &path, rules)?, path)))
                .map_err(|why| format!("{}: {why}", found.path().display()));
            match sent {
                Ok((kind, path)) => {
                    let entry = self.add(path, kind, &metadata);
                    if entry.kind == EntryKind::Directory {
                        open.push(OfferedEntry { kind: EntryKind::Leave, ..entry.clone() });
                    }
                    self.entries.push(entry);
                }
                Err(why) if rules.skip_special && !metadata.is_dir() => self.skipped.push(why),
                Err(why) => return Err(CommandFailure::new(why)),
            }
        }
        self.entries.extend(open.into_iter().rev());
        Ok(())
    }

    fn add(&mut self, path: TreePath, kind: EntryKind, metadata: &Metadata) -> OfferedEntry {
        self.special_bits += u64::from(metadata.mode() & 0o7000 != 0 && kind != EntryKind::Directory);
        let entry = OfferedEntry { path, kind, mode: permissions(metadata), mtime: mtime(metadata) };
        self.total += entry.data();
        entry
    }
}

/// The modification time of a file.
pub fn mtime(metadata: &Metadata) -> Mtime {
    Mtime { seconds: metadata.mtime(), nanoseconds: metadata.mtime_nsec() as u32 }
}

/// The permissions of a file, as they are sent.
pub fn permissions(metadata: &Metadata) -> u16 {
    (metadata.mode() & 0o777) as u16
}

/// The kind of an entry, or the reason why it cannot be sent.
fn kind(local: &Path, metadata: &Metadata, path: &TreePath, rules: ListRules) -> Result<EntryKind, String> {
    let sort = metadata.file_type();
    if sort.is_dir() {
        return Ok(EntryKind::Directory);
    }
    if sort.is_file() {
        let size = metadata.len();
        let holes = rules.sparse && metadata.blocks().saturating_mul(512) < size;
        let data = match holes {
            true => File::open(local).and_then(|file| content::data(&file, size)),
            false => Ok(size),
        };
        return Ok(EntryKind::File {
            size,
            data: data.map_err(|error| format!("cannot read the file: {error}"))?,
        });
    }
    if sort.is_symlink() {
        let target = std::fs::read_link(local).map_err(|error| format!("cannot read the file: {error}"))?;
        let target = target.into_os_string().into_encoded_bytes();
        return check_link(path, &target).map(|()| EntryKind::Link { target }).map_err(|why| {
            format!(
                "{why}; only relative links within the tree are sent; use --skip-special to skip other links"
            )
        });
    }
    let what = match sort {
        sort if sort.is_fifo() => "a pipe",
        sort if sort.is_socket() => "a socket",
        _ => "a device",
    };
    Err(format!(
        "the path is {what}; only files, directories and links are sent; use --skip-special to skip other files"
    ))
}

fn root_name(path: &Path) -> CommandResult<TreePath> {
    let named = |name: &OsStr| TreePath::new(name.as_bytes()).map_err(CommandFailure::new);
    if let Some(name) = path.file_name() {
        return named(name);
    }
    // `.` and `..` get the name of the directory.
    let real = std::fs::canonicalize(path).map_err(|error| missing(path, &error))?;
    match real.file_name() {
        Some(name) => named(name),
        None => Err(CommandFailure::new(format!("{} has no name; send its content instead", path.display()))),
    }
}

fn missing(path: &Path, error: &std::io::Error) -> CommandFailure {
    let shown = path.display();
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            let from = std::env::current_dir().unwrap_or_default();
            CommandFailure::new(format!("{shown} does not exist; relative paths start in {}", from.display()))
        }
        std::io::ErrorKind::PermissionDenied => CommandFailure::new(format!(
            "cannot read {shown}: {error}; run as a user with permission, or change its mode"
        )),
        _ => CommandFailure::new(format!("cannot read {shown}: {error}")),
    }
}

fn unreadable(error: &walkdir::Error) -> CommandFailure {
    match (error.path(), error.io_error()) {
        (Some(path), Some(error)) => missing(path, error),
        _ => CommandFailure::new(format!("cannot list the files to send: {error}")),
    }
}

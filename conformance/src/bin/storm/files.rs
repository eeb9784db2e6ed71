//! The files that rounds send, and their comparison with the received files.

use std::io::Result;
use std::path::{Path, PathBuf};

/// Sizes of the files: empty, one byte, parts of a page and of a piece, and some that take a while to send.
const SIZES: [usize; 8] = [0, 1, 4096, 70_001, 1 << 20, (3 << 20) + 5, 9 << 20, 24 << 20];

/// Makes a tree of files with random bytes in `tree`. Some are in a subfolder, and one has a hole.
pub fn make(tree: &Path, seed: u64) -> Result<PathBuf> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::fs::create_dir_all(tree.join("folder"))?;
    for (number, size) in SIZES.into_iter().enumerate() {
        let mut content = vec![0; size];
        random.fill(&mut content);
        if number == SIZES.len() - 1 {
            content[2 << 20..12 << 20].fill(0);
        }
        let folder = if number % 2 == 0 { tree.to_owned() } else { tree.join("folder") };
        std::fs::write(folder.join(format!("file-{number}")), content)?;
    }
    Ok(tree.to_owned())
}

/// All regular files below `folder`, without those in `.multirail`, which has unfinished files.
pub fn below(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && entry.file_name() != ".multirail" => folders.push(entry.path()),
                Ok(kind) if !kind.is_dir() => all.push(entry.path()),
                _ => {}
            }
        }
    }
    all
}

/// All files below `folder`, also unfinished ones.
pub fn left_in(folder: &Path) -> Vec<PathBuf> {
    let mut all = below(folder);
    for entry in std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_name() == ".multirail" {
            all.extend(below(&entry.path()));
        }
    }
    all
}

/// Returns the first file below `got` that differs from the file with the same name below `want`. If `is_complete`, it
/// also returns the first missing file.
pub fn difference(got: &Path, want: &Path, is_complete: bool) -> Option<String> {
    let relative = |path: &Path, root: &Path| path.strip_prefix(root).map(Path::to_owned).unwrap_or_default();
    for path in below(got) {
        let name = relative(&path, got);
        match (std::fs::read(&path), std::fs::read(want.join(&name))) {
            (Ok(got), Ok(want)) if got == want => {}
            (Ok(got), Ok(want)) => {
                let at = got.iter().zip(&want).position(|(got, want)| got != want);
                let (got, want) = (got.len(), want.len());
                return Some(format!("{} differs at byte {at:?}; {got} bytes, want {want}", name.display()));
            }
            (Err(why), _) | (_, Err(why)) => return Some(format!("{}: {why}", name.display())),
        }
    }
    let missing = |path: &PathBuf| !got.join(relative(path, want)).exists();
    below(want)
        .into_iter()
        .find(|path| is_complete && missing(path))
        .map(|path| format!("{} is missing", relative(&path, want).display()))
}

//! Names that lead nowhere else.

use std::ffi::OsStr;
use std::fmt;
#[cfg(unix)]
use std::os::unix::ffi::OsStrExt;

/// The server's own directory at the top of what it serves: no file may lie there.
pub const STAGING: &str = ".multirail";

/// Characters of a path that sentences show: the last ones, and any single name whole.
const SHOWN: usize = 300;

/// Where an entry lies below the server's directory: names with slashes between.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TreePath(Vec<u8>);

impl TreePath {
    /// Longest name of the file systems at hand (`NAME_MAX`).
    pub const LONGEST_NAME: usize = 255;
    /// Longest path (`PATH_MAX` without the NUL).
    pub const LONGEST: usize = 4095;
    /// Most names in a path.
    pub const DEEPEST: usize = 128;

    /// Checks a path, wherever it comes from.
    pub fn new(bytes: &[u8]) -> Result<Self, String> {
        let names = || bytes.split(|&byte| byte == b'/');
        let why = match bytes {
            b"" => "is empty",
            _ if bytes.starts_with(b"/") => "is absolute",
            _ if bytes.contains(&0) => "has a NUL in it",
            _ if bytes.len() > Self::LONGEST => "is over 4095 bytes long",
            _ if names().any(<[u8]>::is_empty) => "has an empty name in it",
            _ if names().any(|name| matches!(name, b"." | b"..")) => "has . or .. in it",
            _ if names().any(|name| name.len() > Self::LONGEST_NAME) => "has a name over 255 bytes in it",
            _ if names().count() > Self::DEEPEST => "is over 128 directories deep",
            // Some file systems ignore case.
            _ if names().next().is_some_and(|top| top.eq_ignore_ascii_case(STAGING.as_bytes())) => {
                "is the server's own"
            }
            _ => return Ok(Self(bytes.to_vec())),
        };
        Err(format!("the file's name {why}; send it under a plain relative name"))
    }

    /// The path as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its names, outermost first.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&byte| byte == b'/')
    }

    /// The directory it lies in, empty at the top.
    pub fn parent(&self) -> &[u8] {
        self.0.iter().rposition(|&byte| byte == b'/').map_or(&[], |at| &self.0[..at])
    }

    /// Its last name.
    pub fn name(&self) -> &[u8] {
        self.0.iter().rposition(|&byte| byte == b'/').map_or(&self.0, |at| &self.0[at + 1..])
    }

    /// Whether it lies directly in the server's directory.
    pub fn is_top(&self) -> bool {
        !self.0.contains(&b'/')
    }

    /// The last name for the system.
    #[cfg(unix)]
    pub fn name_os(&self) -> &OsStr {
        OsStr::from_bytes(self.name())
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = String::from_utf8_lossy(&self.0);
        let (shown, cut) = match text.chars().count().checked_sub(SHOWN) {
            None | Some(0) => (&*text, ""),
            Some(over) => (text.char_indices().nth(over).map_or("", |(at, _)| &text[at..]), "..."),
        };
        f.write_str(cut)?;
        shown.chars().try_for_each(|c| write!(f, "{}", if c.is_control() { ' ' } else { c }))
    }
}

/// Checks that a symbolic link at `path` that points to `target` stays inside the
/// tree that `path` is part of, which is its outermost directory.
///
/// `..` may only lead: behind a name it would go up from wherever another link leads.
/// Leading ones go up real directories, so that links that pass stay inside together.
pub fn check_link(path: &TreePath, target: &[u8]) -> Result<(), String> {
    let depth = path.names().count() - 1;
    let ups = target.split(|&byte| byte == b'/').take_while(|&name| name == b"..").count();
    let rest = || target.split(|&byte| byte == b'/').skip(ups);
    let why = match target {
        b"" => "points nowhere",
        _ if target.starts_with(b"/") => "points to an absolute path",
        _ if target.contains(&0) => "has a NUL in its target",
        _ if target.len() > TreePath::LONGEST => "has a target over 4095 bytes long",
        _ if depth == 0 => "stands alone, without a tree to stay in",
        _ if ups >= depth => "points out of the tree",
        _ if rest().any(|name| name == b"..") => "has .. behind a name in its target",
        _ => return Ok(()),
    };
    Err(format!("the symbolic link {path} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_nowhere_else() {
        let deep = vec!["d"; TreePath::DEEPEST + 1].join("/");
        let (long, longest) = ("n".repeat(256), vec!["n".repeat(200); 21].join("/"));
        for path in [
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "../a",
            "a/..",
            "a/../b",
            "a//b",
            "a/",
            "./a",
            "a\0b",
            &long,
            &longest,
            &deep,
            ".multirail",
            ".Multirail/part",
        ] {
            assert!(TreePath::new(path.as_bytes()).is_err(), "{path:?}");
        }
        for path in ["a", "a/b", "...", ".hidden/näme", "a/.multirail", &"n".repeat(255), &deep[2..]] {
            assert_eq!(TreePath::new(path.as_bytes()).unwrap().as_bytes(), path.as_bytes());
        }
        let path = TreePath::new(b"a/b\x1b[2J/\xff").unwrap();
        assert_eq!(path.to_string(), "a/b [2J/\u{fffd}");
        assert_eq!((path.parent(), path.name(), path.is_top()), (&b"a/b\x1b[2J"[..], &b"\xff"[..], false));
        assert_eq!(TreePath::new(b"a").unwrap().parent(), b"");
        let shown = TreePath::new(&deep.as_bytes()[2..]).unwrap().to_string();
        assert_eq!(shown.len(), 255, "{shown}");
        let shown = TreePath::new("ä/".repeat(127).as_bytes().strip_suffix(b"/").unwrap()).unwrap();
        assert_eq!(shown.to_string().chars().count(), 253);
        let long = TreePath::new([b"n".repeat(200), b"m".repeat(200)].join(&b'/').as_slice()).unwrap();
        assert!(long.to_string().starts_with("...n") && long.to_string().len() == 303);
    }

    #[test]
    fn links_stay_inside() {
        let path = TreePath::new(b"top/a/link").unwrap();
        for target in ["x", "x/y", "../b", "../a/b", ".", "./x", "..."] {
            assert_eq!(check_link(&path, target.as_bytes()), Ok(()), "{target}");
        }
        for target in ["", "/x", "../..", "../../x", "x/../..", "a\0", "x/.."] {
            assert!(check_link(&path, target.as_bytes()).is_err(), "{target:?}");
        }
        assert!(check_link(&TreePath::new(b"top").unwrap(), b"x").is_err());
    }
}

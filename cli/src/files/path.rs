//! Paths and links that stay inside the server's directory.

use std::ffi::OsStr;
use std::fmt;
#[cfg(unix)]
use std::os::unix::ffi::OsStrExt;

/// The server's own directory at the top of the served directory. No sent file may be in it.
pub const STAGING: &str = ".multirail";

/// The number of characters of a path in messages. The last characters are shown, so any single name is whole.
const SHOWN: usize = 300;

/// The path of an entry below the server's directory: names separated by slashes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TreePath(Vec<u8>);

impl TreePath {
    /// The longest name (`NAME_MAX`).
    pub const LONGEST_NAME: usize = 255;
    /// The longest path (`PATH_MAX` without the NUL).
    pub const LONGEST: usize = 4095;
    /// The maximum number of names in a path.
    pub const DEEPEST: usize = 128;

    /// Checks an untrusted path.
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
                "is reserved for the server"
            }
            _ => return Ok(Self(bytes.to_vec())),
        };
        Err(format!("the file's name {why}; send it under a plain relative name"))
    }

    /// The path as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The names, outermost first.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&byte| byte == b'/')
    }

    /// The parent directory, which is empty at the top.
    pub fn parent(&self) -> &[u8] {
        self.0.iter().rposition(|&byte| byte == b'/').map_or(&[], |at| &self.0[..at])
    }

    /// The last name.
    pub fn name(&self) -> &[u8] {
        self.0.iter().rposition(|&byte| byte == b'/').map_or(&self.0, |at| &self.0[at + 1..])
    }

    /// Returns true if the entry is directly in the server's directory.
    pub fn is_top(&self) -> bool {
        !self.0.contains(&b'/')
    }

    /// The last name as an `OsStr`.
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

/// Checks that a symbolic link at `path` with this `target` stays inside its tree, which is the outermost directory of
/// `path`.
///
/// `..` is allowed only at the start of a target. After a name, it would go up from the target of another link. At the
/// start it goes up real directories, so all links that pass this check stay inside the tree.
pub fn check_link(path: &TreePath, target: &[u8]) -> Result<(), String> {
    let depth = path.names().count() - 1;
    let ups = target.split(|&byte| byte == b'/').take_while(|&name| name == b"..").count();
    let rest = || target.split(|&byte| byte == b'/').skip(ups);
    let why = match target {
        b"" => "points nowhere",
        _ if target.starts_with(b"/") => "points to an absolute path",
        _ if target.contains(&0) => "has a NUL in its target",
        _ if target.len() > TreePath::LONGEST => "has a target over 4095 bytes long",
        _ if depth == 0 => "is not inside a directory that is sent",
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
    fn paths_stay_inside() {
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

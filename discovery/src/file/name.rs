//! Names of members as names of files.

use std::fmt::Write;

/// What a member's file ends with.
const ENDING: &str = ".member";
/// The longest name of a file, before its ending. File systems allow 255 bytes.
const LONGEST: usize = 200;

/// The name of a member's file: letters, digits, `-`, `_` and inner dots stay, other bytes become `%` and two digits. A
/// name that would be too long is cut, and ends with its hash.
pub fn to_file_name(name: &str) -> String {
    let mut text = String::new();
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => text.push(char::from(byte)),
            b'.' if at > 0 => text.push('.'),
            _ => _ = write!(text, "%{byte:02x}"),
        }
    }
    if text.len() > LONGEST {
        text.truncate(LONGEST - 17);
        let _ = write!(text, "~{:016x}", crate::hash::fnv(name.as_bytes()));
    }
    text + ENDING
}

/// What a file's name says of its member: the name without the ending, for messages. `None` if it is no member's file.
pub fn from_file_name(file: &str) -> Option<&str> {
    file.strip_suffix(ENDING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_and_differ() {
        let long = "x".repeat(256);
        let names =
            ["a", "A", "a.b", ".", "..", ".a", "a/b", "../a", "ä", "a b", "%2f", "/", &long, &long[1..]];
        let files: std::collections::HashSet<_> = names.iter().map(|name| to_file_name(name)).collect();
        assert_eq!(files.len(), names.len());
        for file in files {
            assert!(file.len() <= 255 && !file.starts_with('.') && !file.contains('/'), "{file}");
            assert!(from_file_name(&file).is_some());
        }
        assert_eq!(to_file_name("worker-7.b"), "worker-7.b.member");
    }
}

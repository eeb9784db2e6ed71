//! As much JSON as an admin socket needs: objects of strings are read, strings are written. The core does not use
//! serde_json: its comparisons of numbers with JSON values make types ambiguous in programs that depend on it.

use std::fmt::Write;
use std::str::Chars;

/// Reads an object whose values are strings.
///
/// # Errors
/// The reason why the text is none, for people.
pub(super) fn object_of_strings(text: &[u8]) -> Result<Vec<(String, String)>, &'static str> {
    let mut reader = ObjectReader(std::str::from_utf8(text).map_err(|_| "it is not UTF-8")?.chars());
    reader.expect('{', "it does not begin with {")?;
    let mut pairs = Vec::new();
    if !reader.skip('}') {
        loop {
            let name = reader.string()?;
            reader.expect(':', "a : is missing")?;
            pairs.push((name, reader.string()?));
            if !reader.skip(',') {
                reader.expect('}', "a , or } is missing")?;
                break;
            }
        }
    }
    reader.skip_space();
    match reader.0.as_str() {
        "" => Ok(pairs),
        _ => Err("something follows the object"),
    }
}

/// Appends a string with its quotes.
pub(super) fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            '\n' => json.push_str("\\n"),
            // Writing to a string does not fail.
            control if control.is_control() => drop(write!(json, "\\u{:04x}", u32::from(control))),
            other => json.push(other),
        }
    }
    json.push('"');
}

/// The rest of a text.
struct ObjectReader<'a>(Chars<'a>);

impl ObjectReader<'_> {
    fn skip_space(&mut self) {
        self.0 = self.0.as_str().trim_start_matches([' ', '\t', '\r', '\n']).chars();
    }

    /// Skips space, and then this character if it comes next.
    fn skip(&mut self, wanted: char) -> bool {
        self.skip_space();
        let rest = self.0.as_str().strip_prefix(wanted);
        if let Some(rest) = rest {
            self.0 = rest.chars();
        }
        rest.is_some()
    }

    fn expect(&mut self, wanted: char, otherwise: &'static str) -> Result<(), &'static str> {
        if self.skip(wanted) { Ok(()) } else { Err(otherwise) }
    }

    fn string(&mut self) -> Result<String, &'static str> {
        self.expect('"', "a string is missing")?;
        let mut text = String::new();
        loop {
            match self.0.next().ok_or("a string does not end")? {
                '"' => return Ok(text),
                '\\' => text.push(self.escaped()?),
                control if control < ' ' => return Err("a control character is not escaped"),
                other => text.push(other),
            }
        }
    }

    /// The character behind a backslash.
    fn escaped(&mut self) -> Result<char, &'static str> {
        const UNKNOWN: &str = "an escape is unknown";
        Ok(match self.0.next().ok_or(UNKNOWN)? {
            same @ ('"' | '\\' | '/') => same,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let first = self.code_unit().ok_or(UNKNOWN)?;
                let mut units = vec![first];
                // The first half of a surrogate pair.
                if (0xd800..0xdc00).contains(&first) {
                    let has_second = self.0.next() == Some('\\') && self.0.next() == Some('u');
                    units.push(has_second.then(|| self.code_unit()).flatten().ok_or(UNKNOWN)?);
                }
                let mut decoded = char::decode_utf16(units);
                decoded.next().and_then(Result::ok).ok_or(UNKNOWN)?
            }
            _ => return Err(UNKNOWN),
        })
    }

    fn code_unit(&mut self) -> Option<u16> {
        let mut unit = 0;
        for _ in 0..4 {
            unit = unit << 4 | self.0.next()?.to_digit(16)? as u16;
        }
        Some(unit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(text: &str) -> Result<Vec<(String, String)>, &'static str> {
        object_of_strings(text.as_bytes())
    }

    #[test]
    fn objects_of_strings_are_read() {
        assert_eq!(pairs("{}"), Ok(vec![]));
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let spaced = " { \"a\" : \"b\" ,\t\"\" : \"\\u00e4\\ud83d\\ude00\\n\\/\\\"\" } \r\n";
        assert_eq!(pairs(spaced), Ok(vec![pair("a", "b"), pair("", "ä😀\n/\"")]));
        for wrong in [
            "",
            "{",
            "[]",
            "{\"a\"}",
            "{\"a\":1}",
            "{\"a\":\"b\",}",
            "{\"a\":\"b\"} x",
            "{\"a\":\"b",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\ud83d\"}",
            "{\"a\":\"\\ud83d\\u0041\"}",
            "{\"a\":\"\\u12g4\"}",
            "{\"a\":\"\n\"}",
        ] {
            assert!(pairs(wrong).is_err(), "{wrong}");
        }
        assert!(object_of_strings(b"{\"\xff\":\"\"}").is_err());
    }

    proptest! {
        #[test]
        fn strings_are_read_as_they_were_written(name: String, value: String) {
            let mut text = "{".to_owned();
            push_string(&mut text, &name);
            text.push(':');
            push_string(&mut text, &value);
            text.push('}');
            prop_assert_eq!(text.lines().count(), 1);
            prop_assert_eq!(pairs(&text), Ok(vec![(name, value)]));
        }

        #[test]
        fn no_bytes_cause_a_panic(bytes: Vec<u8>) {
            let _ = object_of_strings(&bytes);
        }
    }
}

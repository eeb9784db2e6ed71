//! A list of members in a file that somebody writes by hand.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::BlockingCalls;
use crate::{Listing, Member, Store};

/// How often a watch reads the file.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The most bytes of a list.
const MAX_LIST: u64 = 64 << 20;

/// A file with a list of members, in TOML if its name ends with `.toml`, in JSON otherwise. It is read again each
/// second.
///
/// ```toml
/// [[members]]
/// name = "decode-0"
/// addresses = ["10.0.0.7:7411"]
/// attributes = { role = "decode" }
/// ```
pub struct StaticList {
    url: String,
    file: PathBuf,
    calls: BlockingCalls,
}

impl StaticList {
    /// The list in `file`.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        let file = file.into();
        Self { url: format!("file://{}", file.display()), file, calls: BlockingCalls::default() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    members: Vec<ListedMember>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListedMember {
    name: String,
    addresses: Vec<String>,
    #[serde(default)]
    incarnation: u64,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
}

#[async_trait]
impl Store for StaticList {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    async fn list(&self) -> Result<Listing> {
        let file = self.file.clone();
        let text = self.calls.run(move || read(&file)).await;
        let text =
            text.map_err(|error| Error::new(ErrorKind::Io, "list", self.url.clone()).with_source(error))?;
        parse(&text, self.file.extension().is_some_and(|ending| ending == "toml"))
            .map_err(|why| Error::new(ErrorKind::Protocol, "list", format!("{}: {why}", self.url)))
    }
}

fn read(file: &std::path::Path) -> std::io::Result<String> {
    if std::fs::metadata(file)?.len() > MAX_LIST {
        return Err(std::io::Error::other(format!("it has more than {MAX_LIST} bytes")));
    }
    std::fs::read_to_string(file)
}

fn parse(text: &str, is_toml: bool) -> std::result::Result<Listing, String> {
    let list: List = if is_toml {
        toml::from_str(text).map_err(|error| error.to_string())?
    } else {
        serde_json::from_str(text).map_err(|error| error.to_string())?
    };
    let mut listing = Listing::default();
    for ListedMember { name, addresses, incarnation, attributes } in list.members {
        listing.add(Member { name, addresses, incarnation, attributes, lease: Duration::ZERO });
    }
    Ok(listing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_toml_say_the_same() {
        let json = r#"{"members": [{"name": "a", "addresses": ["h:1", "[::1]:2"], "attributes": {"role": "x"}},
            {"name": "", "addresses": ["h:1"]}, {"name": "a", "addresses": ["h:3"]}]}"#;
        let toml = "[[members]]\nname = 'a'\naddresses = ['h:1', '[::1]:2']\nattributes = { role = 'x' }\n\
            [[members]]\nname = ''\naddresses = ['h:1']\n[[members]]\nname = 'a'\naddresses = ['h:3']\n";
        for (text, is_toml) in [(json, false), (toml, true)] {
            let listing = parse(text, is_toml).unwrap();
            let members: Vec<_> = listing.members().values().cloned().collect();
            assert_eq!(
                members,
                [Member::new("a", 0).address("h:1").address("[::1]:2").attribute("role", "x")]
            );
            assert_eq!(listing.refused().len(), 2);
        }
    }

    #[test]
    fn what_is_no_list_is_an_error() {
        for text in ["", "[]", "{}", r#"{"members": [{"name": "a"}]}"#, r#"{"members": [], "more": 1}"#] {
            assert!(parse(text, false).is_err(), "{text}");
        }
        assert!(parse("[[members]]", true).is_err());
    }
}

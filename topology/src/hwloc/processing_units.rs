//! Adds the processing units (`PU`) that an XML file lacks.
//!
//! hwloc always writes one for each CPU, but some published files were reduced to the objects that their users need.
//! hwloc accepts files without processing units. With debug assertions, however, hwlocality makes hwloc check what it
//! has read, and the check aborts the process.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::cpus::MAX_CPUS;
use crate::fixture::bit_mask;

/// If `xml` has no processing units, adds one for each CPU of its innermost objects.
pub(super) fn add_missing(xml: &str) -> Cow<'_, str> {
    if xml.contains("type=\"PU\"") {
        return Cow::Borrowed(xml);
    }
    let mut out = Output { text: String::with_capacity(2 * xml.len()), unused: first_unused(xml) };
    // The objects that have begun and not ended.
    let mut open: Vec<OpenObject<'_>> = Vec::new();
    let mut rest = xml;
    while let Some(at) = rest.find('<') {
        let length = tag_length(&rest[at..]);
        let (before, tag) = (&rest[..at], &rest[at..at + length]);
        rest = &rest[at + length..];
        out.text.push_str(before);
        match tag {
            _ if tag.starts_with("<object ") => {
                let object = OpenObject { tag, is_innermost: true };
                if object.is_normal() {
                    open.last_mut().into_iter().for_each(|parent| parent.is_innermost = false);
                }
                match tag.strip_suffix("/>") {
                    Some(start) if object.is_normal() => {
                        out.text.extend([start, ">"]);
                        out.units(&object);
                        out.text.push_str("</object>");
                    }
                    Some(_) => out.text.push_str(tag),
                    None => {
                        out.text.push_str(tag);
                        open.push(object);
                    }
                }
            }
            "</object>" => {
                let closed = open.pop();
                closed.iter().for_each(|object| out.units(object));
                out.text.push_str(tag);
            }
            _ => out.text.push_str(tag),
        }
    }
    out.text.push_str(rest);
    Cow::Owned(out.text)
}

struct OpenObject<'a> {
    tag: &'a str,
    /// Whether there is no normal object inside.
    is_innermost: bool,
}

impl<'a> OpenObject<'a> {
    fn attribute(&self, name: &str) -> Option<&'a str> {
        let start = self.tag.find(&format!(" {name}=\""))? + name.len() + 3;
        self.tag[start..].split('"').next()
    }

    /// Whether the object stands for CPUs, and not for memory or a device: hwloc calls such objects "normal".
    fn is_normal(&self) -> bool {
        let special = ["NUMANode", "MemCache", "Bridge", "PCIDev", "OSDev", "Misc"];
        self.attribute("type").is_some_and(|kind| !special.contains(&kind))
    }
}

struct Output {
    text: String,
    /// The next global number (`gp_index`) that no object has.
    unused: u64,
}

impl Output {
    /// Writes the processing units of an innermost object.
    fn units(&mut self, object: &OpenObject<'_>) {
        if !object.is_innermost || !object.is_normal() {
            return;
        }
        let Some(cpus) = object.attribute("cpuset").and_then(cpus) else { return };
        let nodes = object.attribute("nodeset").unwrap_or("0x0");
        let all_nodes = object.attribute("complete_nodeset").unwrap_or(nodes);
        for cpu in cpus {
            let mask = bit_mask([cpu]);
            let _ = write!(
                self.text,
                r#"<object type="PU" os_index="{cpu}" cpuset="{mask}" complete_cpuset="{mask}" nodeset="{nodes}" complete_nodeset="{all_nodes}" gp_index="{}"/>"#,
                self.unused
            );
            self.unused += 1;
        }
    }
}

/// The CPUs of a mask such as `0x0000ffff,0xffffffff`: words of 32 bits, the highest first.
fn cpus(mask: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for (word, digits) in mask.rsplit(',').enumerate() {
        let bits = u32::from_str_radix(digits.strip_prefix("0x")?, 16).ok()?;
        let first = u32::try_from(word).ok().filter(|word| *word < MAX_CPUS / 32)? * 32;
        cpus.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| first + bit));
    }
    Some(cpus)
}

/// The length of the tag or comment at the beginning of `xml`. A quoted `>` does not end a tag.
fn tag_length(xml: &str) -> usize {
    if xml.starts_with("<!--") {
        return xml.find("-->").map_or(xml.len(), |at| at + 3);
    }
    let mut quote = None;
    for (at, byte) in xml.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return at + 1,
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
    }
    xml.len()
}

/// The number after the largest `gp_index`.
fn first_unused(xml: &str) -> u64 {
    let number = |text: &str| text.split('"').next().and_then(|digits| digits.parse::<u64>().ok());
    xml.split("gp_index=\"").skip(1).filter_map(number).max().unwrap_or(0).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_objects_get_processing_units() {
        let without = r#"<!-- <object > --><object type="Machine" cpuset="0x7" nodeset="0x1" gp_index="7">
            <object type="Package" cpuset="0x3" nodeset="0x1"><object type="NUMANode" cpuset="0x3"/></object>
            <object type="Core" cpuset="0x4" nodeset="0x1"/><object type="Misc" name="a>b"/></object>"#;
        let with = add_missing(without);
        let places: Vec<&str> = with.matches("type=\"PU\"").collect();
        assert_eq!(places.len(), 3, "{with}");
        assert!(
            with.contains(r#"cpuset="0x3"/><object type="PU" os_index="0" cpuset="0x00000001""#),
            "{with}"
        );
        assert!(
            with.contains(r#"nodeset="0x1"><object type="PU" os_index="2" cpuset="0x00000004""#),
            "{with}"
        );
        assert!(
            with.contains(r#"gp_index="10"/></object><object type="Misc" name="a>b"/></object>"#),
            "{with}"
        );
        assert_eq!(add_missing(&with), with);
    }

    #[test]
    fn other_texts_do_not_change() {
        for text in
            ["", "hello", "<", "<object ", "</object>", "<object type=\"Core\"", "<!-- <object >", "a > b"]
        {
            assert_eq!(add_missing(text), text);
        }
    }
}

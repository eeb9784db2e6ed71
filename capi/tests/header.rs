//! `include/multirail.h` and the sources of this crate say the same: functions with their parameters, structs with their
//! members, numbers, and options.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Names, each with what was found of it.
type Found = BTreeMap<String, String>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The header without comments, and with single spaces.
fn header() -> String {
    let text = fs::read_to_string(root().join("include/multirail.h")).expect("the header");
    let mut code = String::new();
    for (at, part) in text.split("/*").enumerate() {
        code += if at == 0 { part } else { part.split_once("*/").expect("a comment that ends").1 };
    }
    code
}

fn source(name: &str) -> String {
    let text = fs::read_to_string(root().join("src").join(name)).expect("a source file");
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The text between the first `open` and its counterpart, and what follows.
fn enclosed(text: &str, open: char, close: char) -> Option<(&str, &str)> {
    let start = text.find(open)? + 1;
    let mut depth = 1;
    for (at, character) in text[start..].char_indices() {
        depth += i32::from(character == open) - i32::from(character == close);
        if depth == 0 {
            return Some((&text[start..start + at], &text[start + at + 1..]));
        }
    }
    None
}

/// A declaration of C as its type and its name: `const char *buf` is `const char *` and `buf`.
fn declaration(text: &str) -> (String, String) {
    let text = words(text);
    let at =
        text.rfind(|character: char| !character.is_alphanumeric() && character != '_').map_or(0, |at| at + 1);
    (text[..at].trim_end().to_owned(), text[at..].to_owned())
}

/// A type of Rust as C writes it.
fn in_c(rust: &str) -> String {
    let generic = |name: &str| rust.strip_prefix(name).and_then(|rest| rest.strip_suffix('>'));
    let pointer = |to: String| if to.ends_with('*') { format!("{to}*") } else { format!("{to} *") };
    if let Some(inner) = generic("Out<") {
        return pointer(in_c(inner));
    }
    if let Some(inner) = generic("Entries<").or_else(|| generic("Input<")) {
        return pointer(format!("const {}", in_c(inner)));
    }
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return pointer(in_c(inner));
    }
    if let Some(inner) = rust.strip_prefix("*const ") {
        return pointer(format!("const {}", in_c(inner)));
    }
    let known = match rust {
        "Text" => "const char *",
        "OutText" => "char *",
        "Bytes" => "const void *",
        "OutBytes" => "void *",
        "usize" => "size_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "i32" => "int32_t",
        "c_void" => "void",
        "c_char" => "char",
        other => other,
    };
    known.to_owned()
}

/// The functions of the header: each name with its returned type and parameters.
fn functions_of_header(code: &str) -> Found {
    let mut found = Found::new();
    for statement in code.split(';') {
        let statement = statement.rsplit(['}', '{', '"']).next().unwrap_or_default();
        let lines = statement.lines().filter(|line| !line.trim_start().starts_with('#'));
        let statement = words(&lines.collect::<Vec<_>>().join("\n"));
        let Some((before, _)) = statement.split_once('(') else { continue };
        let (returned, name) = declaration(before);
        if !name.starts_with("mr_") && !name.starts_with("multirail_") {
            continue;
        }
        let (parameters, _) = enclosed(&statement, '(', ')').expect("parameters");
        let parameters = parameters.split(',').map(declaration).filter(|(_, name)| name != "void");
        let parameters: Vec<String> = parameters.map(|(kind, name)| format!("{name}: {kind}")).collect();
        found.insert(name, format!("{returned} ({})", parameters.join(", ")));
    }
    found
}

/// The functions that the sources export.
fn functions_of_sources() -> Found {
    let mut found = Found::new();
    for entry in fs::read_dir(root().join("src")).expect("the sources") {
        let name = entry.expect("a file").file_name().into_string().expect("a name");
        let text = source(&name);
        for defines in ["\nentry_points! {", "\nplain! {"] {
            let Some(at) = text.find(defines) else { continue };
            let (mut body, _) = enclosed(&text[at..], '{', '}').expect("the end of the macro");
            while let Some(at) = body.find("\n    fn ") {
                let (name, rest) = body[at + 8..].split_once('(').expect("parameters");
                let (parameters, rest) =
                    enclosed(&body[at + 8 + name.len()..], '(', ')').map_or(("", rest), |found| found);
                let (head, _) = rest.split_once('{').expect("a body");
                let returned = match words(head).strip_prefix("-> ") {
                    Some(kind) => in_c(kind.trim()),
                    None => "mr_status".to_owned(),
                };
                let parameter = |text: &str| {
                    let text = words(text);
                    let (name, kind) = text.split_once(": ")?;
                    Some(format!("{name}: {}", in_c(kind)))
                };
                let parameters: Vec<String> = parameters.split(',').filter_map(parameter).collect();
                found.insert(name.to_owned(), format!("{returned} ({})", parameters.join(", ")));
                (_, body) = enclosed(rest, '{', '}').expect("the end of the body");
            }
        }
    }
    found
}

/// The structs of the header: each name with its members.
fn structs_of_header(code: &str) -> Found {
    let mut found = Found::new();
    for part in code.split("typedef struct ").skip(1) {
        let name = part.split_whitespace().next().expect("a name").to_owned();
        let (members, _) = enclosed(part, '{', '}').expect("members");
        let member = |text: &str| {
            let text = words(text);
            if let Some((before, rest)) = text.split_once("(*") {
                let (name, parameters) = rest.split_once(')').expect("a function");
                return format!("{name}: {before}(*){parameters}");
            }
            match text.split_once('[') {
                Some((before, length)) => {
                    let (kind, name) = declaration(before);
                    format!("{name}: {kind}[{length}")
                }
                None => {
                    let (kind, name) = declaration(&text);
                    format!("{name}: {kind}")
                }
            }
        };
        let members: Vec<_> = members.split(';').filter(|text| !text.trim().is_empty()).map(member).collect();
        found.insert(name, members.join("; "));
    }
    found
}

fn structs_of_sources() -> Found {
    let text = source("abi.rs");
    let mut found = Found::new();
    for part in text.split("#[repr(C)]").skip(1) {
        let (_, part) = part.split_once("pub struct ").expect("a struct");
        let name = part.split_whitespace().next().expect("a name").to_owned();
        let (members, _) = enclosed(part, '{', '}').expect("members");
        let member = |line: &str| {
            let (name, kind) = line.trim().strip_prefix("pub ")?.strip_suffix(',')?.split_once(": ")?;
            let kind = match kind.strip_prefix("[u8; ") {
                Some(length) => format!("char[{length}"),
                None if kind == "Option<extern \"C\" fn(context: *mut c_void)>" => {
                    "void (*)(void *context)".into()
                }
                None => in_c(kind),
            };
            Some(format!("{name}: {kind}"))
        };
        found.insert(name, members.lines().filter_map(member).collect::<Vec<_>>().join("; "));
    }
    found
}

/// The numbers of the header: those of its enums, and those of macros that are a number.
fn numbers_of_header(code: &str) -> Found {
    let mut found = Found::new();
    for part in code.split("enum {").skip(1) {
        let (numbers, _) = part.split_once('}').expect("the end of an enum");
        for number in numbers.split(',') {
            let (name, value) = number.split_once('=').expect("a number");
            found.insert(name.trim().to_owned(), value.trim().to_owned());
        }
    }
    for line in code.lines().filter_map(|line| line.strip_prefix("#define ")) {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let value = match value {
            "UINT64_MAX" => "u64::MAX",
            "((uint32_t)0x00000001)" => "1",
            "((int32_t)-1)" => "-1",
            _ => continue,
        };
        found.insert(name.replace("MR_ABI_VERSION", "ABI_VERSION"), value.to_owned());
    }
    found
}

fn numbers_of_sources() -> Found {
    let text = source("abi.rs");
    let constants = text.lines().filter_map(|line| line.trim().strip_prefix("pub const "));
    let numbers = constants.filter_map(|line| {
        let (name, rest) = line.split_once(": ")?;
        let (_, value) = rest.strip_suffix(';')?.split_once(" = ")?;
        Some((name.to_owned(), value.to_owned()))
    });
    numbers.collect()
}

/// Fails with the differences of both sides.
fn compare(what: &str, header: &Found, sources: &Found) {
    let mut differences = String::new();
    for name in header.keys().chain(sources.keys()) {
        let (theirs, ours) = (header.get(name), sources.get(name));
        if theirs != ours && !differences.contains(&format!("{name}:")) {
            differences += &format!("\n{name}:\n  header:  {theirs:?}\n  sources: {ours:?}");
        }
    }
    assert!(differences.is_empty(), "{what} differ:{differences}");
}

#[test]
fn functions_are_those_of_the_header() {
    let (header, sources) = (functions_of_header(&header()), functions_of_sources());
    assert!(header.len() > 80, "{} functions were found in the header", header.len());
    let write = "mr_status (peer: mr_peer, imm: uint32_t, op: mr_op *)";
    assert_eq!(header.get("mr_write_imm").map(String::as_str), Some(write));
    compare("functions", &header, &sources);
}

#[test]
fn structs_are_those_of_the_header() {
    let (header, sources) = (structs_of_header(&header()), structs_of_sources());
    assert_eq!(header.len(), 9, "{header:?}");
    assert_eq!(header.get("mr_option").map(String::as_str), Some("key: const char *; value: const char *"));
    compare("structs", &header, &sources);
}

#[test]
fn numbers_are_those_of_the_header() {
    let (header, sources) = (numbers_of_header(&header()), numbers_of_sources());
    assert!(header.len() > 45 && header.get("MR_ERROR_IO").is_some_and(|code| code == "-20"), "{header:?}");
    compare("numbers", &header, &sources);
}

#[test]
fn options_are_those_of_the_header() {
    let text = fs::read_to_string(root().join("include/multirail.h")).expect("the header");
    let start = text.find("\n/*\n * Opens a fabric:").expect("the comment of mr_fabric_open");
    let comment = &text[start..start + text[start..].find("*/").expect("its end")];
    let keys =
        comment.lines().filter_map(|line| line.strip_prefix(" *   ")).filter(|line| !line.starts_with(' '));
    // The keys end where two spaces, or the text behind the longest key, begin.
    let keys = keys.flat_map(|line| line.split("  ").next().unwrap_or_default().split(", "));
    let keys: Vec<&str> = keys.map(|key| key.split(' ').next().unwrap_or_default()).collect();
    let settings = source("settings.rs");
    let (known, _) =
        settings.split_once("pub const KEYS: [&str; 29] = [").expect("KEYS").1.split_once(']').expect("]");
    let known: Vec<&str> = known.split('"').skip(1).step_by(2).collect();
    assert_eq!(keys, known);
}

/// What a program that was compiled with the header relies on, one line each.
fn declarations() -> Vec<String> {
    let header = header();
    let all = [
        ("function", functions_of_header(&header)),
        ("struct", structs_of_header(&header)),
        ("number", numbers_of_header(&header)),
    ];
    let lines = all.iter().flat_map(|(kind, found)| {
        // The number of the interface itself rises.
        let kept = found.iter().filter(|(name, _)| *name != "ABI_VERSION");
        kept.map(move |(name, text)| format!("{kind} {name}: {text}"))
    });
    lines.collect()
}

fn recording() -> std::path::PathBuf {
    root().join("tests/abi/v1.txt")
}

/// The declarations of `now` that programs compiled with `recorded` cannot work with, and those without a recording.
fn broken(recorded: &[String], now: &[String]) -> Vec<String> {
    let is_kept = |line: &String| {
        // Only a struct that begins with its size may get further members.
        let grows = line.starts_with("struct ") && line.contains(": size: uint32_t; ");
        now.iter().any(|now| now == line || (grows && now.starts_with(&format!("{line}; "))))
    };
    let gone =
        recorded.iter().filter(|line| !is_kept(line)).map(|line| format!("changed or removed: {line}"));
    // Also a struct that has grown: programs compiled with its new members rely on these, too.
    let added = now.iter().filter(|line| !recorded.contains(line));
    gone.chain(added.map(|line| format!("not recorded: {line}"))).collect()
}

#[test]
fn programs_compiled_with_the_recorded_header_work() {
    let text = fs::read_to_string(recording()).expect("the recording");
    let recorded: Vec<_> = text.lines().map(str::to_owned).collect();
    let broken = broken(&recorded, &declarations());
    let advice = "what was released is recorded once and never changes: see docs/compatibility.md";
    assert!(broken.is_empty(), "{}\n{advice}", broken.join("\n"));
}

#[test]
fn changes_of_the_interface_are_found() {
    let now = declarations();
    assert!(broken(&now, &now).is_empty());
    let number = now.iter().position(|line| line.starts_with("number ")).expect("a number");
    let grown =
        now.iter().position(|line| line.contains(": size: uint32_t; ")).expect("a struct with a size");
    let fixed = now.iter().position(|line| line.starts_with("struct mr_option:")).expect("a struct without");
    for (at, suffix, is_broken) in [
        (0, ", more: int", true),
        (number, "9", true),
        (grown, "; more: int", false),
        (fixed, "; more: int", true),
    ] {
        let mut changed = now.clone();
        changed[at] += suffix;
        let mut found = vec![format!("not recorded: {}", changed[at])];
        if is_broken {
            found.insert(0, format!("changed or removed: {}", now[at]));
        }
        assert_eq!(broken(&now, &changed), found);
        // Once it is recorded, the longer struct may not lose its new member.
        let recorded = [&now[..], &changed[at..=at]].concat();
        assert_eq!(broken(&recorded, &changed).is_empty(), !is_broken);
        assert!(!broken(&recorded, &now).is_empty());
    }
    assert_eq!(broken(&now[1..], &now), [format!("not recorded: {}", now[0])]);
    assert_eq!(broken(&now, &now[1..]), [format!("changed or removed: {}", now[0])]);
}

/// Adds the declarations that have no recording. To be run once for what is new.
#[test]
#[ignore = "records"]
fn record() {
    fs::create_dir_all(recording().parent().expect("a folder")).expect("the folder");
    let text = fs::read_to_string(recording()).unwrap_or_default();
    let recorded: Vec<_> = text.lines().map(str::to_owned).collect();
    let added = broken(&recorded, &declarations());
    let added =
        added.iter().filter_map(|line| line.strip_prefix("not recorded: ")).map(|line| format!("{line}\n"));
    fs::write(recording(), text + &added.collect::<String>()).expect("the recording");
}

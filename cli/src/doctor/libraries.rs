//! The backends, and the libraries that they open at run time.

use std::collections::BTreeMap;

use multirail::spi::Probe;
use multirail::{BackendChoice, Registry};

use super::finding::{Check, CheckResult, Finding, Level};
use super::host::ExaminedHost;

/// Checks the backends. A requested backend must be available.
pub fn backends(
    check: Check,
    host: &ExaminedHost,
    registry: &Registry,
    choice: &BackendChoice,
) -> Vec<Finding> {
    let asked = match choice {
        BackendChoice::Named(name) => Some(name.as_str()),
        BackendChoice::Auto => None,
    };
    if let Some(Err(error)) = asked.map(|name| registry.find(name)) {
        return vec![check.problem(
            error.to_string(),
            "no fabric can be opened",
            "choose another backend with --backend",
        )];
    }
    let rows = registry.rows().into_iter().filter(|row| asked.is_none_or(|name| name == row.name));
    let probes: Vec<_> = rows.map(|row| (row.name, row.probe)).collect();
    probe_findings(check, host, asked.is_some(), &probes)
}

fn probe_findings(
    check: Check,
    host: &ExaminedHost,
    is_asked: bool,
    probes: &[(&str, Probe)],
) -> Vec<Finding> {
    let found = probes.iter().map(|(name, probe)| match probe {
        Ok(devices) => check.ok(format!("{name}: {} devices", devices.len())),
        Err(why) => {
            let value = format!("{name}: {}", why.reason);
            match is_asked || host.has_cards_for(name) {
                true => check.problem(value, "the backend cannot be opened", &why.remedy),
                false => Finding { remedy: Some(why.remedy.clone()), ..check.skipped(value) },
            }
        }
    });
    found.collect()
}

/// A library: opened with a version that may be unknown, or the reason why it cannot be opened.
pub struct LibraryReport {
    /// The start of its file names.
    pub stem: &'static str,
    /// The backend that needs the library.
    pub backend: &'static str,
    pub opened: Result<Option<String>, String>,
    pub remedy: &'static str,
}

impl LibraryReport {
    /// The libraries of this process. They are opened now if they were not open before.
    pub fn all() -> [Self; 2] {
        let fabric = backend_efa::libfabric_version().map(|(major, minor)| Some(format!("{major}.{minor}")));
        let verbs = backend_verbs::libibverbs_opens().map(|()| None);
        [
            Self {
                stem: "libfabric.so",
                backend: "efa",
                opened: fabric.map_err(|why| why.context().to_owned()),
                remedy: "install libfabric (Debian: libfabric1), or set MULTIRAIL_LIBFABRIC to its file",
            },
            Self {
                stem: "libibverbs.so",
                backend: "verbs",
                opened: verbs.map_err(|why| why.context().to_owned()),
                remedy: "install libibverbs (Debian: libibverbs1), or set MULTIRAIL_LIBIBVERBS to its file",
            },
        ]
    }
}

/// Checks that each library opens, and that the process has only one file of each.
pub fn libraries(
    check: Check,
    host: &ExaminedHost,
    choice: &BackendChoice,
    libraries: &[LibraryReport],
) -> CheckResult {
    let maps = host.text("/proc/self/maps")?.unwrap_or_default();
    let mut found = Vec::new();
    for library in libraries {
        let files = mapped(&maps, library.stem);
        let name = format!("{}.1", library.stem);
        match &library.opened {
            Ok(version) => {
                let version = version.clone().or_else(|| numbered(files.first()?, library.stem));
                let version = version.unwrap_or_else(|| "unknown version".to_owned());
                let file = files.first().map_or(String::new(), |file| format!(", {file}"));
                found.push(check.ok(format!("{name}: {version}{file}")));
            }
            Err(why) => found.push(missing(check, host, choice, library, why)),
        }
        if files.len() > 1 {
            found.push(check.problem(
                format!("the process has {name} {} times: {}", files.len(), files.join(", ")),
                "each has its own state: a device opened by one is unknown to the other, and processes crash",
                "use one file in MULTIRAIL_LIBFABRIC, MULTIRAIL_LIBIBVERBS, LD_LIBRARY_PATH and the dynamic linker's \
                 cache",
            ));
        }
    }
    Ok(found)
}

/// The finding for a library that does not open. Its level depends on how much the library is needed.
fn missing(
    check: Check,
    host: &ExaminedHost,
    choice: &BackendChoice,
    library: &LibraryReport,
    why: &str,
) -> Finding {
    let level = match choice {
        BackendChoice::Named(name) if name == library.backend => Level::Problem,
        BackendChoice::Named(_) => return check.skipped(format!("{why}; another backend is requested")),
        BackendChoice::Auto if host.has_cards_for(library.backend) => Level::Problem,
        BackendChoice::Auto => Level::Warning,
    };
    check.found(level, why, format!("the backend {} is unavailable", library.backend), library.remedy)
}

/// The distinct files of a library in this process.
fn mapped(maps: &str, stem: &str) -> Vec<String> {
    let mut files = BTreeMap::new();
    for line in maps.lines() {
        // The fields are addresses, permissions, offset, device, inode, path (proc_pid_maps(5)).
        let Some(start) = line.find('/') else { continue };
        let (fields, path) = line.split_at(start);
        let mut fields = fields.split_whitespace().skip(3);
        let (Some(device), Some(inode)) = (fields.next(), fields.next()) else { continue };
        if path.rsplit('/').next().is_some_and(|file| file.starts_with(stem)) {
            files.entry((device, inode)).or_insert_with(|| path.to_owned());
        }
    }
    files.into_values().collect()
}

/// The version in a file's name: `1.14.44.0` of `libibverbs.so.1.14.44.0`.
fn numbered(path: &str, stem: &str) -> Option<String> {
    let number = path.rsplit('/').next()?.strip_prefix(stem)?.strip_prefix('.')?;
    Some(number.split_whitespace().next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use multirail::spi::Unavailable;

    use super::super::host::fake::Fake;
    use super::*;

    const MAPS: &str = "\
7f00-7f01 r--p 00000000 fe:01 11 /usr/lib/libibverbs.so.1.14.44.0
7f01-7f02 r-xp 00001000 fe:01 11 /usr/lib/libibverbs.so.1.14.44.0
7f02-7f03 r--p 00000000 fe:01 12 /usr/lib/libfabric.so.1.18.1
7f03-7f04 rw-p 00000000 00:00 0 [heap]
";

    fn library(opened: Result<Option<String>, String>) -> LibraryReport {
        LibraryReport { stem: "libibverbs.so", backend: "verbs", opened, remedy: "install it" }
    }

    #[test]
    fn one_file_of_many_mappings_is_one() {
        let host = Fake::new(&[("/proc/self/maps", MAPS)]);
        let found = libraries(Check("it"), &host, &BackendChoice::Auto, &[library(Ok(None))]).unwrap();
        assert_eq!(found.len(), 1);
        let expected = "libibverbs.so.1: 1.14.44.0, /usr/lib/libibverbs.so.1.14.44.0";
        assert_eq!((found[0].level, found[0].what.as_str()), (Level::Ok, expected));
    }

    #[test]
    fn two_files_are_a_problem() {
        let maps =
            format!("{MAPS}7f05-7f06 r--p 00000000 fe:01 13 /opt/with space/libibverbs.so.1 (deleted)\n");
        let host = Fake::new(&[("/proc/self/maps", &maps)]);
        let found = libraries(Check("it"), &host, &BackendChoice::Auto, &[library(Ok(None))]).unwrap();
        assert_eq!(found[1].level, Level::Problem);
        assert!(found[1].what.contains("2 times") && found[1].what.contains("/opt/with space/"), "{found:?}");
    }

    #[test]
    fn a_missing_one_is_worse_where_it_is_needed() {
        let missing = [library(Err("no such file".into()))];
        let named = |name: &str| BackendChoice::Named(name.into());
        let level = |fake: Fake, choice| libraries(Check("it"), &fake, &choice, &missing).unwrap()[0].level;
        assert_eq!(level(Fake::new(&[]), BackendChoice::Auto), Level::Warning);
        assert_eq!(level(Fake::new(&[]).efa("rdmap0s6"), BackendChoice::Auto), Level::Warning);
        assert_eq!(level(Fake::new(&[]).card("mlx5_0"), BackendChoice::Auto), Level::Problem);
        assert_eq!(level(Fake::new(&[]), named("verbs")), Level::Problem);
        assert_eq!(level(Fake::new(&[]).card("mlx5_0"), named("loopback")), Level::Skipped);
    }

    #[test]
    fn a_requested_backend_must_be_available() {
        let absent = || Err(Unavailable { reason: "not here".into(), remedy: "get one".into() });
        let probes = [("loopback", Ok(vec![])), ("verbs", absent())];
        let levels = |fake: Fake, is_asked| {
            let found = probe_findings(Check("it"), &fake, is_asked, &probes);
            found.iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(Fake::new(&[]), false), [Level::Ok, Level::Skipped]);
        assert_eq!(levels(Fake::new(&[]), true), [Level::Ok, Level::Problem]);
        assert_eq!(levels(Fake::new(&[]).soft("rxe0"), false), [Level::Ok, Level::Problem]);
        assert_eq!(levels(Fake::new(&[]).efa("rdmap0s6"), false), [Level::Ok, Level::Skipped]);
        let choice = BackendChoice::Named("carrier".into());
        let unknown = backends(Check("it"), &Fake::new(&[]), &Registry::standard(), &choice);
        assert!(unknown[0].level == Level::Problem && unknown[0].what.contains("carrier"), "{unknown:?}");
    }
}

//! The command that runs one trial and seed again.

use std::path::Path;

use crate::runner::{SEED_VARIABLE, SEEDS_VARIABLE};

/// One line for a shell, in the workspace; `seeds` is given where a run is over several.
pub(crate) fn replay(name: &str, seed: u64, seeds: Option<u64>) -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let seeds = seeds.map_or_else(String::new, |seeds| format!(" {SEEDS_VARIABLE}={seeds}"));
    let (profile, target) = (profile(&program), target(&program));
    format!(
        "{SEED_VARIABLE}={seed}{seeds} cargo test{profile} --workspace --test {target} -- --exact '{name}'"
    )
}

/// Cargo names a test's program `target-hash`.
fn target(program: &Path) -> &str {
    let name = program.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.rsplit_once('-')).map_or("NAME", |(target, _)| target)
}

/// Cargo puts a test's program into `PROFILE/deps`.
fn profile(program: &Path) -> String {
    match program.ancestors().nth(2).and_then(Path::file_name).and_then(|name| name.to_str()) {
        None | Some("debug") => String::new(),
        Some(profile) => format!(" --profile {profile}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_and_profile_are_told_by_the_path() {
        let path = Path::new("/a/target/checked/deps/some_test-0123456789abcdef");
        assert_eq!((target(path), &*profile(path)), ("some_test", " --profile checked"));
        assert_eq!(profile(Path::new("/a/target/debug/deps/test-0123456789abcdef")), "");
        assert_eq!(target(Path::new("odd")), "NAME");
    }
}

//! NIXL's wheels: whether they have the plug-in MULTIRAIL, above all if an engine is told to use it. NIXL itself only logs a
//! warning if it is missing.

use std::path::{Path, PathBuf};

use super::finding::{Check, Finding};
use crate::nixl::{Installation, PLUGIN_FILE, environments};

/// The variables by which engines choose a backend of NIXL: SGLang's and TensorRT-LLM's.
const ASKING: [&str; 2] = ["SGLANG_DISAGGREGATION_NIXL_BACKEND", "TRTLLM_NIXL_KVCACHE_BACKEND"];

const COST: &str = "NIXL logs a warning, and does not have the backend MULTIRAIL";

/// What decides whether NIXL finds the plug-in.
struct NixlPlaces {
    /// The variable that asks for MULTIRAIL.
    asked_by: Option<&'static str>,
    /// NIXL_PLUGIN_DIR: NIXL then looks into this folder alone.
    folder: Option<PathBuf>,
    /// The environment whose wheels are checked.
    environment: Option<PathBuf>,
}

/// Checks the folder of NIXL_PLUGIN_DIR, or the wheels in the active environment.
pub fn plugin(check: Check) -> Vec<Finding> {
    let asks = |name: &&str| std::env::var(name).is_ok_and(|value| value.eq_ignore_ascii_case("MULTIRAIL"));
    let places = NixlPlaces {
        asked_by: ASKING.into_iter().find(asks),
        folder: std::env::var_os("NIXL_PLUGIN_DIR").map(PathBuf::from),
        environment: environments().into_iter().next(),
    };
    places.findings(check)
}

impl NixlPlaces {
    fn findings(&self, check: Check) -> Vec<Finding> {
        if let Some(folder) = &self.folder {
            let name = format!("NIXL_PLUGIN_DIR ({})", folder.display());
            let fix = "remove NIXL_PLUGIN_DIR, or copy the plug-in there";
            return vec![self.finding(check, &name, folder, fix)];
        }
        let wheels = self.environment.as_deref().map(|place| Installation::find(place).unwrap_or_default());
        let wheels = wheels.unwrap_or_default();
        if !wheels.is_empty() {
            let of_wheel = |wheel: &Installation| {
                self.finding(check, &wheel.to_string(), &wheel.plugins, "multirail nixl install")
            };
            return wheels.iter().map(of_wheel).collect();
        }
        let looked = self.environment.as_ref().map_or("VIRTUAL_ENV is not set".into(), |place| {
            format!("no wheel of NIXL in {}", place.display())
        });
        vec![match self.asked_by {
            Some(variable) => {
                let what = format!("{variable} asks for MULTIRAIL, and {looked}");
                check.warning(
                    what,
                    COST,
                    "run `multirail nixl status --venv DIR` with the environment of the engine",
                )
            }
            None => check.skipped(looked),
        }]
    }

    fn finding(&self, check: Check, name: &str, folder: &Path, fix: &str) -> Finding {
        if folder.join(PLUGIN_FILE).is_file() {
            return check.ok(format!("{name} has the plug-in MULTIRAIL"));
        }
        match self.asked_by {
            Some(variable) => check.problem(
                format!("{variable} asks for MULTIRAIL, and {name} has no {PLUGIN_FILE}"),
                COST,
                fix,
            ),
            None => check.skipped(format!("{name} has no plug-in MULTIRAIL, and nothing asks for it")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    fn level(places: &NixlPlaces) -> Level {
        places.findings(Check("nixl"))[0].level
    }

    #[test]
    fn a_plugin_that_is_asked_for_must_be_there() {
        let root = std::env::temp_dir().join(format!("multirail-doctor-nixl-{}", std::process::id()));
        let packages = root.join("lib/python3.11/site-packages");
        let plugins = packages.join(".nixl_cu12.mesonpy.libs/plugins");
        std::fs::create_dir_all(&plugins).unwrap();
        let mut places = NixlPlaces { asked_by: None, folder: None, environment: Some(root.clone()) };
        assert_eq!(level(&places), Level::Skipped);
        places.asked_by = Some(ASKING[0]);
        assert_eq!(level(&places), Level::Problem);
        std::fs::write(plugins.join(PLUGIN_FILE), b"plug-in").unwrap();
        assert_eq!(level(&places), Level::Ok);
        // The folder of the variable counts alone.
        places.folder = Some(packages);
        assert_eq!(level(&places), Level::Problem);
        places.folder = None;
        places.environment = None;
        assert_eq!(level(&places), Level::Warning);
        std::fs::remove_dir_all(root).unwrap();
    }
}

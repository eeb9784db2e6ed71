//! `multirail nixl`: the plug-in in a Python environment.
#![cfg(unix)]

mod process;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use process::multirail;

/// An environment with two wheels of NIXL, and a plug-in beside it.
struct Environment(PathBuf);

impl Environment {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("multirail-nixl-{name}-{}", std::process::id()));
        let this = Self(root);
        for package in ["nixl_cu12", "nixl_cu13"] {
            fs::create_dir_all(this.plugins(package)).unwrap();
            fs::create_dir_all(this.packages().join(format!("{package}-1.5.1.dist-info"))).unwrap();
        }
        fs::write(this.plugin(), b"the plug-in").unwrap();
        this
    }

    fn packages(&self) -> PathBuf {
        self.0.join("lib/python3.11/site-packages")
    }

    fn plugins(&self, package: &str) -> PathBuf {
        self.packages().join(format!(".{package}.mesonpy.libs/plugins"))
    }

    fn installed(&self, package: &str) -> PathBuf {
        self.plugins(package).join("libplugin_MULTIRAIL.so")
    }

    fn plugin(&self) -> PathBuf {
        self.0.join("built.so")
    }

    fn run(&self, action: &str) -> Output {
        self.run_in(action, &self.0)
    }

    fn run_in(&self, action: &str, venv: &Path) -> Output {
        let mut command = multirail(&["nixl", action, "--json", "--venv"]);
        command.arg(venv).arg("--plugin").arg(self.plugin()).env_remove("NIXL_PLUGIN_DIR");
        command.output().expect("start")
    }

    /// The states that `status` shows.
    fn states(&self) -> Vec<String> {
        let shown = String::from_utf8(self.run("status").stdout).unwrap();
        let rows = shown.lines().map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap());
        rows.map(|row| row["plugin"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn install_status_and_uninstall() {
    let environment = Environment::new("all");
    assert_eq!(environment.states(), ["missing", "missing"]);
    assert_eq!(environment.run("status").status.code(), Some(1));
    assert!(environment.run("install").status.success());
    assert_eq!(fs::read(environment.installed("nixl_cu13")).unwrap(), b"the plug-in");
    assert_eq!(environment.states(), ["installed", "installed"]);
    assert!(environment.run("status").status.success());
    // A newer build takes the place of an older one.
    fs::write(environment.plugin(), b"a newer one").unwrap();
    assert_eq!(environment.states(), ["another build", "another build"]);
    assert!(environment.run("install").status.success());
    assert_eq!(fs::read(environment.installed("nixl_cu12")).unwrap(), b"a newer one");
    assert!(environment.run("uninstall").status.success());
    assert_eq!(environment.states(), ["missing", "missing"]);
    let again = environment.run("uninstall");
    assert!(String::from_utf8_lossy(&again.stdout).contains("has no plug-in"), "{again:?}");
    // Nothing else is left of it.
    assert_eq!(fs::read_dir(environment.plugins("nixl_cu12")).unwrap().count(), 0);
}

#[test]
fn a_folder_of_packages_is_an_environment_too() {
    let environment = Environment::new("packages");
    assert!(environment.run_in("install", &environment.packages()).status.success());
    assert!(environment.installed("nixl_cu12").exists());
}

#[test]
fn what_is_missing_is_named() {
    let environment = Environment::new("missing");
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let nowhere = environment.run_in("install", Path::new("/nowhere"));
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(said(&nowhere).contains("/nowhere"), "{nowhere:?}");
    let empty = environment.0.join("empty");
    fs::create_dir(&empty).unwrap();
    assert!(said(&environment.run_in("install", &empty)).contains("pip install nixl"));
    fs::remove_file(environment.plugin()).unwrap();
    let without = environment.run("install");
    assert_eq!(without.status.code(), Some(1));
    assert!(said(&without).contains("built.so"), "{without:?}");
    assert!(!environment.installed("nixl_cu12").exists());
}

#[test]
fn a_folder_that_hides_the_plugin_is_told_of() {
    let environment = Environment::new("hidden");
    let mut install = multirail(&["nixl", "install", "--venv"]);
    install.arg(&environment.0).arg("--plugin").arg(environment.plugin()).env("NIXL_PLUGIN_DIR", "/nowhere");
    let output = install.output().expect("start");
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("NIXL_PLUGIN_DIR is set"), "{output:?}");
}

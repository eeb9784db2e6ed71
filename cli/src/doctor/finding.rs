//! The finding of a check: its level, its cost, and its fix.

use serde::Serialize;

use super::host::Unreadable;

/// The result of a check: its findings, or the file that it could not read.
pub type CheckResult = Result<Vec<Finding>, Unreadable>;

/// The level of a finding. The worst level decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// There is nothing to check, or no way to check it.
    Skipped,
    /// Nothing needs to be fixed.
    Ok,
    /// It works, but slower or with less than possible.
    Warning,
    /// Some operation will fail.
    Problem,
}

impl Level {
    /// The exit code of a report whose worst finding has this level.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Skipped | Self::Ok => 0,
            Self::Warning => 1,
            Self::Problem => 2,
        }
    }

    /// The level in `--json`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One row of the report.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// The name of the check. One check may have several findings.
    pub check: &'static str,
    pub level: Level,
    /// What the check found, or the reason why it was skipped.
    pub what: String,
    /// The cost for the user.
    pub cost: Option<String>,
    /// The fix.
    pub remedy: Option<String>,
}

/// The name of a check. Its methods make the findings of the check.
#[derive(Clone, Copy)]
pub struct Check(pub &'static str);

impl Check {
    /// Nothing needs to be fixed.
    pub fn ok(self, what: impl Into<String>) -> Finding {
        self.plain(Level::Ok, what)
    }

    /// The check was skipped for this reason.
    pub fn skipped(self, why: impl Into<String>) -> Finding {
        self.plain(Level::Skipped, why)
    }

    /// Something works, but could be better.
    pub fn warning(
        self,
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        self.found(Level::Warning, what, cost, remedy)
    }

    /// Some operation will fail.
    pub fn problem(
        self,
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        self.found(Level::Problem, what, cost, remedy)
    }

    /// Something to fix, with this level.
    pub fn found(
        self,
        level: Level,
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        let (cost, remedy) = (Some(cost.into()), Some(remedy.into()));
        Finding { cost, remedy, ..self.plain(level, what) }
    }

    /// A file that the check could not read.
    pub fn unreadable(self, file: &Unreadable) -> Finding {
        let remedy =
            "run as root, or give the container /proc and /sys; if the content looks valid, please report it";
        self.warning(file.to_string(), "this check has no result", remedy)
    }

    fn plain(self, level: Level, what: impl Into<String>) -> Finding {
        Finding { check: self.0, level, what: what.into(), cost: None, remedy: None }
    }
}

/// The worst level of all findings, or `Ok` if there are none.
pub fn worst(findings: &[Finding]) -> Level {
    findings.iter().map(|finding| finding.level).fold(Level::Ok, Ord::max)
}

/// The first names, and the number of further ones.
pub fn abbreviated(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_decides() {
        let check = Check("memlock");
        let mut findings = vec![check.skipped("no card"), check.ok("unlimited")];
        assert_eq!(worst(&findings), Level::Ok);
        findings.push(check.problem("64 KiB", "little can be registered", "ulimit -l unlimited"));
        findings.push(check.warning("8 MiB", "little", "more"));
        assert_eq!(worst(&findings), Level::Problem);
        assert_eq!(worst(&[]), Level::Ok);
    }

    #[test]
    fn json_has_all_five() {
        let finding = Check("memlock").ok("unlimited");
        let row = serde_json::to_value(&finding).unwrap();
        let expected = serde_json::json!({
            "check": "memlock", "level": "ok", "what": "unlimited", "cost": null, "remedy": null
        });
        assert_eq!(row, expected);
        for level in [Level::Skipped, Level::Ok, Level::Warning, Level::Problem] {
            assert_eq!(serde_json::to_value(level).unwrap(), level.word());
        }
    }

    #[test]
    fn many_names_are_cut() {
        let names: Vec<String> = (0..6).map(|number| format!("mlx5_{number}")).collect();
        assert_eq!(abbreviated(&names), "mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 2 more");
        assert_eq!(abbreviated(&names[..1]), "mlx5_0");
    }
}

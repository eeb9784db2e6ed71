//! What a check found: how bad it is, what it costs, how to mend it.

use std::process::ExitCode;

use serde::Serialize;

use super::host::Unreadable;

/// What a check gives: what it found, or the file that kept it from telling.
pub type Checked = Result<Vec<Finding>, Unreadable>;

/// How bad it is; the worst of all decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// There is nothing here to check, or no way to.
    Skipped,
    /// As it should be.
    Ok,
    /// It works, slower or with less than there could be.
    Warning,
    /// Something will be refused.
    Problem,
}

impl Level {
    /// As `--json` has it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

impl From<Level> for ExitCode {
    fn from(level: Level) -> Self {
        match level {
            Level::Skipped | Level::Ok => Self::SUCCESS,
            Level::Warning => Self::from(1),
            Level::Problem => Self::from(2),
        }
    }
}

/// One row of the report.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// Which check; one check may have several findings.
    pub check: &'static str,
    pub level: Level,
    /// What was read; where skipped, why.
    pub what: String,
    /// What it costs the user.
    pub cost: Option<String>,
    /// How to mend it.
    pub remedy: Option<String>,
}

/// The name of a check, from which its findings are made.
#[derive(Clone, Copy)]
pub struct Check(pub &'static str);

impl Check {
    /// Nothing to mend.
    pub fn ok(self, what: impl Into<String>) -> Finding {
        self.plain(Level::Ok, what)
    }

    /// Nothing to check, and why.
    pub fn skipped(self, why: impl Into<String>) -> Finding {
        self.plain(Level::Skipped, why)
    }

    /// It could be better.
    pub fn warning(
        self,
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        self.found(Level::Warning, what, cost, remedy)
    }

    /// It stops something.
    pub fn problem(
        self,
        what: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        self.found(Level::Problem, what, cost, remedy)
    }

    /// Something to mend, as bad as `level`.
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

    /// A file that kept the check from telling.
    pub fn unreadable(self, file: &Unreadable) -> Finding {
        let remedy = "run as root, or give the container /proc and /sys; a strange content is worth a report";
        self.warning(file.to_string(), "this check cannot tell", remedy)
    }

    fn plain(self, level: Level, what: impl Into<String>) -> Finding {
        Finding { check: self.0, level, what: what.into(), cost: None, remedy: None }
    }
}

/// The worst of them; `Ok` if there are none.
pub fn worst(findings: &[Finding]) -> Level {
    findings.iter().map(|finding| finding.level).fold(Level::Ok, Ord::max)
}

/// The first of many names, and how many more there are.
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

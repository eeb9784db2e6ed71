//! `multirail doctor`: checks this host for settings that slow or stop transfers.

mod cgroup;
mod cores;
mod devices;
mod finding;
mod gpu;
mod host;
mod kernel;
mod libraries;
mod limits;
mod nixl;
mod pages;
mod pci;
mod peer;

use multirail::{BackendChoice, Registry};

use super::failure::{CommandFailure, CommandResult};
use super::output::TextTable;
use super::{Common, output};
use finding::{Check, CheckResult, worst};
use host::ExaminedHost;

pub use finding::{Finding, Level};
pub use gpu::GpuRegistration;
use libraries::LibraryReport;

/// The exit codes, for `--help`.
const EXIT: &str = "Exit code: 0 if nothing needs to be fixed, 1 if the worst finding is a warning, 2 if it is a \
    problem or the command failed.";

#[derive(clap::Args)]
#[command(after_help = EXIT)]
pub struct DoctorArguments {
    /// Also connect to this peer's control port over TCP, for at most 3 s per address
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
}

/// A check of files and limits.
type CheckFn = fn(Check, &ExaminedHost) -> CheckResult;

/// The checks in the order of the report. Backends, libraries and the peer come after them.
const CHECKS: [(&str, CheckFn); 20] = [
    ("kernel", kernel::age),
    ("cores", cores::cores),
    ("cgroup cpu", cgroup::time),
    ("cgroup memory", cgroup::memory),
    ("cgroup pids", cgroup::threads),
    ("memlock", limits::memlock),
    ("open files", limits::files),
    ("/dev/shm", limits::shm),
    ("huge pages", pages::huge),
    ("transparent huge pages", pages::transparent),
    ("ptrace", kernel::yama),
    ("iommu", kernel::iommu),
    ("acs", pci::acs),
    ("rdma devices", devices::cards),
    ("ports", devices::ports),
    ("uverbs", devices::uverbs),
    ("nvidia driver", gpu::driver),
    ("dma-buf", gpu::dma_buf),
    ("nvidia_peermem", gpu::peermem),
    ("libcuda", gpu::libcuda),
];

/// The ways to register GPU memory with a card on this host.
pub fn gpu_registration() -> GpuRegistration {
    GpuRegistration::of(&ExaminedHost::here())
}

/// The findings of all checks of this host.
pub fn findings(common: &Common) -> CommandResult<Vec<Finding>> {
    examine(common, &DoctorArguments { peer: None })
}

/// Runs the checks and prints the findings. The worst level is the exit code.
pub fn run(common: &Common, arguments: &DoctorArguments) -> u8 {
    let done = examine(common, arguments).and_then(|findings| match print(common, &findings) {
        // The user may still need the exit code after the reader of the output is gone.
        Ok(()) | Err(CommandFailure::ClosedPipe) => Ok(worst(&findings)),
        Err(failure) => Err(failure),
    });
    match done {
        Ok(worst) => worst.exit_code(),
        Err(failure) => {
            output::print_error(failure.message());
            Level::Problem.exit_code()
        }
    }
}

fn examine(common: &Common, arguments: &DoctorArguments) -> CommandResult<Vec<Finding>> {
    common.check_security()?;
    let (registry, choice) = (common.registry()?, common.choice()?);
    let mut found = match cfg!(target_os = "linux") {
        true => of_host(&ExaminedHost::here(), &registry, &choice),
        false => vec![Check("host").skipped("the checks read /proc and /sys, which exist on Linux only")],
    };
    if let (BackendChoice::Auto, Err(failure)) = (&choice, common.require_requested(&registry)) {
        let cost = "commands with these options fail";
        let fix = "fix what the finding names, or remove --provider, --domains and --node";
        found.push(Check("backends").problem(failure.message(), cost, fix));
    }
    found.extend(nixl::plugin(Check("nixl")));
    found.extend(arguments.peer.iter().map(|peer| peer::reach(Check("peer"), peer)));
    Ok(found)
}

fn of_host(host: &ExaminedHost, registry: &Registry, choice: &BackendChoice) -> Vec<Finding> {
    let checks = CHECKS.into_iter().map(|(name, run)| (Check(name), run));
    let mut found: Vec<_> =
        checks.flat_map(|(check, run)| with_unreadable(check, run(check, host))).collect();
    // Probing opens the libraries and their dependencies, so the process's maps are read after it.
    found.extend(libraries::backends(Check("backends"), host, registry, choice));
    let check = Check("libraries");
    found.extend(with_unreadable(check, libraries::libraries(check, host, choice, &LibraryReport::all())));
    found
}

/// Turns a file that could not be read into a finding.
fn with_unreadable(check: Check, checked: CheckResult) -> Vec<Finding> {
    checked.unwrap_or_else(|file| vec![check.unreadable(&file)])
}

fn print(common: &Common, findings: &[Finding]) -> CommandResult {
    if common.json {
        return findings.iter().try_for_each(output::json);
    }
    let mut table = TextTable::named_by(2).text("check").text("level").text("found").text("cost").text("fix");
    findings.iter().for_each(|finding| table.row(cells(finding)));
    table.print()?;
    output::line(&summary(findings))
}

fn cells(finding: &Finding) -> Vec<String> {
    vec![
        finding.check.to_owned(),
        finding.level.word().to_owned(),
        finding.what.clone(),
        finding.cost.clone().unwrap_or_default(),
        finding.remedy.clone().unwrap_or_default(),
    ]
}

fn summary(findings: &[Finding]) -> String {
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let [problems, warnings, fine, skipped] =
        [Level::Problem, Level::Warning, Level::Ok, Level::Skipped].map(count);
    format!("problems: {problems}, warnings: {warnings}, ok: {fine}, skipped: {skipped}")
}

#[cfg(test)]
mod tests {
    use super::host::fake::Fake;
    use super::*;

    #[test]
    fn every_check_has_a_finding_on_an_empty_host() {
        let choice = BackendChoice::Named("loopback".into());
        let found = of_host(&Fake::new(&[]), &Registry::standard(), &choice);
        for (name, _) in CHECKS {
            assert!(found.iter().any(|finding| finding.check == name), "{name}");
        }
        assert!(worst(&found) <= Level::Warning, "{found:?}");
    }

    #[test]
    fn every_warning_has_a_cost_and_a_fix() {
        let choice = BackendChoice::Named("carrier".into());
        let found = of_host(&Fake::new(&[]).card("mlx5_0"), &Registry::standard(), &choice);
        for finding in found.iter().filter(|finding| finding.level >= Level::Warning) {
            assert!(finding.cost.is_some() && finding.remedy.is_some(), "{finding:?}");
        }
        assert_eq!(worst(&found), Level::Problem);
        assert!(summary(&found).starts_with("problems: "));
    }

    #[test]
    fn a_directory_in_place_of_a_file_is_a_finding() {
        for (path, name) in [
            ("/proc/self/status", "cores"),
            ("/proc/self/cgroup", "cgroup cpu"),
            ("/proc/sys/kernel/osrelease", "kernel"),
            ("/proc/sys/kernel/yama/ptrace_scope", "ptrace"),
            ("/proc/driver/nvidia/version", "dma-buf"),
            ("/proc/cmdline", "iommu"),
        ] {
            let fake = Fake::new(&[]).with(&format!("{path}/below"), b"");
            let (_, run) = CHECKS.into_iter().find(|(known, _)| *known == name).expect("a check");
            let found = with_unreadable(Check(name), run(Check(name), &fake));
            assert!(found[0].level == Level::Warning && found[0].what.contains(path), "{found:?}");
        }
    }
}

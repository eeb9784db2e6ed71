//! Programs in C, the upper limits of ours.

use std::path::PathBuf;
use std::process::Command;

use crate::BenchResult;

/// Compiles `benches/NAME.c` beside the running program; `library` is what it links with, of the
/// Debian package `package`.
pub fn compile(name: &str, library: &str, package: &str) -> BenchResult<PathBuf> {
    let source = format!("{}/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let stem = name.rsplit('/').next().unwrap_or(name);
    let program = std::env::current_exe()?.with_file_name(stem);
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O2", "-o"]).arg(&program).args([&source, &format!("-l{library}")]);
    let advice = format!("install a C compiler and headers (Debian: gcc, {package})");
    match cc.status() {
        Ok(status) if status.success() => Ok(program),
        Ok(status) => Err(format!("cc ends with {status}: {advice}").into()),
        Err(why) => Err(format!("cc does not start ({why}): {advice}").into()),
    }
}

//! libfabric's own loop, `benches/libfabric/writes.c`.

use std::path::PathBuf;
use std::process::Command;

use crate::Done;
use crate::ours::Load;

/// The compiled program.
pub struct Writes(PathBuf);

impl Writes {
    /// Compiles it beside this program.
    pub fn compile() -> Done<Self> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/libfabric/writes.c");
        let program = std::env::current_exe()?.with_file_name("writes");
        let mut cc = Command::new("cc");
        let cc = cc.args(["-std=c11", "-O2", "-o"]).arg(&program).args([source, "-lfabric"]).status();
        let advice = "install a C compiler and libfabric's headers (Debian: gcc, libfabric-dev)";
        match cc {
            Ok(status) if status.success() => Ok(Self(program)),
            Ok(status) => Err(format!("cc ends with {status}: {advice}").into()),
            Err(why) => Err(format!("cc does not start ({why}): {advice}").into()),
        }
    }

    /// The program and its arguments for `load`: writes complete when they are delivered, as ours.
    pub fn command(&self, load: &Load) -> Command {
        let mut command = Command::new(&self.0);
        command.arg("--delivery").args(load.arguments());
        if let Some(node) = load.provider.node() {
            command.args(["--node", node]);
        }
        command
    }
}

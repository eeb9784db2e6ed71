//! libfabric's own loop, `benches/libfabric/writes.c`.

use std::path::PathBuf;
use std::process::Command;

use benches::BenchResult;
use benches::compiled::compile;

use crate::WriteLoop;

/// The compiled program.
pub struct Writes(PathBuf);

impl Writes {
    /// Compiles it beside this program.
    pub fn compile() -> BenchResult<Self> {
        compile("libfabric/writes", "fabric", "libfabric-dev").map(Self)
    }

    /// The program and its arguments for `load`: writes complete when they are delivered, as ours.
    pub fn command(&self, load: &WriteLoop) -> Command {
        let mut command = Command::new(&self.0);
        command.arg("--delivery").args(load.arguments());
        if let Some(node) = load.place.node() {
            command.args(["--node", node]);
        }
        command
    }
}

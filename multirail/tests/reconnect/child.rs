//! The peer's process: this test executable, started again. It publishes its regions and listens. Then it runs one
//! command per line, and responds with one line.
//!
//! | command | response |
//! |---|---|
//! | `wrong REGION SEED` | the number of bytes of region REGION that differ from the content of SEED |
//!
//! Region 0 is the page, 1 to 3 are the layers.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use multirail::{Access, Catalogue, Region, wait};

use crate::{LAYERS, LEN, LIMIT, PAGE, builder, content};

/// The environment variable that makes this executable the peer. Its value is the address to listen at.
const CHILD: &str = "MULTIRAIL_RECONNECT_CHILD";

/// The peer's process. Dropping it kills the process.
pub struct PeerProcess {
    child: Child,
    commands: ChildStdin,
    responses: Lines<BufReader<ChildStdout>>,
    /// The address of its listener.
    pub address: String,
}

impl PeerProcess {
    /// Starts the process. Once it is returned, the process listens.
    pub fn start(address: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "child::peer", "--nocapture"]).env(CHILD, address);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, responses) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let responses = BufReader::new(responses).lines();
        let mut peer = Self { child, commands, responses, address: String::new() };
        peer.address = peer.receive();
        peer
    }

    /// The number of wrong bytes of a region.
    pub fn wrong(&mut self, region: usize, seed: u8) -> usize {
        writeln!(self.commands, "wrong {region} {seed}").unwrap();
        self.receive().parse().unwrap()
    }

    /// Kills the process. Returns the address that it listened at.
    pub fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::take(&mut self.address)
    }

    fn receive(&mut self) -> String {
        let mut said = self.responses.by_ref().map(Result::unwrap);
        // libtest writes to the same pipe.
        let said = said.find_map(|line| line.strip_prefix('@').map(str::to_owned));
        said.expect("the peer sent no response; see its panic above")
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the process of the peer"]
fn peer() {
    let Ok(address) = std::env::var(CHILD) else { return };
    let fabric = builder().open().unwrap();
    let regions: Vec<Region> = (0..4).map(|_| fabric.alloc(LEN, Access::all()).unwrap()).collect();
    fabric.publish(PAGE, &regions[0]).unwrap();
    Catalogue::new(regions[1..].to_vec()).unwrap().publish(&fabric, LAYERS).unwrap();
    let listener = wait(fabric.listen(&address), LIMIT).unwrap().unwrap();
    // libtest has begun a line, so the address needs a new one.
    println!("\n@{}", listener.local_addr());
    let _peer = wait(listener.accept(), LIMIT).unwrap().unwrap();
    for command in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<_> = command.split(' ').collect();
        let (region, seed) = (words[1].parse::<usize>().unwrap(), words[2].parse().unwrap());
        let mut actual = vec![0; LEN];
        regions[region].copy_out(0, &mut actual).unwrap();
        let wrong =
            actual.iter().zip(content(seed, LEN)).filter(|(actual, wanted)| *actual != wanted).count();
        println!("@{wrong}");
    }
}

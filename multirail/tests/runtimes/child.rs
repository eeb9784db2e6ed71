//! The other process: this test executable, started again as the peer. It runs one command per
//! line and responds with one line.
//!
//! | command | effect |
//! |---|---|
//! | `fill SEED` | gives its page new content |
//! | `wrong-bytes` | responds with the number of bytes of its page that differ from that |
//! | `expect IMM SEED` | waits for an imm; then its page has the content of SEED |
//! | `flood NAME SEED` | floods the region NAME of the test until it is revoked and no operation is outstanding |
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use multirail::{Access, Fabric, Peer, wait};

use crate::flood::flood;
use crate::{LIMIT, TestDevices, TestPage, differing, limited};

/// The environment variable that makes this executable the peer. Its value is the seed.
const CHILD: &str = "MULTIRAIL_RUNTIMES_CHILD";

/// The regions that the peer publishes.
pub const PAGE: &str = "page";
pub const PROBE: &str = "probe";

/// The other process. Dropping it kills the process.
pub struct PeerProcess {
    child: Child,
    commands: ChildStdin,
    responses: Lines<BufReader<ChildStdout>>,
    /// The address of its listener.
    pub address: String,
}

impl PeerProcess {
    /// Starts the process.
    pub fn start(seed: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "child::peer", "--nocapture"]).env(CHILD, seed.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, responses) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut other =
            Self { child, commands, responses: BufReader::new(responses).lines(), address: String::new() };
        other.address = other.receive();
        other
    }

    /// Sends a command.
    pub fn send(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// The next response.
    pub fn receive(&mut self) -> String {
        let mut said = self.responses.by_ref().map(Result::unwrap);
        // libtest writes to the same pipe.
        let said = said.find_map(|line| line.strip_prefix('@').map(str::to_owned));
        said.expect("the peer sent no response; see its panic above")
    }

    /// Sends a command and waits for its response.
    pub fn request(&mut self, command: &str) -> String {
        self.send(command);
        self.receive()
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the other process of the tests that need one"]
fn peer() {
    let Ok(seed) = std::env::var(CHILD) else { return };
    let seed = seed.parse().unwrap();
    let fabric = TestDevices::Late.open(seed).unwrap();
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    // libtest has begun a line, so the address needs a new one.
    println!("\n@{}", listener.local_addr());
    let peer = wait(listener.accept(), LIMIT).unwrap().unwrap();
    let mut page = TestPage::new(&fabric, Access::all(), seed).unwrap();
    let probe = fabric.alloc(64, Access::all()).unwrap();
    fabric.publish(PAGE, &page.region).unwrap();
    fabric.publish(PROBE, &probe).unwrap();
    for command in std::io::stdin().lock().lines().map_while(Result::ok) {
        println!("@{}", run_command(&fabric, &peer, &mut page, &command));
    }
}

fn run_command(fabric: &Fabric, peer: &Peer, page: &mut TestPage, command: &str) -> String {
    let words: Vec<_> = command.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    match words[0] {
        "fill" => page.fill(number(1)).unwrap(),
        "wrong-bytes" => return page.wrong_bytes().to_string(),
        "expect" => {
            let imm = u32::try_from(number(1)).unwrap();
            peer.imm(imm).expect(1).wait(LIMIT).unwrap();
            assert_eq!(differing(&page.region, number(2)), 0);
        }
        "flood" => {
            let flooding = async {
                let (src, to) =
                    (TestPage::new(fabric, Access::LOCAL, number(2))?, peer.region(words[1]).await?);
                flood(peer, &src.region, &to, number(2)).await
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(limited(flooding)).unwrap();
        }
        _ => panic!("unknown command {command:?}"),
    }
    "done".into()
}

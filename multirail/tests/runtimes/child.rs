//! The other process: this test executable, started again as the peer. It obeys one
//! order per line and answers with one.
//!
//! | order | what it does |
//! |---|---|
//! | `fill SEED` | gives its page new content |
//! | `strays` | says how many bytes of its page differ from that |
//! | `expect IMM SEED` | waits for an imm; then its page has the content of SEED |
//! | `flood NAME SEED` | floods our region NAME until it is revoked and nothing is under way |
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use multirail::{Access, Fabric, Peer, wait};

use crate::device::{Device, LIMIT, limited};
use crate::flood::flood;
use crate::page::{Page, differing};

/// Tells this test executable that it is the peer, and its seed.
const CHILD: &str = "MULTIRAIL_RUNTIMES_CHILD";

/// The regions that the peer publishes.
pub const PAGE: &str = "page";
pub const PROBE: &str = "probe";

/// The other process; killed when dropped.
pub struct Other {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// Where it listens.
    pub address: String,
}

impl Other {
    /// Starts one.
    pub fn start(seed: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "child::peer", "--nocapture"]).env(CHILD, seed.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut other =
            Self { child, orders, answers: BufReader::new(answers).lines(), address: String::new() };
        other.address = other.hear();
        other
    }

    /// Gives an order.
    pub fn tell(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// The answer to the oldest order without one.
    pub fn hear(&mut self) -> String {
        let mut said = self.answers.by_ref().map(Result::unwrap);
        // Libtest writes to the same pipe.
        let said = said.find_map(|line| line.strip_prefix('@').map(str::to_owned));
        said.expect("the peer said nothing; see its panic above")
    }

    /// Gives an order and waits for the answer.
    pub fn ask(&mut self, order: &str) -> String {
        self.tell(order);
        self.hear()
    }
}

impl Drop for Other {
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
    let fabric = Device::Late.open(seed).unwrap();
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    // On a line of its own: libtest has begun one.
    println!("\n@{}", listener.local_addr());
    let peer = wait(listener.accept(), LIMIT).unwrap().unwrap();
    let mut page = Page::new(&fabric, Access::all(), seed).unwrap();
    let probe = fabric.alloc(64, Access::all()).unwrap();
    fabric.publish(PAGE, &page.region).unwrap();
    fabric.publish(PROBE, &probe).unwrap();
    for order in std::io::stdin().lock().lines().map_while(Result::ok) {
        println!("@{}", obey(&fabric, &peer, &mut page, &order));
    }
}

fn obey(fabric: &Fabric, peer: &Peer, page: &mut Page, order: &str) -> String {
    let words: Vec<_> = order.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    match words[0] {
        "fill" => page.fill(number(1)).unwrap(),
        "strays" => return page.strays().to_string(),
        "expect" => {
            let imm = u32::try_from(number(1)).unwrap();
            peer.imm(imm).expect(1).wait(LIMIT).unwrap();
            assert_eq!(differing(&page.region, number(2)), 0);
        }
        "flood" => {
            let flooding = async {
                let (src, to) = (Page::new(fabric, Access::LOCAL, number(2))?, peer.region(words[1]).await?);
                flood(peer, &src.region, &to, number(2)).await
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(limited(flooding)).unwrap();
        }
        _ => panic!("{order:?} is no order"),
    }
    "done".into()
}

//! A process of the fleet: this test executable, started again. It publishes a page, listens, joins, and says so. It
//! ends at the end of its input; the line `leave` lets it leave the directory first.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use multirail::{Access, Peer, wait};
use multirail_discovery::{Member, open};

use crate::{LEASE, LEN, LIMIT, PAGE, builder};

/// The environment variables that make this executable a member.
const URL: &str = "FLEET_MEMBER_URL";
const NAME: &str = "FLEET_MEMBER_NAME";

/// A member's process. Dropping it kills the process.
pub struct MemberProcess {
    child: Child,
    commands: ChildStdin,
    responses: Lines<BufReader<ChildStdout>>,
    pub name: String,
}

impl MemberProcess {
    /// Starts the process. [`joined`](Self::joined) waits for it.
    pub fn start(url: &str, name: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "member::member", "--nocapture"]).env(URL, url).env(NAME, name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, responses) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, commands, responses: BufReader::new(responses).lines(), name: name.to_owned() }
    }

    /// Waits until the process has joined. Returns when that was, and the incarnation.
    pub fn joined(&mut self) -> (SystemTime, u64) {
        let said = self.receive();
        let (nanos, incarnation) = said.split_once(' ').expect("a time and an incarnation");
        (UNIX_EPOCH + Duration::from_nanos(nanos.parse().unwrap()), incarnation.parse().unwrap())
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets the process leave the directory and end.
    pub fn leave(&mut self) {
        writeln!(self.commands, "leave").unwrap();
        self.receive();
        self.child.wait().unwrap();
    }

    fn receive(&mut self) -> String {
        let mut said = self.responses.by_ref().map(Result::unwrap);
        // libtest writes to the same pipe.
        let said = said.find_map(|line| line.split_once('@').map(|(_, said)| said.to_owned()));
        said.expect("the member sent no response; see its panic above")
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{what}").unwrap();
    out.flush().unwrap();
}

#[test]
#[ignore = "the process of a member, which the other tests start"]
fn member() {
    let (Ok(url), Ok(name)) = (std::env::var(URL), std::env::var(NAME)) else { return };
    let fabric = builder().open().unwrap();
    fabric.publish(PAGE, &fabric.alloc(LEN, Access::all()).unwrap()).unwrap();
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    let member =
        Member::new(&name, fabric.incarnation()).address(listener.local_addr()).attribute("role", "test");
    std::thread::spawn(move || {
        let mut peers: Vec<Peer> = Vec::new();
        while let Ok(peer) = pollster::block_on(listener.accept()) {
            peers.push(peer);
        }
    });
    let directory = open(&url).unwrap();
    let membership = wait(directory.join(member, LEASE), LIMIT).unwrap().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    say(format_args!("{now} {}", fabric.incarnation()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    if line == "leave\n" {
        wait(membership.leave(), LIMIT).unwrap().unwrap();
        say(format_args!("left"));
    }
    // As killed: nothing is dropped.
    std::process::exit(0);
}

//! The other process: gets commands over a pipe, and is killed in the end.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use multirail_spi::{ErrorKind, HostBuffer, *};

use crate::common::*;

/// Tells this test executable that it is the peer.
pub const CHILD: &str = "MULTIRAIL_LOOPBACK_CHILD";

/// Memory without a file, which another process reaches only through the kernel.
pub fn private(len: usize) -> Arc<HostBuffer> {
    Arc::new(HostBuffer::private(len).unwrap())
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|n| u8::from_str_radix(&text[2 * n..2 * n + 2], 16).unwrap()).collect()
}

pub fn parse_key(words: &[u64]) -> RemoteKey {
    RemoteKey { base: 0, key: words[0], len: words[1] }
}

pub struct ChildPeer {
    pub child: Child,
    pub input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    pub slot: PeerSlot,
    pub shared: RemoteKey,
    pub foreign: RemoteKey,
}

impl ChildPeer {
    /// Starts this test executable as `role`.
    pub fn command(role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "peer", "--nocapture"]).env(CHILD, role);
        command
    }

    pub fn start(a: &TestNode) -> Self {
        let mut command = Self::command("1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let none = RemoteKey { base: 0, key: 0, len: 0 };
        let output = BufReader::new(output).lines();
        let (slot, offer) = a.domain.connector().prepare().unwrap();
        let mut peer = Self { child, input, output, slot, shared: none, foreign: none };
        let theirs = unhex(&peer.receive());
        a.domain.connector().complete(slot, &theirs).unwrap();
        // An offer admits once.
        let (other, _) = a.domain.connector().prepare().unwrap();
        let again = a.domain.connector().complete(other, &theirs);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::Unreachable);
        let keys = peer.ask(&hex(&offer));
        let keys: Vec<u64> = keys.split(' ').map(|word| word.parse().unwrap()).collect();
        (peer.shared, peer.foreign) = (parse_key(&keys), parse_key(&keys[2..]));
        peer
    }

    pub fn ask(&mut self, text: &str) -> String {
        writeln!(self.input, "{text}").unwrap();
        self.receive()
    }

    pub fn receive(&mut self) -> String {
        let mut said =
            self.output.by_ref().map(Result::unwrap).filter_map(|line| Some(line.strip_prefix('@')?.into()));
        said.next().expect("the peer said nothing; see its panic above")
    }
}

impl Drop for ChildPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

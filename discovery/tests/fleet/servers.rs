//! The real servers of directories.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::LIMIT;

/// A server, and how to take it away for a time.
pub struct Server {
    kind: Kind,
    program: String,
    address: SocketAddr,
    child: Child,
    folder: tempfile::TempDir,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Stopped and continued: it answers nothing meanwhile, and its leases end when it goes on.
    Etcd,
    /// Killed and started anew: it comes back without the members.
    Redis,
}

impl Server {
    pub fn etcd() -> Option<Self> {
        Self::of(Kind::Etcd, "FLEET_ETCD")
    }

    pub fn redis() -> Option<Self> {
        Self::of(Kind::Redis, "FLEET_REDIS")
    }

    fn of(kind: Kind, variable: &str) -> Option<Self> {
        let Ok(program) = std::env::var(variable) else {
            println!("skipped: {variable} names no server; ci/discovery runs this");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let address = free_address();
        let child = start(kind, &program, address, &folder);
        Some(Self { kind, program, address, child, folder })
    }

    pub fn url(&self) -> String {
        match self.kind {
            Kind::Etcd => format!("etcd://{}/test/fleet", self.address),
            Kind::Redis => format!("redis://{}/0/test/fleet", self.address),
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes the server away.
    pub fn stop(&mut self) {
        match self.kind {
            Kind::Etcd => self.signal(Signal::STOP),
            Kind::Redis => {
                self.child.kill().unwrap();
                self.child.wait().unwrap();
            }
        }
    }

    /// Brings the server back.
    pub fn go_on(&mut self) {
        match self.kind {
            Kind::Etcd => self.signal(Signal::CONT),
            Kind::Redis => self.child = start(self.kind, &self.program, self.address, &self.folder),
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server, and waits until it accepts connections.
fn start(kind: Kind, program: &str, address: SocketAddr, folder: &tempfile::TempDir) -> Child {
    let mut command = Command::new(program);
    let folder = folder.path().display();
    match kind {
        Kind::Etcd => {
            let (client, peer) = (format!("http://{address}"), format!("http://{}", free_address()));
            command
                .arg(format!("--data-dir={folder}/etcd"))
                .arg("--log-level=error")
                .arg("--unsafe-no-fsync");
            command
                .arg(format!("--listen-client-urls={client}"))
                .arg(format!("--advertise-client-urls={client}"));
            command
                .arg(format!("--listen-peer-urls={peer}"))
                .arg(format!("--initial-advertise-peer-urls={peer}"));
            command.arg(format!("--initial-cluster=default={peer}"));
        }
        Kind::Redis => {
            command.args([
                "--save",
                "",
                "--appendonly",
                "no",
                "--bind",
                &address.ip().to_string(),
                "--loglevel",
                "warning",
            ]);
            command.args(["--port", &address.port().to_string(), "--dir", &folder.to_string()]);
        }
    }
    // etcd says much, whatever its level.
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the server starts");
    let accepts = || TcpStream::connect(address).ok();
    limit::Limit::of(LIMIT).ask(accepts).expect("the server accepts connections");
    child
}

/// An address that stays free until a server has it, and while it is away.
fn free_address() -> SocketAddr {
    TcpListener::bind(limit::own_address()).unwrap().local_addr().unwrap()
}

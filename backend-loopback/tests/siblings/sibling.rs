//! The program of a child: it runs one command per line, with a fabric as users have it.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use multirail_loopback::Loopback;
use multirail_spi::{Access, Error, HostBuffer, Result};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use transport_core::{
    Fabric, FabricBuilder, Listener, Pages, Peer, Region, RemoteRegion, TransportConfig, WriteOptions,
};

/// Tells this test executable that it is a child, and its staging policy.
pub const STAGING: &str = "MULTIRAIL_SIBLING_STAGING";

const PAGE: usize = 4096;
/// More than a staging buffer holds.
const PAGES: u32 = 400;
const LEN: usize = PAGES as usize * PAGE;
const LIMIT: Duration = limit::HANG;

pub fn run() {
    let Ok(staging) = std::env::var(STAGING) else { return };
    let mut sibling = Sibling::default();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = match sibling.run_command(&staging, &line) {
            Ok(answer) => format!("ok {answer}"),
            Err(error) => format!("err {:?} {error}", error.kind()).replace('\n', " "),
        };
        println!("\n@{answer}");
        std::io::stdout().flush().unwrap();
    }
}

#[derive(Default)]
struct Sibling {
    fabric: Option<Fabric>,
    listener: Option<Listener>,
    peer: Option<Peer>,
    owned: HashMap<String, Region>,
    remotes: HashMap<String, RemoteRegion>,
}

impl Sibling {
    fn run_command(&mut self, staging: &str, line: &str) -> Result<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "hide" => set_dumpable_behavior(DumpableBehavior::NotDumpable).unwrap(),
            "filter" => filter(number(1) as u32),
            "open" => {
                let loopback = Loopback::new().staging(staging.parse()?);
                let transport = TransportConfig::new("loopback", Arc::new(loopback));
                self.fabric = Some(FabricBuilder::new().transport(transport).deadline(LIMIT).open()?);
            }
            "listen" => {
                let listener = pollster::block_on(self.fabric().listen("127.0.0.1:0"))?;
                return Ok(self.listener.insert(listener).local_addr());
            }
            "accept" => self.peer = Some(pollster::block_on(self.listener.as_ref().unwrap().accept())?),
            "connect" => self.peer = Some(pollster::block_on(self.fabric().connect(words[1]))?),
            "explain" => return Ok(self.peer().explain().replace('\n', " ")),
            "ended" => return Ok(pollster::block_on(self.peer().closed()).to_string()),
            "own" => {
                // Memory without a file, which another process reaches only through the kernel.
                let memory = Arc::new(HostBuffer::private(LEN)?);
                // SAFETY: nobody refers to the bytes.
                let region = unsafe { self.fabric().register(memory, Access::all()) }?;
                self.fabric().publish(words[1], &region)?;
                self.owned.insert(words[1].into(), region);
            }
            "fill" => self.owned[words[1]].copy_in(0, &content(number(2)))?,
            "check" => {
                let mut bytes = vec![0; LEN];
                self.owned[words[1]].copy_out(0, &mut bytes)?;
                assert!(bytes == content(number(2)), "{line}");
            }
            "revoke" => drop(self.owned[words[1]].revoke()?.wait(LIMIT)?),
            "import" => {
                let remote = pollster::block_on(self.peer().region(words[1]))?;
                let path = remote.path();
                self.remotes.insert(words[1].into(), remote);
                return Ok(path.into());
            }
            "expect" => self.peer().imm(number(1) as u32).expect(number(2)).wait(LIMIT)?,
            _ => return self.transfer(&words).map(|requests| requests.to_string()),
        }
        Ok(String::new())
    }

    fn transfer(&self, words: &[&str]) -> Result<u64> {
        let (region, remote, peer) = (&self.owned[words[1]], &self.remotes[words[2]], self.peer());
        let imm = || WriteOptions::new().imm(words.last().unwrap().parse().unwrap());
        let mut op = match words[0] {
            "write" => peer.write_with(region, 0..LEN, remote, 0, &imm())?,
            "read" => peer.read(region, 0..LEN, remote, 0)?,
            "beyond" => peer.write(region, 0..PAGE, remote, LEN - PAGE + 1)?,
            "pages" => {
                let all = || Pages::new((0..PAGES).collect::<Vec<_>>());
                let options = if words[3] == "last" { imm() } else { imm().per_wr() };
                peer.write_pages_with(region, all(), remote, all(), PAGE, &options)?
            }
            // Endless: the test kills this process.
            "hammer" => loop {
                peer.write_with(region, 0..LEN, remote, 0, &imm())?.wait(LIMIT)?;
            },
            other => panic!("{other:?} is no order"),
        };
        Ok(op.wait(LIMIT)?.work_requests.into())
    }

    fn fabric(&self) -> &Fabric {
        self.fabric.as_ref().unwrap()
    }

    fn peer(&self) -> &Peer {
        self.peer.as_ref().unwrap()
    }
}

fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Makes process_vm_readv and process_vm_writev fail with `errno`, in all threads.
fn filter(errno: u32) {
    let answer = libc::SECCOMP_RET_ERRNO | errno;
    let code = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let equal = |k: libc::c_long, jt: u8| libc::sock_filter {
        jt,
        ..code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k as u32)
    };
    let mut program = [
        // The call's number is the first word of `seccomp_data`.
        code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal(libc::SYS_process_vm_readv, 2),
        equal(libc::SYS_process_vm_writev, 1),
        code(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        code(libc::BPF_RET | libc::BPF_K, answer),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let (mode, all) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the kernel copies the program, which lives through the call.
    let installed = unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        libc::syscall(libc::SYS_seccomp, mode, all, &raw const program)
    };
    assert_eq!(installed, 0, "{}", Error::os("test", "installing a filter", std::io::Error::last_os_error()));
}

//! Regions of a process that may have few open files: small ones share files with others of their fabric.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::spi::HostSharing;
use multirail::{Access, Fabric, FabricBuilder, Region, Token, TransportConfig, wait};
use rustix::process::{Resource, Rlimit, setrlimit};

/// The limit of waits, also on a loaded machine.
const LIMIT: Duration = limit::HANG;
/// Tells this test executable that it is the other process, and the address to connect to.
const CHILD: &str = "MULTIRAIL_FEW_DESCRIPTORS_CHILD";
/// Descriptors of a child, and regions of the peer.
const DESCRIPTORS: u64 = 128;
const REGIONS: usize = 1000;
const LEN: usize = 5000;

fn builder() -> FabricBuilder {
    FabricBuilder::new().transport(TransportConfig::new("loopback", Arc::new(Loopback::new())))
}

fn is_portable() -> bool {
    let is_portable = HostSharing::of_this_process().unwrap().is_portable();
    if is_portable {
        println!("skipped: on the portable path each buffer has a file of its own");
    }
    is_portable
}

/// The ignored test `name` as another process.
fn child(name: &str, address: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", name, "--nocapture"]).env(CHILD, address);
    command
}

/// Returns true in a child, which then has few descriptors.
fn is_child() -> bool {
    let is_child = std::env::var_os(CHILD).is_some();
    if is_child {
        let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    is_child
}

fn content(number: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at * 7 + number * 13) as u8).collect()
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes).unwrap();
    bytes
}

/// The number of the file that is mapped where the region is.
fn file_of(region: &Region) -> u64 {
    let at = region.as_ptr() as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inode = maps.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let [from, to] = [from, to].map(|end| usize::from_str_radix(end, 16).unwrap());
        (from..to).contains(&at).then(|| words.nth(3).unwrap().parse().unwrap())
    });
    inode.expect("a region is mapped")
}

/// The peer: has more regions than descriptors. Lines on its input say which regions have the content of another one.
/// Once its input ends, the other process is gone.
#[test]
#[ignore = "the other process of the test below"]
fn peer() {
    if !is_child() {
        return;
    }
    let fabric = builder().open().unwrap();
    let regions: Vec<_> = (0..REGIONS).map(|_| fabric.alloc(LEN, Access::all()).unwrap()).collect();
    for (number, region) in regions.iter().enumerate() {
        region.copy_in(0, &content(number)).unwrap();
        fabric.publish(&number.to_string(), region).unwrap();
    }
    let file_of_next = || file_of(&fabric.alloc(LEN, Access::all()).unwrap());
    let peer = wait(fabric.connect(&std::env::var(CHILD).unwrap()), LIMIT).unwrap().unwrap();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let changed: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let expected = |number: usize| content(if changed.contains(&number) { number + 1 } else { number });
        let wrong = (0..REGIONS).filter(|number| bytes(&regions[*number]) != expected(*number)).count();
        assert_eq!(file_of_next(), file_of(&regions[REGIONS - 1]), "nobody has left");
        // Then the other process leaves.
        println!("\n@{wrong}");
    }
    wait(peer.closed(), LIMIT).unwrap();
    // The handle is told first.
    let start = std::time::Instant::now();
    while file_of_next() == file_of(&regions[REGIONS - 1]) {
        assert!(start.elapsed() < LIMIT, "the peer that left may have the file");
    }
    println!("\n@gone");
}

struct PeerProcess(Child);

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_peer_may_have_more_regions_than_descriptors() {
    if is_portable() {
        return;
    }
    let fabric = builder().open().unwrap();
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    let mut command = child("peer", &listener.local_addr());
    let mut process = PeerProcess(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let peer = wait(listener.accept(), LIMIT).unwrap().unwrap();
    let here = fabric.alloc(LEN, Access::LOCAL).unwrap();
    let changed = [0, 1, REGIONS / 2, REGIONS - 2, REGIONS - 1];
    for number in changed {
        let remote = wait(peer.region(&number.to_string()), LIMIT).unwrap().unwrap();
        peer.read(&here, 0..LEN, &remote, 0).unwrap().wait(LIMIT).unwrap();
        assert_eq!(bytes(&here), content(number));
        here.copy_in(0, &content(number + 1)).unwrap();
        peer.write(&here, 0..LEN, &remote, 0).unwrap().wait(LIMIT).unwrap();
        assert!(peer.write(&here, 0..2, &remote, LEN - 1).is_err(), "beyond the region");
    }
    let mut input = process.0.stdin.take().unwrap();
    writeln!(input, "{}", changed.map(|number| number.to_string()).join(" ")).unwrap();
    let said = BufReader::new(process.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut said = said.filter_map(|line| line.strip_prefix('@').map(str::to_owned));
    assert_eq!(said.next().unwrap(), "0");
    drop(input);
    peer.disconnect();
    assert_eq!(said.next().unwrap(), "gone");
}

#[test]
#[ignore = "the other process of the test below"]
fn fabrics_with_few_descriptors() {
    if !is_child() {
        return;
    }
    let [landlord, of_tenant] = ["landlord", "tenant"].map(|name| Token::new(name.repeat(5)).unwrap());
    let fabric = builder().token(landlord).open().unwrap();
    let tenant = fabric.tenant("tenant", of_tenant).unwrap();
    let other = builder().open().unwrap();
    let alloc = |fabric: &Fabric, access| fabric.alloc(LEN, access).unwrap();
    // Until the process is short of descriptors, each has a file of its own.
    let own: Vec<_> = (0..DESCRIPTORS / 4).map(|_| alloc(&fabric, Access::all())).collect();
    let mut files: Vec<_> = own.iter().map(file_of).collect();
    files.sort_unstable();
    files.dedup();
    assert_eq!(files.len(), own.len());
    let (first, second) = (alloc(&fabric, Access::all()), alloc(&fabric, Access::REMOTE_READ));
    assert_eq!(file_of(&first), file_of(&second));
    let hidden = [alloc(&fabric, Access::LOCAL), alloc(&tenant, Access::all()), alloc(&other, Access::all())];
    let mut files: Vec<_> = hidden.iter().chain([&first]).map(file_of).collect();
    files.sort_unstable();
    files.dedup();
    assert_eq!(files.len(), 4, "no file belongs to two fabrics, or to regions that peers may not reach");
    assert_eq!(file_of(&alloc(&fabric, Access::all())), file_of(&first));
    let (peer, _) = fabric.connect_local(&other).unwrap();
    assert_eq!(file_of(&alloc(&fabric, Access::all())), file_of(&first));
    peer.disconnect();
    assert_eq!(file_of(&alloc(&fabric, Access::all())), file_of(&first), "no other process has the file");
    println!("\n@apart");
}

#[test]
fn files_belong_to_one_fabric() {
    if is_portable() {
        return;
    }
    let output = child("fabrics_with_few_descriptors", "").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("@apart"), "{}: {said}", output.status);
}

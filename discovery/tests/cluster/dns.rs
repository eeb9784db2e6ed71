//! DNS, asked over UDP.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use multirail::ErrorKind;
use multirail_discovery::{Directory, Event, Member, open as open_url};

/// A name and a type (1 A, 28 AAAA, 33 SRV) with the data of its records.
type Zone = Arc<Mutex<BTreeMap<(String, u16), Vec<Vec<u8>>>>>;

fn wire(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

fn srv(port: u16, target: &str) -> Vec<u8> {
    let mut data = vec![0, 0, 0, 100];
    data.extend_from_slice(&port.to_be_bytes());
    data.extend(wire(target));
    data
}

/// A DNS server over UDP that knows one zone. NXDOMAIN for other names.
fn serve(zone: Zone) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let query = &buffer[..len];
            let (mut at, mut labels) = (12, Vec::new());
            while query[at] != 0 {
                let end = at + 1 + usize::from(query[at]);
                labels.push(String::from_utf8_lossy(&query[at + 1..end]).to_lowercase());
                at = end;
            }
            let kind = u16::from_be_bytes([query[at + 1], query[at + 2]]);
            let (name, question) = (labels.join("."), &query[12..at + 5]);
            let zone = zone.lock().unwrap();
            let records = zone.get(&(name.clone(), kind)).cloned().unwrap_or_default();
            let is_known = zone.keys().any(|(known, _)| *known == name);
            let mut answer = query[..2].to_vec();
            answer.extend_from_slice(&[0x85, if is_known { 0x80 } else { 0x83 }, 0, 1]);
            answer.extend_from_slice(&(records.len() as u16).to_be_bytes());
            answer.extend_from_slice(&[0; 4]);
            answer.extend_from_slice(question);
            for data in records {
                // The name of the question; its type; class IN; a TTL of 5 s.
                answer.extend_from_slice(&[0xc0, 12]);
                answer.extend_from_slice(&kind.to_be_bytes());
                answer.extend_from_slice(&[0, 1, 0, 0, 0, 5]);
                answer.extend_from_slice(&(data.len() as u16).to_be_bytes());
                answer.extend(data);
            }
            socket.send_to(&answer, from).unwrap();
        }
    });
    address
}

#[test]
fn services_are_listed() {
    let zone = Zone::default();
    let server = serve(Arc::clone(&zone));
    let service = "multirail.fleet.svc.cluster.local";
    let srv_name = format!("_multirail._tcp.{service}");
    let open = |name: &str| open_url(&format!("dns://{server}/{name}")).unwrap();
    let (by_srv, by_address) = (open(&format!("{srv_name}.")), open(&format!("{service}.:7411")));
    let members = |directory: &Arc<dyn Directory>| pollster::block_on(directory.members()).unwrap();
    assert!(members(&by_srv).is_empty() && members(&by_address).is_empty());
    {
        let mut zone = zone.lock().unwrap();
        let pod = |name: &str| format!("{name}.{service}");
        let targets =
            vec![srv(7411, &pod("a-0")), srv(7412, &pod("a-1")), srv(1, "other.host"), srv(1, &pod("gone"))];
        zone.insert((srv_name.clone(), 33), targets);
        zone.insert((pod("a-0"), 1), vec![vec![10, 0, 0, 7]]);
        zone.insert((pod("a-0"), 28), vec![[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7].to_vec()]);
        zone.insert((pod("a-1"), 1), vec![vec![10, 0, 0, 8]]);
        zone.insert(("other.host".to_owned(), 1), vec![vec![10, 0, 0, 9]]);
        zone.insert((service.to_owned(), 1), vec![vec![10, 0, 0, 8], vec![10, 0, 0, 7]]);
    }
    let listed = [
        Member::new("a-0", 0).address("10.0.0.7:7411").address("[fd00::7]:7411"),
        Member::new("a-1", 0).address("10.0.0.8:7412"),
        Member::new("other.host", 0).address("10.0.0.9:1"),
    ];
    assert_eq!(members(&by_srv), listed);
    let addresses = ["10.0.0.7", "10.0.0.8"].map(|ip| Member::new(ip, 0).address(format!("{ip}:7411")));
    assert_eq!(members(&by_address), addresses);
    let joined = pollster::block_on(by_srv.join(listed[0].clone(), Duration::from_secs(1)));
    assert_eq!(joined.err().unwrap().kind(), ErrorKind::Unsupported);
    // A member that is missing in an answer has left.
    let mut watch = by_address.watch();
    let mut next = || pollster::block_on(watch.next());
    assert!(matches!((next(), next(), next()), (Event::Joined(_), Event::Joined(_), Event::Synced)));
    zone.lock().unwrap().insert((service.to_owned(), 1), vec![vec![10, 0, 0, 8]]);
    assert!(matches!(next(), Event::Left(member) if member.name == "10.0.0.7"));
}

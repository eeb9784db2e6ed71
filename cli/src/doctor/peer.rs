//! A peer: whether its name resolves and its port answers.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::failure::printable;

use super::finding::{Check, Finding};

/// How long the name may take, and each address.
const LIMIT: Duration = Duration::from_secs(3);
/// Addresses that are tried of one name.
const TRIED: usize = 4;

/// Whether `peer`, a `HOST:PORT`, takes a connection.
pub fn reach(check: Check, peer: &str) -> Finding {
    let cost = "nothing can be moved to or from this peer";
    let name = printable(peer);
    let addresses = match resolve(peer) {
        Ok(addresses) => addresses,
        Err(error) => {
            let remedy = "give HOST:PORT, with a name that DNS or /etc/hosts knows";
            return check.problem(format!("{name} does not resolve: {error}"), cost, remedy);
        }
    };
    let mut last = None;
    for address in addresses.into_iter().take(TRIED) {
        match TcpStream::connect_timeout(&address, LIMIT) {
            Ok(stream) => {
                let from =
                    stream.local_addr().map_or(String::new(), |local| format!(", from {}", local.ip()));
                return check.ok(format!("{name} takes TCP connections at {address}{from}"));
            }
            Err(error) => last = Some((address, error.kind(), error)),
        }
    }
    match last {
        Some((address, kind, error)) => {
            let place = if address.to_string() == name { name } else { format!("{name} at {address}") };
            check.problem(format!("{place}: {}", value(kind, &error)), cost, remedy(kind))
        }
        None => check.problem(format!("{name} has no address"), cost, "mend its entry in DNS or /etc/hosts"),
    }
}

/// The resolver has limits of its own, which may be long: it is left behind after ours.
fn resolve(peer: &str) -> io::Result<Vec<SocketAddr>> {
    let (sender, receiver) = mpsc::channel();
    let peer = peer.to_owned();
    thread::Builder::new().spawn(move || {
        let _ = sender.send(peer.to_socket_addrs().map(Iterator::collect));
    })?;
    let late = || io::Error::new(ErrorKind::TimedOut, format!("no answer within {} s", LIMIT.as_secs()));
    receiver.recv_timeout(LIMIT).map_err(|_| late())?
}

fn value(kind: ErrorKind, error: &io::Error) -> String {
    match kind {
        ErrorKind::ConnectionRefused => "refused: nobody listens there".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => format!("no answer within {} s", LIMIT.as_secs()),
        _ => error.to_string(),
    }
}

fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ConnectionRefused => {
            "start it there, on an address that is not only 127.0.0.1: multirail serve --listen 0.0.0.0:PORT"
        }
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            "let TCP to this port through: the firewall, the security group (AWS: all traffic within the group)"
        }
        _ => "mend the route to that network",
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::finding::Level;
    use super::*;

    #[test]
    fn a_listener_is_reached_and_a_closed_port_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let peer = listener.local_addr().expect("its address").to_string();
        assert_eq!(reach(Check("peer"), &peer).level, Level::Ok);
        drop(listener);
        let refused = reach(Check("peer"), &peer);
        assert!(refused.level == Level::Problem && refused.what.contains("nobody listens"), "{refused:?}");
    }

    #[test]
    fn what_is_no_address_says_so() {
        for nonsense in ["", "nobody", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999", "\u{1b}[2J:1x"] {
            let found = reach(Check("peer"), nonsense);
            assert!(found.level == Level::Problem && found.what.contains("does not resolve"), "{found:?}");
            assert!(!found.what.contains('\u{1b}'));
        }
    }

    #[test]
    fn each_failure_has_its_remedy() {
        let error = || io::Error::from(ErrorKind::TimedOut);
        assert_eq!(value(ErrorKind::TimedOut, &error()), "no answer within 3 s");
        assert!(remedy(ErrorKind::TimedOut).contains("firewall"));
        assert!(remedy(ErrorKind::HostUnreachable).contains("route"));
    }
}

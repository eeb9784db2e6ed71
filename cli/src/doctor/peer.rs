//! A peer: whether its name resolves and its port accepts connections.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::failure::printable;

use super::finding::{Check, Finding};

/// The limit of resolving the name, and of connecting to each address.
const LIMIT: Duration = Duration::from_secs(3);
/// The number of addresses that are tried.
const MAX_ADDRESSES: usize = 4;

/// Checks whether `peer`, a `HOST:PORT`, accepts a connection.
pub fn reach(check: Check, peer: &str) -> Finding {
    let cost = "no transfer to or from this peer is possible";
    let name = printable(peer);
    let addresses = match resolve(peer) {
        Ok(addresses) => addresses,
        Err(error) => {
            let remedy = "give HOST:PORT, with a name in DNS or /etc/hosts";
            return check.problem(format!("{name} does not resolve: {error}"), cost, remedy);
        }
    };
    let mut last = None;
    for address in addresses.into_iter().take(MAX_ADDRESSES) {
        match TcpStream::connect_timeout(&address, LIMIT) {
            Ok(stream) => {
                let from =
                    stream.local_addr().map_or(String::new(), |local| format!(", from {}", local.ip()));
                return check.ok(format!("{name} accepts TCP connections at {address}{from}"));
            }
            Err(error) => last = Some((address, error.kind(), error)),
        }
    }
    match last {
        Some((address, kind, error)) => {
            let place = if address.to_string() == name { name } else { format!("{name} at {address}") };
            check.problem(format!("{place}: {}", value(kind, &error)), cost, remedy(kind))
        }
        None => check.problem(format!("{name} has no address"), cost, "fix its entry in DNS or /etc/hosts"),
    }
}

/// Resolves a name in another thread. The resolver's own limits may be long, so the thread is left behind after
/// [`LIMIT`].
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
        ErrorKind::ConnectionRefused => "connection refused: no program listens on this port".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => format!("no answer within {} s", LIMIT.as_secs()),
        _ => error.to_string(),
    }
}

fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ConnectionRefused => {
            "start the server on an address other than 127.0.0.1: multirail serve --listen 0.0.0.0:PORT"
        }
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            "allow TCP to this port in the firewall and the security group (AWS: all traffic within the group)"
        }
        _ => "fix the route to that network",
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
        // The connection holds its own port, so that no other program can listen on it.
        let connection = TcpStream::connect(&peer).expect("connect");
        let refused = reach(Check("peer"), &connection.local_addr().expect("its address").to_string());
        assert!(
            refused.level == Level::Problem && refused.what.contains("no program listens"),
            "{refused:?}"
        );
    }

    #[test]
    fn malformed_addresses_are_problems() {
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

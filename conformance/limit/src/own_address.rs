//! Addresses at which one test alone listens.

use std::sync::atomic::{AtomicU8, Ordering};

/// An address with port 0 at which nobody else listens: every address that begins with 127 is this machine's, and each
/// call has another one, also in other processes.
///
/// For a test that stops listening and listens again at the same port. Meanwhile, other programs might get the port of
/// 127.0.0.1, and a client that looks for its server might connect to itself from there.
pub fn own_address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    // Neither 0 nor 255, which mean a network and its broadcast.
    let last = NEXT.fetch_add(1, Ordering::Relaxed) % 254 + 1;
    format!("127.{high}.{low}.{last}:0")
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn each_is_another_address_of_this_machine() {
        let listeners = [(); 3].map(|()| TcpListener::bind(own_address()).unwrap());
        let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        assert!(addresses[0].ip() != addresses[1].ip() && addresses[1].ip() != addresses[2].ip());
        addresses.iter().for_each(|address| drop(TcpStream::connect(address).unwrap()));
    }
}

//! The addresses of this host.

use std::io::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::abi::MR_ERROR_IO;
use crate::failure::Failure;

/// The addresses of this host's interfaces that are up, those of IPv4 first. Link-local addresses are left out, because
/// another host cannot use them without the name of its interface. Loopback's are the last resort.
pub fn addresses() -> Result<Vec<IpAddr>, Failure> {
    let all = all()?;
    let (local, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(IpAddr::is_loopback);
    others.sort_by_key(IpAddr::is_ipv6);
    Ok(if others.is_empty() { local } else { others })
}

fn all() -> Result<Vec<IpAddr>, Failure> {
    let mut first = ptr::null_mut();
    // SAFETY: the system writes the start of a list.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        let why = format!("the system does not list its network interfaces: {}", Error::last_os_error());
        return Err(Failure::new(MR_ERROR_IO, why));
    }
    let mut found = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: an entry of the list, which lives until it is freed below.
        let entry = unsafe { &*at };
        if entry.ifa_flags & libc::IFF_UP as u32 != 0 && !entry.ifa_addr.is_null() {
            // SAFETY: the entry's address, of the family that it names.
            found.extend(unsafe { address(entry.ifa_addr) });
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list that the system has made; no entry is used later.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// # Safety
/// The pointer is that of an address of the family that it names.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every address begins with its family, and the family says which struct it is.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let address = ptr::read_unaligned(address.cast::<libc::sockaddr_in>());
                let address = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                (!address.is_link_local()).then_some(IpAddr::V4(address))
            }
            libc::AF_INET6 => {
                let address = ptr::read_unaligned(address.cast::<libc::sockaddr_in6>());
                let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                (!address.is_unicast_link_local()).then_some(IpAddr::V6(address))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_addresses() {
        let found = addresses().unwrap();
        assert!(!found.is_empty() && !found.iter().any(IpAddr::is_unspecified), "{found:?}");
        assert!(found.iter().all(IpAddr::is_loopback) || !found.iter().any(IpAddr::is_loopback), "{found:?}");
    }
}

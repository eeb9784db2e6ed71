//! The command line with which a sender connects to this server.

use std::net::SocketAddr;

use multirail::BackendChoice;

use crate::Common;
use crate::failure::CommandResult;

/// Options that have another value on each side, and the placeholders of their values.
const OWN: [(&str, &str); 3] =
    [("--node", "OWN-ADDRESS"), ("--tls-cert", "OWN-CERTIFICATE"), ("--tls-key", "OWN-KEY")];

/// Environment variables that replace an option on this host, but may be missing on the sender's host.
const VARIABLES: [(&str, &str); 3] = [
    ("--provider", "MULTIRAIL_EFA_PROVIDER"),
    ("--domains", "MULTIRAIL_EFA_DOMAINS"),
    ("--node", "MULTIRAIL_EFA_NODE"),
];

/// `multirail send PATH --to ADDRESS`, with the options that must be the same on both sides.
pub fn line(common: &Common, address: &str) -> CommandResult<String> {
    let security = common.security.arguments().into_iter();
    let given = common.provider.arguments().into_iter();
    let given = given.chain(security.map(|word| word.to_string_lossy().into_owned()));
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let backend = match common.choice()? {
        BackendChoice::Named(name) => Some(name),
        _ => None,
    };
    Ok(command_line(backend, given.collect(), variable, address, &host()))
}

fn command_line(
    backend: Option<String>,
    given: Vec<String>,
    variable: impl Fn(&str) -> Option<String>,
    address: &str,
    host: &str,
) -> String {
    let mut options: Vec<(String, String)> = Vec::new();
    options.extend(backend.map(|name| ("--backend".to_owned(), name)));
    let pairs = given.chunks(2).filter_map(|pair| Some((pair.first()?.clone(), pair.get(1)?.clone())));
    options.extend(pairs);
    for (option, name) in VARIABLES {
        if !options.iter().any(|(given, _)| given == option) {
            options.extend(variable(name).map(|value| (option.to_owned(), value)));
        }
    }
    let mut line = format!("multirail send PATH --to {}", reachable(address, host));
    for (option, value) in options {
        let own = OWN.iter().find(|(name, _)| *name == option).map(|(_, own)| (*own).to_owned());
        line += &format!(" {option} {}", own.unwrap_or_else(|| quoted(&value)));
    }
    line
}

/// An address that a sender can connect to: with this host's name if the server listens on all addresses.
fn reachable(address: &str, host: &str) -> String {
    match address.parse::<SocketAddr>() {
        Ok(listening) if listening.ip().is_unspecified() => format!("{host}:{}", listening.port()),
        _ => address.to_owned(),
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(backend: Option<&str>, given: &[&str], variables: &[(&str, &str)], address: &str) -> String {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let given = given.iter().map(|word| (*word).to_owned()).collect();
        command_line(backend.map(str::to_owned), given, variable, address, "here")
    }

    #[test]
    fn a_sender_gets_the_options_of_the_server() {
        let address = "127.0.0.1:7411";
        assert_eq!(line(None, &[], &[], address), "multirail send PATH --to 127.0.0.1:7411");
        assert_eq!(
            line(Some("efa"), &["--provider", "tcp", "--domains", "4"], &[], address),
            "multirail send PATH --to 127.0.0.1:7411 --backend efa --provider tcp --domains 4"
        );
        assert_eq!(
            line(None, &["--token-file", "/a b/it's"], &[], address),
            r"multirail send PATH --to 127.0.0.1:7411 --token-file '/a b/it'\''s'"
        );
        let all = line(
            Some("efa"),
            &["--node", "10.0.0.1", "--tls-cert", "a.pem", "--tls-key", "a.key", "--tls-ca", "ca.pem"],
            &[("MULTIRAIL_EFA_PROVIDER", "tcp"), ("MULTIRAIL_EFA_NODE", "10.0.0.9")],
            "10.0.0.1:7411",
        );
        assert_eq!(
            all,
            "multirail send PATH --to 10.0.0.1:7411 --backend efa --node OWN-ADDRESS --tls-cert OWN-CERTIFICATE \
             --tls-key OWN-KEY --tls-ca ca.pem --provider tcp"
        );
    }

    #[test]
    fn an_address_of_all_interfaces_becomes_the_name_of_the_host() {
        assert_eq!(line(None, &[], &[], "0.0.0.0:7411"), "multirail send PATH --to here:7411");
        assert_eq!(line(None, &[], &[], "[::]:7411"), "multirail send PATH --to here:7411");
        assert_eq!(line(None, &[], &[], "[::1]:7411"), "multirail send PATH --to [::1]:7411");
    }
}

//! The options of `mr_fabric_open`.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use multirail::topology::Address;
use multirail::{FabricBuilder, PathPolicy, Pinning, TlsBootstrap, Token, Workers};

use crate::backends;
use crate::failure::Failure;

/// Every key, in the order of the header.
pub const KEYS: [&str; 29] = [
    "transports",
    "devices",
    "provider",
    "node",
    "domains",
    "queue_pairs",
    "gid_index",
    "traffic_class",
    "service_level",
    "staging",
    "rail_groups",
    "gpus",
    "token",
    "token_file",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "listen",
    "advertise",
    "notifications",
    "path_policy",
    "deadline_ms",
    "heartbeat_ms",
    "peer_timeout_ms",
    "handshake_ms",
    "max_operations",
    "threads",
    "pinning",
    "stall_after_ms",
];

/// Options, each with a known key, and each key once.
#[derive(Debug)]
pub struct Settings<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Settings<'a> {
    pub fn new(options: Vec<(&'a str, &'a str)>) -> Result<Self, Failure> {
        for (at, (key, _)) in options.iter().enumerate() {
            if !KEYS.contains(key) {
                let why = format!("there is no option {key:?}; the options are {}", KEYS.join(", "));
                return Err(Failure::invalid(why));
            }
            if options[..at].iter().any(|(earlier, _)| earlier == key) {
                return Err(Failure::invalid(format!("the option {key:?} is given twice")));
            }
        }
        Ok(Self(options))
    }

    /// The value of an option.
    pub fn text(&self, key: &'static str) -> Option<&'a str> {
        self.0.iter().find(|(given, _)| *given == key).map(|(_, value)| value.trim())
    }

    /// An option that is a list with commas.
    pub fn list(&self, key: &'static str) -> Result<Option<Vec<&'a str>>, Failure> {
        let Some(text) = self.text(key) else { return Ok(None) };
        let entries: Vec<&str> = text.split(',').map(str::trim).collect();
        match entries.iter().any(|entry| entry.is_empty()) {
            true => Err(wrong(key, text, "an entry is empty; separate the entries by single commas")),
            false => Ok(Some(entries)),
        }
    }

    /// An option that is a number.
    pub fn number<T>(&self, key: &'static str, allowed: RangeInclusive<T>) -> Result<Option<T>, Failure>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some(text) = self.text(key) else { return Ok(None) };
        match text.parse().ok().filter(|number| allowed.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let why = format!("give a number, {} to {}", allowed.start(), allowed.end());
                Err(wrong(key, text, &why))
            }
        }
    }

    /// An option that the library parses.
    pub fn parsed<T>(&self, key: &'static str) -> Result<Option<T>, Failure>
    where
        T: FromStr<Err: Display>,
    {
        let parse = |text: &str| text.parse::<T>().map_err(|why| wrong(key, text, &why.to_string()));
        self.text(key).map(parse).transpose()
    }

    fn span(&self, key: &'static str) -> Result<Option<Duration>, Failure> {
        Ok(self.number(key, 1..=u64::from(u32::MAX))?.map(Duration::from_millis))
    }

    /// The settings for a fabric to be opened.
    pub fn builder(&self) -> Result<FabricBuilder, Failure> {
        let mut builder = backends::builder(self)?;
        if let Some(groups) = self.parsed("rail_groups")? {
            builder = builder.rail_groups(groups);
        }
        if let Some(gpus) = self.list("gpus")? {
            let address =
                |text: &&str| text.parse::<Address>().map_err(|why| wrong("gpus", text, &why.to_string()));
            builder = builder.gpus(gpus.iter().map(address).collect::<Result<_, _>>()?);
        }
        if let Some(token) = self.token()? {
            builder = builder.token(token);
        }
        if let Some(tls) = self.tls()? {
            builder = builder.bootstrap(Arc::new(tls));
        }
        if let Some(memory) = self.number("notifications", 0..=usize::MAX)?.filter(|bytes| *bytes > 0) {
            builder = builder.notifications(memory);
        }
        if let Some(paths) = self.parsed("path_policy")? {
            builder = builder.path_policy(PathPolicy::only(paths));
        }
        if let Some(span) = self.span("deadline_ms")? {
            builder = builder.deadline(span);
        }
        if let Some(span) = self.span("heartbeat_ms")? {
            builder = builder.heartbeat(span);
        }
        if let Some(span) = self.span("peer_timeout_ms")? {
            builder = builder.peer_timeout(span);
        }
        if let Some(span) = self.span("handshake_ms")? {
            builder = builder.handshake_limit(span);
        }
        if let Some(span) = self.span("stall_after_ms")? {
            builder = builder.stall_after(span);
        }
        if let Some(operations) = self.number("max_operations", 1..=1 << 24)? {
            builder = builder.max_operations(operations);
        }
        if let Some(workers) = self.workers()? {
            builder = builder.workers(workers);
        }
        Ok(builder)
    }

    fn token(&self) -> Result<Option<Token>, Failure> {
        match (self.text("token"), self.text("token_file")) {
            (None, None) => Ok(None),
            (Some(bytes), None) => Ok(Some(Token::new(bytes)?)),
            (None, Some(path)) => Ok(Some(Token::from_file(path)?)),
            (Some(_), Some(_)) => {
                Err(Failure::invalid("token and token_file are both given; give one of them"))
            }
        }
    }

    fn tls(&self) -> Result<Option<TlsBootstrap>, Failure> {
        match ["tls_cert", "tls_key", "tls_ca"].map(|key| self.text(key)) {
            [None, None, None] => Ok(None),
            [Some(certificates), Some(key), Some(roots)] => {
                Ok(Some(TlsBootstrap::from_files(certificates, key, roots)?))
            }
            _ => Err(Failure::invalid(
                "of tls_cert, tls_key and tls_ca some are missing; give all three, or none",
            )),
        }
    }

    fn workers(&self) -> Result<Option<Workers>, Failure> {
        let threads = self.number("threads", 1..=1024)?;
        let pinning = match self.text("pinning") {
            None => None,
            Some("near") => Some(Pinning::Near),
            Some("off") => Some(Pinning::Off),
            Some(text) => {
                let cpus = text.split(',').map(|cpu| cpu.trim().parse().ok()).collect::<Option<Vec<usize>>>();
                let why = "give near, off, or the numbers of CPUs with commas";
                Some(Pinning::Cores(cpus.ok_or_else(|| wrong("pinning", text, why))?))
            }
        };
        if threads.is_none() && pinning.is_none() {
            return Ok(None);
        }
        let workers = threads.map_or_else(Workers::per_group, Workers::at_most);
        Ok(Some(match pinning {
            Some(pinning) => workers.pinning(pinning),
            None => workers,
        }))
    }
}

/// The error for a value that an option cannot have.
#[cold]
pub fn wrong(key: &str, text: &str, why: &str) -> Failure {
    Failure::invalid(format!("the option {key} is {text:?}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::MR_ERROR_INVALID_REQUEST;

    fn refused(options: &[(&'static str, &'static str)]) -> String {
        let settings = Settings::new(options.to_vec());
        let failure = settings.and_then(|settings| settings.builder().map(drop)).expect_err("refused");
        assert_eq!(failure.status(), MR_ERROR_INVALID_REQUEST, "{failure:?}");
        format!("{failure:?}")
    }

    #[test]
    fn wrong_options_are_named() {
        let unknown = refused(&[("backend", "efa")]);
        assert!(unknown.contains("backend") && KEYS.iter().all(|key| unknown.contains(key)), "{unknown}");
        assert!(refused(&[("listen", "a"), ("listen", "b")]).contains("twice"));
        let wrong = [
            ("deadline_ms", "0"),
            ("deadline_ms", "1 s"),
            ("domains", "65"),
            ("queue_pairs", "17"),
            ("gid_index", "256"),
            ("service_level", "8"),
            ("staging", "perhaps"),
            ("path_policy", "nvlink"),
            ("gpus", "gpu0"),
            ("pinning", "1,x"),
            ("rail_groups", "a,,b"),
            ("max_operations", "0"),
            ("token", "short"),
            ("tls_cert", "/none"),
            ("devices", "none-such"),
            ("devices", "lo0,,"),
            ("transports", "loopback,loopback"),
        ];
        for (key, value) in wrong {
            let why = match key {
                "devices" | "transports" => refused(&[(key, value)]),
                _ => refused(&[("transports", "loopback"), (key, value)]),
            };
            assert!(why.contains(key), "{key}={value}: {why}");
        }
    }

    #[test]
    fn options_open_a_fabric() {
        let options = [
            ("transports", "loopback"),
            ("devices", "lo0"),
            ("token", "0123456789abcdef"),
            ("notifications", "4194304"),
            ("path_policy", "memory-copy,gpu-copy"),
            ("deadline_ms", "5000"),
            ("threads", "1"),
            ("pinning", "off"),
        ];
        let fabric = Settings::new(options.to_vec()).unwrap().builder().unwrap().open().unwrap();
        let transports = fabric.transports();
        assert_eq!(transports.len(), 1);
        let devices: Vec<&str> = transports[0].devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!((transports[0].backend, &devices[..]), ("loopback", &["lo0"][..]));
        assert!(fabric.notifications().is_ok());
    }
}

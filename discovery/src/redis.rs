//! Members as keys that expire in Redis or Valkey.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;
use multirail::{Error, ErrorKind, Result};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError, Script, ScriptInvocation, aio::PubSubStream};

use crate::url::without_secrets;
use crate::{Changes, Claim, Lease, Listing, REQUEST_LIMIT, Renewal, Store};

/// How often a watch lists the members: Redis does not tell that a key has expired, unless it is set up to.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The prefix of a URL without one.
const DEFAULT_PREFIX: &str = "multirail";

/// Lists the members, and removes names from the set whose keys have expired. Returns three texts for each: the name,
/// the record, and the error if the key is something else's.
const LIST: &str = "
local list = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.pcall('GET', KEYS[1] .. '//' .. name)
  if type(record) == 'table' then
    list[#list + 1] = name
    list[#list + 1] = ''
    list[#list + 1] = record.err
  elseif record then
    list[#list + 1] = name
    list[#list + 1] = record
    list[#list + 1] = ''
  else
    redis.call('SREM', KEYS[1], name)
  end
end
return list";

/// Writes a record. Returns 0 if it must not replace another.
const CLAIM: &str = "
if ARGV[4] == 'restore' then
  local found = redis.pcall('GET', KEYS[2])
  if found and found ~= ARGV[2] then return 0 end
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1";

/// Renews a record. Returns 0 if there is none, 2 if it is another's.
const RENEW: &str = "
local found = redis.pcall('GET', KEYS[2])
if not found then return 0 end
if found ~= ARGV[2] then return 2 end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
return 1";

/// Removes a record, if it is not another's.
const RELEASE: &str = "
if redis.pcall('GET', KEYS[2]) == ARGV[2] then
  redis.call('DEL', KEYS[2])
  redis.call('SREM', KEYS[1], ARGV[1])
  redis.call('PUBLISH', KEYS[1], ARGV[1])
end
return 1";

/// Members as keys in Redis 5 or later, or Valkey: the key is the prefix, `//` and the name, the value is JSON, and it
/// expires with the lease. A set with the prefix as its key has the names, and a channel of the same name tells of
/// joins and leaves. A prefix has no `//`: no key is a member of one directory and belongs to another.
pub struct RedisStore {
    url: String,
    redis: Arc<Redis>,
}

/// The server, and what is known of it.
struct Redis {
    client: Client,
    prefix: String,
    connection: Mutex<Connection>,
}

/// The connection that all requests share.
#[derive(Default)]
struct Connection {
    open: Option<MultiplexedConnection>,
    /// The number of the connection.
    number: u64,
}

/// A request that is not answered. Lets the next connect again, when it fails or is dropped: a limit of time drops it,
/// and a mute server gives no other sign.
struct Unanswered<'a> {
    redis: &'a Redis,
    connection: u64,
    is_answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let mut connection = self.redis.connection();
        if !self.is_answered && connection.number == self.connection {
            connection.open = None;
        }
    }
}

impl RedisStore {
    /// `place` is `[USER:PASSWORD@]HOST:PORT[/DATABASE][/PREFIX]`.
    ///
    /// # Errors
    /// `InvalidRequest` if it is not.
    pub fn new(place: &str) -> Result<Self> {
        let (server, path) = place.split_once('/').unwrap_or((place, ""));
        let (first, rest) = path.split_once('/').unwrap_or((path, ""));
        let (database, prefix) = match first.parse::<u32>() {
            Ok(database) => (database, rest),
            Err(_) => (0, path),
        };
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { DEFAULT_PREFIX } else { prefix };
        if prefix.contains("//") || path.contains('@') {
            let shown = without_secrets(place);
            let why = format!(
                "{shown:?} is no directory in Redis: its prefix must contain neither // nor @; write %2F and %40 in a password"
            );
            return Err(Error::new(ErrorKind::InvalidRequest, "open a directory", why));
        }
        let public = without_secrets(server);
        // The error's text may have the password.
        let client = Client::open(format!("redis://{server}/{database}")).map_err(|_| {
            let why = format!("{public:?} is no address of Redis: write HOST:PORT");
            Error::new(ErrorKind::InvalidRequest, "open a directory", why)
        })?;
        let redis = Redis { client, prefix: prefix.to_owned(), connection: Mutex::default() };
        Ok(Self { url: format!("redis://{public}/{database}/{prefix}"), redis: Arc::new(redis) })
    }
}

impl Redis {
    /// Runs a script of Redis, over the connection that all requests share.
    async fn run<T: redis::FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T> {
        let known = {
            let connection = self.connection();
            connection.open.clone().map(|open| (open, connection.number))
        };
        let (mut open, number) = match known {
            Some(known) => known,
            None => {
                let config = AsyncConnectionConfig::new().set_connection_timeout(Some(REQUEST_LIMIT));
                let config = config.set_response_timeout(Some(REQUEST_LIMIT));
                let new = self.client.get_multiplexed_async_connection_with_config(&config).await;
                let new = new.map_err(failed)?;
                let mut connection = self.connection();
                connection.number += 1;
                connection.open = Some(new.clone());
                (new, connection.number)
            }
        };
        let mut unanswered = Unanswered { redis: self, connection: number, is_answered: false };
        let answer = script.invoke_async(&mut open).await.map_err(failed)?;
        unanswered.is_answered = true;
        Ok(answer)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for RedisStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    async fn list(&self) -> Result<Listing> {
        let mut listing = Listing::default();
        let script = Script::new(LIST);
        let listed: Vec<Vec<u8>> = self.redis.run(script.prepare_invoke().key(&self.redis.prefix)).await?;
        for entry in listed.chunks_exact(3) {
            let (name, fault) = (String::from_utf8_lossy(&entry[0]), String::from_utf8_lossy(&entry[2]));
            match std::str::from_utf8(&entry[0]) {
                Ok(name) if fault.is_empty() => listing.add_record(name, &entry[1]),
                Ok(_) => listing.refuse(&name, format!("its key is no member's: {fault}")),
                Err(_) => listing.refuse(&name, "its name is no UTF-8".to_owned()),
            }
        }
        Ok(listing)
    }

    async fn changes(&self) -> Result<Box<dyn Changes>> {
        let mut subscriber = self.redis.client.get_async_pubsub().await.map_err(failed)?;
        subscriber.subscribe(&self.redis.prefix).await.map_err(failed)?;
        Ok(Box::new(Published(subscriber.into_on_message())))
    }

    async fn claim(
        &self,
        name: &str,
        record: &[u8],
        lease: Duration,
        claim: Claim,
    ) -> Result<Option<Box<dyn Lease>>> {
        let held = RedisLease {
            redis: Arc::clone(&self.redis),
            name: name.to_owned(),
            record: record.to_owned(),
            millis: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
        };
        let mode = match claim {
            Claim::Replace => "replace",
            Claim::Restore => "restore",
        };
        let is_ours = held.run(CLAIM, mode).await? == 1;
        Ok(is_ours.then(|| Box::new(held) as Box<dyn Lease>))
    }
}

/// Messages of the directory's channel.
struct Published(PubSubStream);

#[async_trait]
impl Changes for Published {
    async fn next(&mut self) -> Result<()> {
        match poll_fn(|context| Pin::new(&mut self.0).poll_next(context)).await {
            Some(_) => Ok(()),
            None => Err(Error::new(ErrorKind::Unreachable, "watch", "Redis has closed the connection")),
        }
    }
}

/// A member's key.
struct RedisLease {
    redis: Arc<Redis>,
    name: String,
    record: Vec<u8>,
    millis: u64,
}

impl RedisLease {
    async fn run(&self, script: &str, mode: &str) -> Result<i64> {
        let (prefix, script) = (&self.redis.prefix, Script::new(script));
        let mut call = script.key(prefix);
        call.key(format!("{prefix}//{}", self.name))
            .arg(&self.name)
            .arg(&self.record[..])
            .arg(self.millis)
            .arg(mode);
        self.redis.run(&call).await
    }
}

#[async_trait]
impl Lease for RedisLease {
    async fn renew(&mut self) -> Result<Renewal> {
        Ok(match self.run(RENEW, "").await? {
            1 => Renewal::Kept,
            2 => Renewal::Replaced,
            _ => Renewal::Expired,
        })
    }

    async fn release(&mut self) -> Result<()> {
        self.run(RELEASE, "").await.map(drop)
    }
}

fn failed(error: RedisError) -> Error {
    let kind = match error.kind() {
        redis::ErrorKind::AuthenticationFailed => ErrorKind::Permission,
        _ if error.is_timeout() => ErrorKind::DeadlineExceeded,
        redis::ErrorKind::Io => ErrorKind::Unreachable,
        _ => ErrorKind::Io,
    };
    Error::new(kind, "redis", "a request failed").with_source(error)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use tokio::time::timeout;

    use super::*;

    /// A server that lets clients connect, and answers nothing else: each request that is given up makes the next
    /// connect again.
    #[test]
    fn a_mute_connection_is_left() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = RedisStore::new(&listener.local_addr().unwrap().to_string()).unwrap();
        let accepting = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(len @ 1..) = stream.read(&mut bytes) {
                        let greetings = String::from_utf8_lossy(&bytes[..len]).matches("SETINFO").count();
                        stream.write_all("+OK\r\n".repeat(greetings).as_bytes()).unwrap();
                    }
                });
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for number in 1..=2 {
                timeout(Duration::from_millis(500), store.list()).await.unwrap_err();
                let connection = store.redis.connection();
                assert!(connection.number == number && connection.open.is_none(), "{}", connection.number);
            }
        });
        accepting.join().unwrap();
    }

    #[test]
    fn places_are_read() {
        for (place, url) in [
            ("h:1", "redis://h:1/0/multirail"),
            ("h:1/3", "redis://h:1/3/multirail"),
            ("h:1/3/a/b/", "redis://h:1/3/a/b"),
            ("h:1/a/b", "redis://h:1/0/a/b"),
            ("user:secret@[::1]:6379/fleet", "redis://[::1]:6379/0/fleet"),
        ] {
            assert_eq!(RedisStore::new(place).unwrap().url(), url);
        }
        assert_eq!(RedisStore::new("h:1/a//b").err().unwrap().kind(), ErrorKind::InvalidRequest);
        let error = RedisStore::new("user:secret@h:port/x").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

//! A small HTTP server with one page.

use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use transport_core::{Error, ErrorKind, Fabric, Result};

use super::page::MetricsPage;

/// The most bytes of a request's head.
const MAX_HEAD: usize = 8 << 10;
/// The most headers of a request.
const MAX_HEADERS: usize = 64;
/// How long a client may take to send its request, and again to read the answer. Other clients wait meanwhile.
const CLIENT_LIMIT: Duration = Duration::from_secs(1);
/// The pause after a failed accept, so that many of them cost little CPU time.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// How long dropping the server tries to reach it.
const WAKEUP_LIMIT: Duration = Duration::from_secs(1);
/// The version of Prometheus's text format.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves the metrics of one fabric at `http://ADDRESS/metrics`, in a thread of its own that sleeps between scrapes.
///
/// Everyone who reaches the address may read the metrics: counts, device names, and labels of transports, but addresses
/// of peers only with [`MetricsServer::start_with_peers`]. Listen on a loopback address or in a network that only the scraper reaches.
///
/// # Cleanup
/// Dropping the server closes the address and joins the thread. A client that is being served has a second each to send
/// and to read. The server does not keep the fabric open; without the fabric it answers 503.
pub struct MetricsServer {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Serves the metrics of `fabric` at `address`. Port 0 takes a free one.
    ///
    /// # Errors
    /// `InvalidRequest` if the address does not parse or resolve, `Busy` if it is in use, `Permission` or `Io` if the
    /// system refuses.
    pub fn start(fabric: &Fabric, address: impl ToSocketAddrs) -> Result<Self> {
        Self::start_with_peers(fabric, address, 0)
    }

    /// As [`MetricsServer::start`]. Up to `most_peers` connected peers, those with the most bytes, have metrics of their
    /// own, with their host names and addresses as labels: three series for each.
    ///
    /// # Errors
    /// Those of [`MetricsServer::start`].
    pub fn start_with_peers(fabric: &Fabric, address: impl ToSocketAddrs, most_peers: usize) -> Result<Self> {
        let addresses: Vec<_> = address.to_socket_addrs().map_err(unresolved)?.collect();
        let listener = TcpListener::bind(addresses.as_slice()).map_err(|error| refused(&addresses, error))?;
        let address = listener.local_addr().map_err(|error| refused(&addresses, error))?;
        let stopping = Arc::<AtomicBool>::default();
        let (page, flag) = (MetricsPage::new(fabric, most_peers), Arc::clone(&stopping));
        let thread = std::thread::Builder::new()
            .name("multirail-metrics".to_owned())
            .spawn(move || serve(&listener, &page, &flag))
            .map_err(|error| refused(&addresses, error))?;
        Ok(Self { address, stopping, thread: Some(thread) })
    }

    /// The address at which the server listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        let mut address = self.address;
        match address.ip() {
            ip if !ip.is_unspecified() => {}
            IpAddr::V4(_) => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(_) => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        }
        // The connection ends the thread's accept. Without it the thread cannot be joined, so it is left to the process.
        if TcpStream::connect_timeout(&address, WAKEUP_LIMIT).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn unresolved(error: io::Error) -> Error {
    let why = "this is no address; give a host and a port, such as 127.0.0.1:9469";
    Error::new(ErrorKind::InvalidRequest, "serve metrics", why).with_source(error)
}

fn refused(addresses: &[SocketAddr], error: io::Error) -> Error {
    let kind = match error.kind() {
        IoErrorKind::AddrInUse => ErrorKind::Busy,
        IoErrorKind::PermissionDenied => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    let address = addresses.first().map_or_else(|| "no address".to_owned(), SocketAddr::to_string);
    Error::new(kind, "serve metrics", format!("cannot listen on {address}: {error}")).with_source(error)
}

/// Answers one client after the other until `stopping`.
fn serve(listener: &TcpListener, page: &MetricsPage, stopping: &AtomicBool) {
    loop {
        let accepted = listener.accept();
        if stopping.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((client, _)) => {
                // A client that goes away, or is too slow, is no fault of the server.
                if let Err(error) = answer(client, page) {
                    tracing::debug!(%error, "a scrape failed");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the metrics server cannot accept a client; retrying");
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

fn answer(mut client: TcpStream, page: &MetricsPage) -> io::Result<()> {
    let (status, body, is_head) = match read_request(&mut client)? {
        Request::Scrape { is_head } => match page.render() {
            Some(text) => ("200 OK", text, is_head),
            None => ("503 Service Unavailable", "the fabric is closed\n".to_owned(), is_head),
        },
        Request::OtherPath => ("404 Not Found", "the metrics are at /metrics\n".to_owned(), false),
        Request::OtherMethod => ("405 Method Not Allowed", "only GET and HEAD\n".to_owned(), false),
        Request::Invalid => ("400 Bad Request", "no HTTP request\n".to_owned(), false),
    };
    let content_type = if status.starts_with("200") { CONTENT_TYPE } else { "text/plain; charset=utf-8" };
    let length = body.len();
    let mut bytes = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    if !is_head {
        bytes.push_str(&body);
    }
    write_all(&mut client, bytes.as_bytes())?;
    client.shutdown(Shutdown::Write)
}

/// What a client asks for.
enum Request {
    Scrape { is_head: bool },
    OtherPath,
    OtherMethod,
    Invalid,
}

/// Reads a request's head. A body is not read.
fn read_request(client: &mut TcpStream) -> io::Result<Request> {
    let deadline = Instant::now() + CLIENT_LIMIT;
    let (mut head, mut len) = ([0; MAX_HEAD], 0);
    while len < head.len() {
        client.set_read_timeout(Some(left(deadline)?))?;
        match client.read(&mut head[len..]) {
            Ok(0) => return Err(IoErrorKind::UnexpectedEof.into()),
            Ok(read) => len += read,
            Err(error) if error.kind() == IoErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&head[..len]) {
            Ok(status) if status.is_partial() => {}
            Ok(_) => return Ok(asked(request.method, request.path)),
            Err(_) => return Ok(Request::Invalid),
        }
    }
    Ok(Request::Invalid)
}

fn asked(method: Option<&str>, path: Option<&str>) -> Request {
    let path = path.and_then(|path| path.split('?').next());
    match (method, path) {
        (Some(method @ ("GET" | "HEAD")), Some("/metrics")) => Request::Scrape { is_head: method == "HEAD" },
        (Some("GET" | "HEAD"), _) => Request::OtherPath,
        _ => Request::OtherMethod,
    }
}

/// As `Write::write_all`, with a limit for all of it.
fn write_all(client: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_LIMIT;
    while !bytes.is_empty() {
        client.set_write_timeout(Some(left(deadline)?))?;
        match client.write(bytes) {
            Ok(0) => return Err(IoErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == IoErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time until `deadline`.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(IoErrorKind::TimedOut.into()) } else { Ok(left) }
}

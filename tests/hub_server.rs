//! A local hub for tests. It serves a few files and misbehaves on request.

use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request of a client.
#[derive(Clone, Debug, Default)]
pub struct ReceivedRequest {
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

/// A reply: a head without its last empty line, a body, and silence after it.
#[derive(Clone)]
pub struct Reply {
    pub head: String,
    pub body: Vec<u8>,
    pub silence: Duration,
    pub drip: Option<Drip>,
}

/// Bytes that are sent one by one, with a pause before each.
#[derive(Clone, Copy)]
pub enum Drip {
    All(Duration),
    Body(Duration),
}

/// A server that answers requests one after the other.
pub struct HubServer {
    pub address: SocketAddr,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<ReceivedRequest>>,
}

/// Files of `org/tiny`, and the hub's list of them.
pub struct HubRepo {
    files: Vec<(&'static str, Vec<u8>)>,
    pub listing: serde_json::Value,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self::ok(Vec::new()).with_head(&format!("HTTP/1.1 {status} X\r\nContent-Length: 0"))
    }

    pub fn ok(body: Vec<u8>) -> Self {
        Self { head: format!("HTTP/1.1 200 OK\r\nContent-Length: {}", body.len()), body, silence: Duration::ZERO, drip: None }
    }

    pub fn redirect(to: &str) -> Self {
        Self::status(302).with_head(&format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0"))
    }

    pub fn with_head(mut self, head: &str) -> Self {
        self.head = head.into();
        self
    }

    /// Sends the reply one byte at a time.
    pub fn dripping(self, drip: Drip) -> Self {
        Self { drip: Some(drip), ..self }
    }

    /// Truncates the body to `bytes`.
    pub fn cut(mut self, bytes: usize) -> Self {
        self.body.truncate(bytes);
        self
    }
}

impl HubServer {
    /// Starts a server. `answer` receives each request and the number of earlier requests.
    pub fn start(answer: impl Fn(&ReceivedRequest, usize) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, is_over) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let over = is_over.clone();
        let thread = thread::spawn(move || {
            let mut received = Vec::new();
            while !over.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => received.extend(serve(stream, |request| answer(request, received.len()))),
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
            received
        });
        Self { address, is_over, thread }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops the server and returns its requests.
    pub fn received(self) -> Vec<ReceivedRequest> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Serves one request and closes the connection.
fn serve(stream: TcpStream, answer: impl FnOnce(&ReceivedRequest) -> Reply) -> Option<ReceivedRequest> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let mut lines = BufReader::new(&stream).lines();
    let mut received = ReceivedRequest { path: lines.next()?.ok()?.split(' ').nth(1)?.into(), ..ReceivedRequest::default() };
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "authorization" => received.authorization = Some(value.into()),
            "range" => received.range = Some(value.into()),
            _ => {}
        }
    }
    let Reply { head, body, silence, drip } = answer(&received);
    let head = format!("{head}\r\nConnection: close\r\n\r\n").into_bytes();
    let (at_once, pause) = match drip {
        None => (head.len() + body.len(), Duration::ZERO),
        Some(Drip::All(pause)) => (0, pause),
        Some(Drip::Body(pause)) => (head.len(), pause),
    };
    let sent = [head, body].concat();
    // The client may have closed the connection.
    let _ = (&stream).write_all(&sent[..at_once]);
    if drip.is_some() || !silence.is_zero() {
        thread::spawn(move || {
            let mut one_by_one = sent[at_once..].iter();
            while one_by_one.next().is_some_and(|byte| {
                thread::sleep(pause);
                (&stream).write_all(&[*byte]).is_ok()
            }) {}
            thread::sleep(silence);
            drop(stream);
        });
    }
    Some(received)
}

impl HubRepo {
    /// A repository in which weights are large files (LFS) and all other files are in git.
    pub fn new(files: Vec<(&'static str, Vec<u8>)>) -> Self {
        let hex = |digest: &[u8]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let sibling = |(name, bytes): &(&str, Vec<u8>)| {
            let size = bytes.len();
            let git = hex(&Sha1::new_with_prefix(format!("blob {size}\0")).chain_update(bytes).finalize());
            match name.ends_with(".safetensors") {
                true => json!({"rfilename": name, "size": size, "lfs": {"sha256": hex(&Sha256::digest(bytes)), "size": size}}),
                false => json!({"rfilename": name, "size": size, "blobId": git}),
            }
        };
        let siblings: Vec<_> = files.iter().map(sibling).collect();
        Self { listing: json!({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}), files }
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        self.files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| bytes.as_slice()).unwrap()
    }

    /// The name of the file's blob, which is its checksum.
    pub fn blob(&self, name: &str) -> &str {
        let sibling = self.listing["siblings"].as_array().unwrap().iter().find(|sibling| sibling["rfilename"] == name).unwrap();
        sibling["lfs"]["sha256"].as_str().or(sibling["blobId"].as_str()).unwrap()
    }

    /// The correct reply of a hub.
    pub fn answer(&self, received: &ReceivedRequest) -> Reply {
        if received.path.starts_with("/api/models/org/tiny/revision/") {
            return Reply::ok(self.listing.to_string().into_bytes());
        }
        let name = received.path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/"));
        let Some((_, bytes)) = self.files.iter().find(|(file, _)| Some(*file) == name) else { return Reply::status(404) };
        let Some(range) = &received.range else { return Reply::ok(bytes.clone()) };
        let (from, last) = range.trim_start_matches("bytes=").split_once('-').unwrap();
        let (from, all): (usize, _) = (from.parse().unwrap(), bytes.len());
        let end = last.parse().map_or(all, |last: usize| last + 1);
        let rest = bytes[from..end].to_vec();
        let head = format!("HTTP/1.1 206 Partial\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{all}", rest.len(), end - 1);
        Reply::ok(rest).with_head(&head)
    }
}

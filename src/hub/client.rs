//! HTTP requests to the hub, with authentication and redirects.

use super::name::{HubName, RepoKind};
use super::roots::{TrustRoots, VARIABLES};
use crate::disk;
use crate::error::{Error, Result};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use ureq::http::Response;
use ureq::tls::TlsConfig;
use ureq::typestate::WithoutBody;
use ureq::{Agent, RequestBuilder};

const PUBLIC_HUB: &str = "https://huggingface.co";
const REDIRECTS_MAX: usize = 8;
/// Number of failed attempts in a row after which a download fails. A failed attempt with progress counts as the first one again.
pub(super) const ATTEMPTS: u32 = 5;
const TOKEN_BYTES_MAX: u64 = 4096;

/// Time limits of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitLimits {
    /// Limit for a pause in an answer, for connecting, and for the head of an answer.
    pub(super) silence: Duration,
    /// Limit for all redirects of a request, and for reading a whole file list.
    pub(super) answer: Duration,
    /// Interval in which a file has to grow by [`WaitLimits::WINDOW_BYTES`].
    pub(super) window: Duration,
}

impl WaitLimits {
    /// Minimum bytes of a file in each window: 0.5 KiB/s with [`WaitLimits::default`].
    pub(super) const WINDOW_BYTES: u64 = 64 << 10;
}

impl Default for WaitLimits {
    fn default() -> Self {
        let [silence, answer, window] = [10, 60, 120].map(Duration::from_secs);
        Self { silence, answer, window }
    }
}

pub(super) type HubAnswer = Response<ureq::Body>;

/// An HTTP client for one hub.
pub(super) struct HubClient {
    agent: Agent,
    /// Source of the trusted certificate authorities, for error messages.
    trusted: String,
    /// URL of the hub without a trailing slash.
    endpoint: String,
    token: Option<HubToken>,
    pub(super) patience: WaitLimits,
}

/// An access token. It implements neither `Debug` nor `Display`, so it cannot be logged.
struct HubToken(String);

/// A failed request.
#[derive(Debug)]
pub(super) enum HttpFailure {
    /// A retry may succeed.
    Passing(String),
    /// A retry will fail, too.
    Lasting(String),
}

impl HubClient {
    /// A client for the hub of `HF_ENDPOINT`, with the token of `HF_TOKEN` or of the token file.
    ///
    /// # Errors
    /// `Usage` for an endpoint that is no URL, and for a token with invalid characters; `Io` for the token file; errors of
    /// [`TrustRoots::of`].
    pub(super) fn of(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Self> {
        let text = |name| variable(name).and_then(|value| value.into_os_string().into_string().ok());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_HUB.into());
        Self::new(&endpoint, token(variable)?, TrustRoots::of(variable)?, WaitLimits::default())
    }

    pub(super) fn new(endpoint: &str, token: Option<String>, trusted: TrustRoots, patience: WaitLimits) -> Result<Self> {
        let endpoint = endpoint.trim_end_matches('/');
        if origin(endpoint).is_none() {
            return Err(Error::usage(format!("HF_ENDPOINT {endpoint}: expected an address such as {PUBLIC_HUB}")));
        }
        if token.as_ref().is_some_and(|token| token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(Error::usage("the Hugging Face token is empty or has invalid characters"));
        }
        let TrustRoots { roots, origin } = trusted;
        let silence = Some(patience.silence);
        let config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .http_status_as_error(false)
            // Redirects are followed in `follow`, so that the token is sent to the hub alone.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("superoffload/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(silence)
            .timeout_connect(silence)
            .timeout_send_request(silence)
            .timeout_recv_response(silence)
            .timeout_per_read(silence);
        let (agent, endpoint, token) = (config.build().new_agent(), endpoint.into(), token.map(HubToken));
        Ok(Self { agent, trusted: origin, endpoint, token, patience })
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Requests the bytes at `path` from byte `from` up to `end`, or to the end of the file. There is no time limit for the whole body.
    pub(super) fn get(&self, path: &str, from: u64, end: Option<u64>) -> std::result::Result<HubAnswer, HttpFailure> {
        self.follow(path, |url| self.request(url, from, end))
    }

    /// Reads at most `bytes_max` bytes at `path` within [`WaitLimits::answer`].
    pub(super) fn get_bytes(&self, path: &str, bytes_max: u64) -> std::result::Result<Vec<u8>, HttpFailure> {
        let until = Instant::now() + self.patience.answer;
        let limited = |url: &str| {
            let left = Some(until.saturating_duration_since(Instant::now()));
            self.request(url, 0, None).config().timeout_global(left).build()
        };
        let read = self.follow(path, limited)?.body_mut().with_config().limit(bytes_max).read_to_vec();
        read.map_err(|e| HttpFailure::Passing(e.to_string()))
    }

    /// Sends `request` to `path`, follows redirects, and returns the final answer.
    fn follow(&self, path: &str, request: impl Fn(&str) -> RequestBuilder<WithoutBody>) -> std::result::Result<HubAnswer, HttpFailure> {
        let (mut url, until) = (format!("{}{path}", self.endpoint), Instant::now() + self.patience.answer);
        for _ in 0..REDIRECTS_MAX {
            if Instant::now() >= until {
                return Err(HttpFailure::Passing(format!("redirections take longer than {:?}", self.patience.answer)));
            }
            let answer = request(&url).call().map_err(|e| self.failure(&url, &e))?;
            url = match answer.status().as_u16() {
                200 | 206 => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => next_url(&url, &answer).map_err(HttpFailure::Lasting)?,
                status => return Err(self.refusal(&url, status)),
            };
        }
        Err(HttpFailure::Lasting(format!("more than {REDIRECTS_MAX} redirections")))
    }

    fn request(&self, url: &str, from: u64, end: Option<u64>) -> RequestBuilder<WithoutBody> {
        let mut request = self.agent.get(url);
        if from > 0 || end.is_some() {
            let last = end.map_or(String::new(), |end| (end - 1).to_string());
            request = request.header("Range", format!("bytes={from}-{last}"));
        }
        if let Some(HubToken(token)) = self.token.as_ref().filter(|_| self.is_hub(url)) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        request
    }

    fn failure(&self, url: &str, e: &ureq::Error) -> HttpFailure {
        match e {
            // The error is not printed, because the URL may hold a signature.
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => HttpFailure::Lasting("redirected to an invalid address".into()),
            e if e.to_string().contains("invalid peer certificate") => HttpFailure::Lasting(self.distrust(url, e)),
            e => HttpFailure::Passing(e.to_string()),
        }
    }

    fn is_hub(&self, url: &str) -> bool {
        origin(url) == origin(&self.endpoint)
    }

    fn refusal(&self, url: &str, status: u16) -> HttpFailure {
        match status {
            // On another host, the signature of a redirect has expired: a retry gets a new one.
            401 | 403 if self.is_hub(url) => HttpFailure::Lasting(self.forbidden(status)),
            404 | 410 => HttpFailure::Lasting(format!("status {status}: no such repository, revision or file")),
            401 | 403 | 408 | 416 | 429 | 500.. => HttpFailure::Passing(format!("status {status}")),
            _ => HttpFailure::Lasting(format!("status {status}")),
        }
    }

    fn distrust(&self, url: &str, cause: &ureq::Error) -> String {
        let (host, trusted, [name, ..]) = (origin(url).unwrap_or_default(), &self.trusted, VARIABLES);
        let advice = "can name a file with your company's certificate authority";
        format!("{cause}: the certificate of {host} is not signed by an authority in {trusted}; {name} {advice}")
    }

    fn forbidden(&self, status: u16) -> String {
        let token = if self.token.is_some() { "the token that is set has no access" } else { "no token is set" };
        let advice = "check the name; if it is right, accept the licence on the page of the repository, then set HF_TOKEN";
        format!("status {status}, and {token}: {advice}")
    }
}

/// URL path of a repository's file list.
pub(super) fn listing_path(HubName { kind, repo, revision, .. }: &HubName) -> String {
    format!("/api/{}/{repo}/revision/{}?blobs=true", kind.plural(), escaped(revision))
}

/// URL path of a file in a repository at `commit`.
pub(super) fn file_path(HubName { kind, repo, .. }: &HubName, commit: &str, file: &str) -> String {
    let folder = if *kind == RepoKind::Model { "" } else { "/datasets" };
    let file: Vec<_> = file.split('/').map(escaped).collect();
    format!("{folder}/{repo}/resolve/{commit}/{}", file.join("/"))
}

fn escaped(text: &str) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(byte);
    text.bytes().map(|byte| if is_plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// Scheme, host and port of a URL; `None` if `url` is invalid.
fn origin(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://").filter(|(scheme, _)| ["http", "https"].contains(scheme))?;
    let host = rest.split(['/', '?', '#', '\\']).next().filter(|host| !host.is_empty())?;
    Some(format!("{scheme}://{}", host.to_ascii_lowercase()))
}

fn next_url(url: &str, answer: &HubAnswer) -> std::result::Result<String, String> {
    let location = answer.headers().get("Location").and_then(|location| location.to_str().ok()).unwrap_or_default();
    let origin_of_request = origin(url).unwrap_or_default();
    let next = match location {
        _ if location.starts_with("//") => format!("{}:{location}", origin_of_request.split(':').next().unwrap_or_default()),
        _ if location.starts_with('/') => format!("{origin_of_request}{location}"),
        _ => location.into(),
    };
    match origin(&next) {
        None => Err("redirected to an invalid address".into()),
        Some(location) if origin_of_request.starts_with("https:") && location.starts_with("http:") => {
            Err(format!("redirected to {location}, without encryption"))
        }
        Some(_) => Ok(next),
    }
}

fn token(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Option<String>> {
    let trimmed = |text: String| text.trim().to_string();
    if let Some(token) = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")) {
        return Ok(Some(trimmed(token.to_string_lossy().into())));
    }
    let file = variable("HF_TOKEN_PATH").or_else(|| super::cache::home_dir(variable).map(|home_dir| home_dir.join("token")));
    let Some(file) = file.filter(|file| file.exists()) else { return Ok(None) };
    disk::read_small_text(&file, TOKEN_BYTES_MAX).map(|text| Some(trimmed(text)))
}

//! Downloads from a hub on this machine that is slow, broken, forbidding or hostile.

#[expect(unreachable_pub, reason = "shared with the tests of the program")]
#[path = "../../tests/hub_server.rs"]
pub(super) mod hub_server;

use super::cache::HubCache;
use super::client::{HubClient, WaitLimits};
use super::download::Download;
use super::name::HubName;
use super::parts::LARGE_BYTES;
use super::roots::TrustRoots;
use crate::error::Result;
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use hub_server::{COMMIT, Drip, HubRepo, HubServer, ReceivedRequest, Reply};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

const WEIGHTS: &str = "model.safetensors";
const TOKEN: &str = "hf_secret";
const SILENCE_MAX: Duration = Duration::from_millis(200);
const ANSWER_MAX: Duration = Duration::from_millis(600);

fn repo() -> &'static HubRepo {
    static REPO: OnceLock<HubRepo> = OnceLock::new();
    REPO.get_or_init(new_repo)
}

fn new_repo() -> HubRepo {
    let weights = (0..900_000u32).map(|n| (n * 7 % 251) as u8).collect();
    let code = || b"print('hello')".to_vec();
    HubRepo::new(vec![
        ("config.json", b"{\"a\": 1}".to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("chat_template.jinja", b"{{ 1 }}".to_vec()),
        ("tokenizer_code.py", code()),
        ("modeling.py", code()),
        ("pytorch_model.bin", code()),
        ("onnx/model.onnx", code()),
        ("consolidated.safetensors", b"once more".to_vec()),
        (WEIGHTS, weights),
        ("additional_chat_templates/rag.jinja", b"{{ 2 }}".to_vec()),
        ("additional_chat_templates/notes.txt", code()),
    ])
}

struct Case {
    dir: tempfile::TempDir,
    stop: StopFlag,
    with_weights: bool,
    large_bytes: u64,
    patience: WaitLimits,
    name: HubName,
    notes: Mutex<String>,
    /// Progress: bytes done in the last report, the most bytes done in any report, and bytes in total.
    output: Mutex<[u64; 3]>,
}

impl Case {
    fn new() -> Self {
        let name = HubName::model("org/tiny@refs/pr/1").unwrap();
        Self {
            dir: tempfile::tempdir().unwrap(),
            stop: StopFlag::default(),
            with_weights: true,
            large_bytes: LARGE_BYTES,
            patience: WaitLimits { silence: SILENCE_MAX, answer: ANSWER_MAX, ..WaitLimits::default() },
            name,
            notes: Mutex::default(),
            output: Mutex::default(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("models--org--tiny").join(name)
    }

    fn partial(&self) -> PathBuf {
        self.path("blobs").join(format!("{}.incomplete", repo().blob(WEIGHTS)))
    }

    /// A case in which the weights are downloaded in parts.
    fn in_parts() -> Self {
        Self { large_bytes: 400_000, ..Self::new() }
    }

    /// Bytes on disk of each part of the weights.
    fn parts(&self) -> [u64; 4] {
        kept(&self.partial())
    }

    fn run(&self, endpoint: &str) -> Result<PathBuf> {
        let (cache, name) = (HubCache { root: self.dir.path().into() }, self.name.clone());
        let download = Download {
            cache: &cache,
            name: &name,
            with_weights: self.with_weights,
            stop: &self.stop,
            emit: &mut |event| match event {
                ProgressEvent::Note(line) => *self.notes.lock().unwrap() += &format!("{line}\n"),
                ProgressEvent::Progress { done, all, .. } => {
                    let mut output = self.output.lock().unwrap();
                    *output = [done, output[1].max(done), all];
                }
                ProgressEvent::Detail(_) | ProgressEvent::Warn(_) => {}
            },
            pause: Duration::from_millis(1),
            large_bytes: self.large_bytes,
        };
        download.run(HubClient::new(endpoint, Some(TOKEN.into()), TrustRoots::built_in(), self.patience)?)
    }

    /// Downloads from a hub with these answers, and expects success. Returns the requests for the weights.
    fn good(&self, answer: impl Fn(&ReceivedRequest, usize) -> Reply + Send + 'static) -> Vec<ReceivedRequest> {
        let server = HubServer::start(answer);
        let snapshot = self.run(&server.endpoint()).unwrap();
        assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), repo().bytes(WEIGHTS));
        assert_eq!(self.parts(), [0; 4]);
        let [last, most, all] = *self.output.lock().unwrap();
        assert!(last == all && most == all, "{last} and {most} of {all} bytes were told");
        server.received().into_iter().filter(|received| received.path.ends_with(WEIGHTS)).collect()
    }

    /// Returns the error of a download from a hub with these answers. Also checks that the cache has no complete model afterwards.
    fn refused(&self, answer: impl Fn(&ReceivedRequest, usize) -> Reply + Send + 'static) -> String {
        let server = HubServer::start(answer);
        let message = self.run(&server.endpoint()).unwrap_err().to_string();
        server.received();
        assert!(!message.contains(TOKEN) && !message.contains('\n'), "{message}");
        assert!(!self.path("snapshots").join(COMMIT).join("config.json").exists() && !self.path("refs").exists(), "{message}");
        assert!(!self.path("blobs").join(repo().blob(WEIGHTS)).exists(), "{message}");
        message
    }
}

/// A correct hub, except that `wrong` replaces answers for the weights.
fn but(
    wrong: impl Fn(&ReceivedRequest, Reply, usize) -> Reply + Send + 'static,
) -> impl Fn(&ReceivedRequest, usize) -> Reply + Send + 'static {
    move |received, before| {
        let reply = repo().answer(received);
        if received.path.ends_with(WEIGHTS) { wrong(received, reply, before) } else { reply }
    }
}

#[test]
fn downloaded_files_have_the_cache_layout_of_python() {
    let case = Case::new();
    let received = case.good(|received, _| repo().answer(received));
    assert_eq!((received.len(), received[0].authorization.as_deref()), (1, Some("Bearer hf_secret")));
    let snapshot = case.path("snapshots").join(COMMIT);
    let mut names: Vec<_> = fs::read_dir(&snapshot).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(fs::read_to_string(snapshot.join("additional_chat_templates/rag.jinja")).unwrap(), "{{ 2 }}");
    assert_eq!(names, ["additional_chat_templates", "chat_template.jinja", "config.json", WEIGHTS, "tokenizer.json"]);
    assert_eq!(fs::read_link(snapshot.join(WEIGHTS)).unwrap(), Path::new("../../blobs").join(repo().blob(WEIGHTS)));
    assert_eq!(fs::read_to_string(case.path("refs/refs/pr/1")).unwrap(), COMMIT);
    assert_eq!(crate::model_dir::ModelDir::open(&snapshot).unwrap().file(WEIGHTS).unwrap(), snapshot.join(WEIGHTS));
    assert_eq!(case.good(|received, _| repo().answer(received)).len(), 0, "what is here is not asked for again");
    let small = Case { with_weights: false, ..Case::new() };
    let server = HubServer::start(|received, _| repo().answer(received));
    assert!(!small.run(&server.endpoint()).unwrap().join(WEIGHTS).exists());
}

#[test]
fn a_broken_download_resumes_at_its_last_byte() {
    let received = Case::new().good(but(|received, reply, _| if received.range.is_none() { reply.cut(500_000) } else { reply }));
    assert_eq!(received.last().unwrap().range.as_deref(), Some("bytes=500000-"));
    // As many requests as needed.
    let received = Case::new().good(but(|_, reply, _| reply.cut(70_000)));
    assert_eq!(received.len(), 13);
    let case = Case::new();
    let message = case.refused(but(|received, reply, _| if received.range.is_none() { reply.cut(500_000) } else { Reply::status(500) }));
    assert!(message.contains("status 500, 5 times in a row; 500000 of 900000 bytes are kept for the next run"), "{message}");
    let received = case.good(|received, _| repo().answer(received));
    assert_eq!(received[0].range.as_deref(), Some("bytes=500000-"));
    let received = Case::new().good(but(|received, reply, _| match received.range {
        None => reply.cut(300_000),
        Some(_) => Reply::ok(repo().bytes(WEIGHTS).to_vec()),
    }));
    assert_eq!(received.len(), 2, "a hub that knows no ranges");
}

/// Bytes on disk of each part of the file `partial`.
fn kept(partial: &Path) -> [u64; 4] {
    let name = |part: u64| if part == 0 { partial.into() } else { partial.with_extension(format!("incomplete-{part}")) };
    [0, 1, 2, 3].map(|part| fs::metadata(name(part)).map_or(0, |file| file.len()))
}

/// The requested ranges, sorted.
fn ranges(received: &[ReceivedRequest]) -> Vec<&str> {
    let mut ranges: Vec<_> = received.iter().map(|received| received.range.as_deref().unwrap_or("all")).collect();
    ranges.sort();
    ranges
}

const QUARTERS: [&str; 4] = ["bytes=0-224999", "bytes=225000-449999", "bytes=450000-674999", "bytes=675000-"];

#[test]
fn a_large_file_comes_in_four_ranges() {
    let case = Case::in_parts();
    let received = case.good(|received, _| repo().answer(received));
    assert_eq!(ranges(&received), QUARTERS);
    assert!(!case.notes.lock().unwrap().contains("one stream"), "{}", case.notes.lock().unwrap());
    // Each part takes as many requests as needed.
    assert_eq!(Case::in_parts().good(but(|_, reply, _| reply.cut(70_000))).len(), 16);
    let just = Case { large_bytes: 900_001, ..Case::new() };
    assert_eq!(ranges(&just.good(|received, _| repo().answer(received))), ["all"]);
}

#[test]
fn a_download_in_ranges_continues_from_its_partial_file() {
    let case = Case::in_parts();
    let (partial, least) = (case.partial(), [100_000, 100_000, 100_000, 225_000]);
    // The first permanent failure of a range ends the download, so no range may fail before each part has its bytes. Until then a retry
    // delivers one byte.
    let have_all = move || kept(&partial).iter().zip(least).all(|(kept, least)| *kept >= least);
    let message = case.refused(but(move |received, reply, _| match received.range.as_deref() {
        Some("bytes=675000-") => reply,
        Some(range) if QUARTERS.contains(&range) => reply.cut(100_000),
        _ if have_all() => Reply::status(500),
        _ => reply.cut(1),
    }));
    let parts = case.parts();
    assert!(parts.iter().zip(least).all(|(kept, least)| *kept >= least) && parts[3] == 225_000, "{parts:?}");
    let output = |kept: &u64| message.contains(&format!("status 500, 5 times in a row; {kept} of 225000 bytes are kept for the next run"));
    assert!(parts[..3].iter().any(output), "{message}");
    let received = case.good(|received, _| repo().answer(received));
    let rest = |part: usize| format!("bytes={}-{}", 225_000 * part as u64 + parts[part], 225_000 * (part + 1) - 1);
    assert_eq!(ranges(&received), [0, 1, 2].map(rest));
}

#[test]
fn a_beginning_that_another_program_left_is_gone_on_with() {
    for (left, expected) in
        [(200_000, vec!["bytes=200000-224999", QUARTERS[1], QUARTERS[2], QUARTERS[3]]), (300_000, vec!["bytes=300000-"])]
    {
        let case = Case::in_parts();
        fs::create_dir_all(case.path("blobs")).unwrap();
        fs::write(case.partial(), &repo().bytes(WEIGHTS)[..left]).unwrap();
        assert_eq!(ranges(&case.good(|received, _| repo().answer(received))), expected);
    }
}

#[test]
fn a_hub_without_ranges_sends_a_large_file_as_one_with_a_message() {
    let whole = || Reply::ok(repo().bytes(WEIGHTS).to_vec());
    let case = Case::in_parts();
    case.good(but(move |_, _, _| whole()));
    assert!(
        case.notes.lock().unwrap().ends_with("model.safetensors is downloaded in one stream: the server does not support ranges\n"),
        "{}",
        case.notes.lock().unwrap()
    );
    // The hub stops supporting ranges midway, when other parts may be on disk already.
    for part in QUARTERS {
        let case = Case::in_parts();
        case.good(but(move |received, reply, _| if received.range.as_deref() == Some(part) { whole() } else { reply }));
        assert_eq!(case.notes.lock().unwrap().matches("in one stream").count(), 1);
    }
}

#[test]
fn ranges_that_lie_are_refused() {
    let lies = |lie: fn(Reply) -> Reply| {
        let case = Case::in_parts();
        let message =
            case.refused(but(move |received, reply, _| if received.range.as_deref() == Some(QUARTERS[2]) { lie(reply) } else { reply }));
        assert!(message.contains("download model.safetensors from http://127.0.0.1:"), "{message}");
        message
    };
    let other = |reply: Reply| reply.with_head("HTTP/1.1 206 P\r\nContent-Range: bytes 0-224999/900000");
    assert!(lies(other).contains("it answers \"bytes 0-224999/900000\" where \"bytes 450000-674999/900000\" was asked for"));
    let long =
        |reply: Reply| Reply { body: vec![1; 300_000], ..reply }.with_head("HTTP/1.1 206 P\r\nContent-Range: bytes 450000-674999/900000");
    assert!(lies(long).contains("it is longer than its 225000 bytes"));
    let length = |reply: Reply| reply.with_head("HTTP/1.1 206 P\r\nContent-Length: 9\r\nContent-Range: bytes 450000-674999/900000");
    assert!(lies(length).contains("9 bytes come, 225000 were expected"));
    let wrong = |mut reply: Reply| {
        reply.body[7] ^= 1;
        reply
    };
    assert!(lies(wrong).contains("its checksum is "));
    // A leftover part with wrong bytes: the file is downloaded again from the beginning.
    let case = Case::in_parts();
    fs::create_dir_all(case.path("blobs")).unwrap();
    fs::write(case.partial().with_extension("incomplete-2"), vec![0; 225_000]).unwrap();
    let received = case.good(|received, _| repo().answer(received));
    assert_eq!(ranges(&received), ["all", QUARTERS[0], QUARTERS[1], QUARTERS[3]]);
}

#[test]
fn a_partial_file_of_another_file_is_started_again() {
    for left in [b"something else".to_vec(), vec![0; 900_000], vec![0; 1_000_000]] {
        let case = Case::new();
        fs::create_dir_all(case.path("blobs")).unwrap();
        fs::write(case.partial(), left).unwrap();
        case.good(|received, _| repo().answer(received));
    }
}

#[test]
fn wrong_bytes_and_lengths_are_refused() {
    let message = Case::new().refused(but(|_, mut reply, _| {
        reply.body[600_000] ^= 1;
        reply
    }));
    assert!(message.contains("download model.safetensors from http://127.0.0.1:") && message.contains("its checksum is "), "{message}");
    let lies = |head: &'static str, body: usize| Case::new().refused(but(move |_, _, _| Reply::ok(vec![7; body]).with_head(head)));
    assert!(lies("HTTP/1.1 200 OK\r\nContent-Length: 9", 9).contains("9 bytes come, 900000 were expected"));
    assert!(lies("HTTP/1.1 200 OK", 1_000_000).contains("it is longer than its 900000 bytes"));
    assert!(lies("HTTP/1.1 200 OK", 900_000).contains("its checksum is "));
    let range = "HTTP/1.1 206 P\r\nContent-Range: bytes 0-899999/900000";
    let message =
        Case::new().refused(but(move |received, reply, _| if received.range.is_none() { reply.cut(10) } else { reply.with_head(range) }));
    assert!(message.contains("it answers \"bytes 0-899999/900000\" where \"bytes 10-899999/900000\" was asked for"), "{message}");
}

#[test]
fn a_token_goes_to_the_hub_only() {
    let storage = HubServer::start(|received, _| {
        repo().answer(&ReceivedRequest { path: format!("/org/tiny/resolve/{COMMIT}/{WEIGHTS}"), ..received.clone() })
    });
    let place = format!("{}/signed?{WEIGHTS}", storage.endpoint());
    let received = Case::new().good(but(move |received, _, _| match received.path.as_str() {
        path if path.starts_with("/moved") => Reply::redirect(&place),
        _ => Reply::redirect(&format!("/moved/{WEIGHTS}")),
    }));
    assert!(received.len() == 2 && received.iter().all(|received| received.authorization.is_some()), "{received:?}");
    let requests = storage.received();
    assert!(requests.len() == 1 && requests[0].authorization.is_none(), "{requests:?}");
    for (to, cause) in
        [("ftp://x/y", "an invalid address"), ("", "an invalid address"), (&format!("/{WEIGHTS}"), "more than 8 redirections")]
    {
        let to = to.to_string();
        let message = Case::new().refused(but(move |_, _, _| Reply::redirect(&to)));
        assert!(message.contains(cause), "{message}");
    }
}

#[test]
fn silence_is_waited_out_and_not_for_ever() {
    let silent = |reply: Reply, bytes| Reply { silence: SILENCE_MAX * 2, ..reply.cut(bytes) };
    Case::new().good(but(move |received, reply, _| if received.range.is_none() { silent(reply, 100_000) } else { reply }));
    let message = Case::new().refused(but(move |_, reply, _| silent(reply, 0)));
    assert!(message.contains("5 times in a row; 0 of 900000 bytes"), "{message}");
}

/// A hub that replaces every file list by `wrong`.
fn list(wrong: impl Fn(Reply) -> Reply + Send + 'static) -> impl Fn(&ReceivedRequest, usize) -> Reply + Send + 'static {
    move |received, _| if received.path.starts_with("/api/") { wrong(repo().answer(received)) } else { repo().answer(received) }
}

/// Maps a request and its number to an answer.
type Answer = Box<dyn Fn(&ReceivedRequest, usize) -> Reply + Send>;

#[test]
fn an_answer_that_drips_is_not_awaited_for_ever() {
    let pause = SILENCE_MAX / 4;
    let began = Instant::now();
    let refused = |answer: Answer| Case::new().refused(answer);
    for drip in [Drip::All(pause), Drip::Body(pause)] {
        let message = refused(Box::new(list(move |reply| reply.dripping(drip))));
        assert!(message.contains("which is not available locally, from") && message.ends_with(", 5 times in a row"), "{message}");
    }
    let message = refused(Box::new(list(move |reply| Reply { silence: SILENCE_MAX * 2, ..reply.cut(0) })));
    assert!(message.contains("timeout") && message.ends_with(", 5 times in a row"), "{message}");
    let message = refused(Box::new(but(move |_, reply, _| reply.dripping(Drip::All(pause)))));
    assert!(message.contains("5 times in a row; 0 of 900000 bytes"), "{message}");
    // Each redirect is fast enough, but all of them together exceed the limit.
    let patient = || Case { patience: WaitLimits { silence: Duration::from_secs(5), ..Case::new().patience }, ..Case::new() };
    let away = |received: &ReceivedRequest| Reply::redirect(&received.path).dripping(Drip::All(Duration::from_millis(1)));
    let message = patient().refused(move |received, _| away(received));
    assert!(message.ends_with("redirections take longer than 600ms, 5 times in a row") || message.contains("timeout: global"), "{message}");
    let message = patient().refused(but(move |received, _, _| away(received)));
    assert!(message.contains("redirections take longer than 600ms, 5 times in a row; 0 of 900000 bytes"), "{message}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn a_file_that_comes_too_slowly_is_given_up_in_whatever_attempts_it_comes() {
    let window = Duration::from_millis(500);
    let case = || Case { patience: WaitLimits { window, ..Case::new().patience }, ..Case::new() };
    let drips = case().refused(but(|_, reply, _| reply.dripping(Drip::Body(SILENCE_MAX / 4))));
    let breaks_off = case().refused(but(|_, reply, _| reply.cut(1)));
    for message in [drips, breaks_off] {
        let words = " bytes came in 500ms, at least 65536 were expected; ";
        assert!(message.contains(words) && message.ends_with(" of 900000 bytes are kept for the next run"), "{message}");
    }
    // Slow, but fast enough: 70,000 bytes in every window.
    let begun = Instant::now();
    case().good(but(move |_, reply, _| {
        thread::sleep(window / 4);
        reply.cut(70_000)
    }));
    assert!(begun.elapsed() > window * 2);
}

#[test]
fn a_requested_commit_is_the_downloaded_one() {
    let received = "a".repeat(40);
    let case = Case { name: HubName::model(&format!("org/tiny@{received}")).unwrap(), ..Case::new() };
    let message = case.refused(|received, _| repo().answer(received));
    assert!(message.ends_with(&format!("its list of files is of commit {COMMIT} where commit {received} was asked for")), "{message}");
    assert!(!case.path("snapshots").exists(), "nothing of another commit is kept");
    let case = Case { name: HubName::model(&format!("org/tiny@{COMMIT}")).unwrap(), ..Case::new() };
    case.good(|received, _| repo().answer(received));
    assert!(!case.path("refs").exists(), "a commit is its own name");
}

#[test]
fn refusals_name_the_remedy() {
    for (status, words) in [
        (401, "accept the licence on the page of the repository, then set HF_TOKEN"),
        (403, "status 403, and the token that is set has no access"),
        (404, "no such repository, revision or file"),
        (500, "status 500"),
        (418, "status 418"),
    ] {
        let listing = Case::new().refused(move |_, _| Reply::status(status));
        assert!(
            listing.starts_with("download org/tiny@refs/pr/1, which is not available locally, from http://127.0.0.1:")
                && listing.contains(words),
            "{listing}"
        );
        let file = Case::new().refused(but(move |_, _, _| Reply::status(status)));
        assert!(file.starts_with("download model.safetensors from") && file.contains(words), "{file}");
    }
    let silent = Case::new();
    assert!(
        silent
            .run("http://127.0.0.1:1")
            .unwrap_err()
            .to_string()
            .contains("download org/tiny@refs/pr/1, which is not available locally, from http://127.0.0.1:1: ")
    );
    for endpoint in ["huggingface.co", "file:///etc", "http://"] {
        assert_eq!(silent.run(endpoint).unwrap_err().exit_code(), 2, "{endpoint}");
    }
}

#[test]
fn lists_that_are_none_or_hostile_are_refused_before_anything_is_written() {
    let listed = |change: fn(&mut serde_json::Value)| {
        let case = Case::new();
        let message = case.refused(move |received, _| {
            let mut listing = repo().listing.clone();
            change(&mut listing);
            if received.path.starts_with("/api/") { Reply::ok(listing.to_string().into_bytes()) } else { repo().answer(received) }
        });
        assert!(!case.path("").exists() || fs::read_dir(case.path("blobs")).unwrap().count() == 0, "{message}");
        message
    };
    assert!(listed(|listing| *listing = "text".into()).contains("its list of files: "));
    assert!(listed(|listing| listing["sha"] = "../../x".into()).contains("no commit: \"../../x\""));
    for name in ["../../../evil.safetensors", "/etc/passwd", "a/../b", "a\\b", "", "."] {
        let message = Case::new().refused(move |_, _| {
            let mut listing = repo().listing.clone();
            listing["siblings"][2]["rfilename"] = name.into();
            Reply::ok(listing.to_string().into_bytes())
        });
        assert!(message.contains(&format!("{name:?} is not a safe name")), "{message}");
    }
    assert!(
        listed(|listing| listing["siblings"][8]["lfs"]["sha256"] = "../x".into()).contains("model.safetensors has no size or checksum")
    );
    assert!(listed(|listing| listing["siblings"][0]["blobId"] = "../x".into()).contains("config.json has no size or checksum"));
    assert!(listed(|listing| listing["siblings"][8]["lfs"]["size"] = (1u64 << 60).into()).contains("1310720.0 TiB needed"));
    assert!(listed(|listing| listing["siblings"][0]["rfilename"] = "x.json".into()).contains("it has no config.json"));
    let pickles = listed(|listing| listing["siblings"].as_array_mut().unwrap().truncate(8));
    assert!(
        pickles.contains("it has neither model.safetensors nor model.safetensors.index.json, and other weights are not read"),
        "{pickles}"
    );
}

#[test]
fn a_stop_ends_the_download_and_received_bytes_are_kept() {
    let case = Case::new();
    let stop = case.stop.clone();
    let answer = but(move |_, reply, _| {
        stop.request();
        Reply { silence: SILENCE_MAX, ..reply.cut(400_000) }
    });
    let server = HubServer::start(answer);
    assert_eq!(case.run(&server.endpoint()).unwrap_err().exit_code(), 75);
    server.received();
    assert!(!case.path("snapshots").join(COMMIT).join("config.json").exists());
    let again = Case { stop: StopFlag::default(), ..case };
    again.good(|received, _| repo().answer(received));
}

#[test]
fn two_at_a_time_download_a_file_once() {
    let case = Case::new();
    let server = HubServer::start(|received, _| Reply { silence: Duration::from_millis(20), ..repo().answer(received) });
    let endpoint = server.endpoint();
    thread::scope(|scope| {
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(|| case.run(&endpoint).unwrap())).collect();
        runs.into_iter().for_each(|run| assert!(run.join().unwrap().join("config.json").exists()));
    });
    let received = server.received();
    assert_eq!(received.iter().filter(|received| received.path.ends_with(WEIGHTS)).count(), 1, "{received:?}");
}

#[test]
fn the_token_is_the_environments_or_a_files() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), "hf_file\n").unwrap();
    let sent = |set: &[(&str, &str)]| {
        let server = HubServer::start(|_, _| Reply::status(404));
        let endpoint = server.endpoint();
        let variable = |name: &str| {
            let value = set.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
            value.or((name == "HF_ENDPOINT").then_some(&endpoint)).map(PathBuf::from)
        };
        HubClient::of(&variable).unwrap().get("/", 0, None).unwrap_err();
        server.received().remove(0).authorization
    };
    let (home, file) = (dir.path().to_str().unwrap(), dir.path().join("token"));
    assert_eq!(sent(&[]), None);
    assert_eq!(sent(&[("HF_HOME", home)]).as_deref(), Some("Bearer hf_file"));
    assert_eq!(sent(&[("HF_TOKEN_PATH", file.to_str().unwrap())]).as_deref(), Some("Bearer hf_file"));
    assert_eq!(sent(&[("HF_HOME", home), ("HF_TOKEN", " hf_own ")]).as_deref(), Some("Bearer hf_own"));
    let wrong = |token: &str| HubClient::of(&|name: &str| (name == "HF_TOKEN").then(|| token.into())).err().unwrap().to_string();
    let message = wrong("hf_a\r\nX: y");
    assert!(message.contains("has invalid characters") && !message.contains("hf_a"), "{message}");
}

#[test]
fn a_part_of_data_comes_whole_and_alone() {
    let parquet = |text: &str| text.as_bytes().to_vec();
    let new_repo = || {
        HubRepo::new(vec![
            ("en/train/0000.parquet", parquet("a")),
            ("en/train/0001.parquet", parquet("b")),
            ("en/test/0000.parquet", parquet("c")),
            ("fr/train/0000.parquet", parquet("d")),
            ("README.md", parquet("e")),
        ])
    };
    let run = |name: &str| {
        let case = Case { name: HubName::data(name).unwrap(), ..Case::new() };
        let repo = new_repo();
        let server = HubServer::start(move |received, _| {
            assert!(
                received.path.starts_with("/api/datasets/org/tiny/revision/refs%2Fconvert%2Fparquet")
                    || received.path.starts_with("/datasets/org/tiny/resolve/")
            );
            repo.answer(&ReceivedRequest {
                path: received.path.replace("/datasets/", "/").replace("/api/", "/api/models/"),
                ..received.clone()
            })
        });
        let found = case.run(&server.endpoint());
        server.received();
        (case, found)
    };
    let (case, found) = run("org/tiny:en");
    let dir = found.unwrap();
    let snapshot = case.dir.path().join("datasets--org--tiny/snapshots").join(COMMIT);
    assert_eq!(dir, snapshot.join("en/train"));
    assert_eq!(["0000", "0001"].map(|name| fs::read_to_string(dir.join(name).with_extension("parquet")).unwrap()), ["a", "b"]);
    assert_eq!((fs::read_dir(&snapshot).unwrap().count(), fs::read_dir(snapshot.join("en")).unwrap().count()), (1, 1));
    let cached = HubCache { root: case.dir.path().into() }.find(&case.name).unwrap().unwrap();
    assert_eq!(super::cache::part_dir(&cached, &case.name.part), Some(dir));
    let refused = |name: &str| run(name).1.unwrap_err().to_string();
    assert!(refused("org/tiny").ends_with("which configuration? it has :en:test, :en:train, :fr:train"));
    assert!(refused("org/tiny:fr:test").ends_with("it has no fr/test, but :en:test, :en:train, :fr:train"));
}

//! R17: invalid data.

use crate::harness::*;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::fs;
use std::io::{Read, Write};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R17",
    what: "generated data: ids outside the vocabulary, files cut within an id, empty documents, broken JSON lines, invalid UTF-8, marks of \
           byte order, NUL, archives that are cut or damaged, broken arrays, parquet files that are cut or damaged, lines of 10 million characters, a file that is cut or changed \
           while it is trained on: trained on, or refused with one line that names the file and, where a place is wrong, the place",
    runs: 5000,
    smoke: 13,
    start,
};

/// File name, content, and a text of the error if there must be one.
type Case = (&'static str, Vec<u8>, Option<&'static str>);

type Make = fn(&mut Turn) -> Case;

const KINDS: [(&str, Make); 13] = [
    ("id outside the vocabulary", outside),
    ("cut within an id", within_an_id),
    ("empty documents", empty_documents),
    ("broken JSON line", broken_json),
    ("invalid UTF-8", invalid_utf8),
    ("byte order mark", byte_order_mark),
    ("NUL and control characters", controls),
    ("random bytes as ids", random_ids),
    ("archive cut short", cut_archive),
    ("archive with a damaged byte", damaged_archive),
    ("broken array of records", broken_array),
    ("parquet file cut short", cut_parquet),
    ("parquet file with damaged bytes", damaged_parquet),
];

fn start(_: &Harness) -> Result<Trial, String> {
    Ok(Box::new(|harness, turn| match turn.index % 14 {
        13 if turn.index % 500 < 14 => long_line(harness, turn),
        13 => changes_meanwhile(harness, turn),
        kind => {
            let (name, make) = KINDS[kind as usize];
            turn.kind = name.into();
            one_file(harness, make(turn))
        }
    }))
}

fn one_file(harness: &Harness, (name, bytes, wrong): Case) -> Result<(), String> {
    fs::remove_dir_all(harness.path("broken")).ok();
    harness.write(&format!("broken/{name}"), bytes);
    harness.settings("broken.toml", "model", &format!("broken/{name}"), "");
    harness.remove("out");
    let outcome = harness.run(harness.train_by("broken.toml", "out", &["--max-steps", "1"]));
    outcome.expect_orderly(&[0, 1, 2])?;
    expect(wrong.is_none() || outcome.code != 0, || format!("accepted: {outcome}"))?;
    let named = outcome.code == 0 || (outcome.stderr.contains(name) && wrong.is_none_or(|words| outcome.stderr.contains(words)));
    expect(named, || format!("the error does not say {name} and {wrong:?}: {outcome}"))
}

/// Valid ids: bytes of text.
fn ids(turn: &mut Turn) -> Vec<u16> {
    (0..200 + turn.pick(800)).map(|_| 32 + turn.pick(90) as u16).collect()
}

fn bytes_of(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn outside(turn: &mut Turn) -> Case {
    let mut ids = ids(turn);
    let at = turn.pick(ids.len() as u64) as usize;
    ids[at] = turn.one_of(&[256, 257, 1000, 32767, 32768, 65535]);
    ("ids.u16.bin", bytes_of(&ids), Some("byte"))
}

fn within_an_id(turn: &mut Turn) -> Case {
    let mut bytes = bytes_of(&ids(turn));
    bytes.truncate(turn.pick(bytes.len() as u64 / 2) as usize * 2 + 1);
    ("ids.u16.bin", bytes, Some("truncated"))
}

fn empty_documents(turn: &mut Turn) -> Case {
    let texts = ["", " ", "\\n", "words of a document that is long enough for some sequences", "\\u0000"];
    let lines = (0..1 + turn.pick(40)).map(|_| format!("{{\"text\": \"{}\"}}\n", turn.one_of(&texts)));
    ("documents.jsonl", lines.collect::<String>().into_bytes(), None)
}

fn broken_json(turn: &mut Turn) -> Case {
    let good = "{\"text\": \"words of a document that is long enough for some sequences\"}\n";
    let bad =
        ["{", "{\"text\": 1}", "{\"text\": null}", "{\"no\": \"text\"}", "[]", "nothing", "{\"text\": \"\\ud800\"}", "{\"text\": \"a"];
    let (before, after) = (turn.pick(20) as usize, turn.pick(20) as usize);
    let text = good.repeat(before) + turn.one_of(&bad) + "\n" + &good.repeat(after);
    ("documents.jsonl", text.into_bytes(), Some("line"))
}

fn invalid_utf8(turn: &mut Turn) -> Case {
    let mut bytes = "words of a text that is long enough for some sequences\n".repeat(30).into_bytes();
    let at = turn.pick(bytes.len() as u64) as usize;
    bytes[at] = turn.one_of(&[0x80, 0xc0, 0xfe, 0xff, 0xf5]);
    ("text.txt", bytes, Some("UTF-8"))
}

fn byte_order_mark(turn: &mut Turn) -> Case {
    let text = "words of a text that is long enough for some sequences\n".repeat(5 + turn.pick(10) as usize);
    let mark: &[u8] = turn.one_of(&[&b"\xef\xbb\xbf"[..], b"\xff\xfe", b"\xfe\xff"]);
    let wrong = (mark.len() == 2).then_some("UTF-8");
    ("text.txt", [mark, text.as_bytes()].concat(), wrong)
}

fn controls(turn: &mut Turn) -> Case {
    ("text.txt", (0..500 + turn.pick(2000)).map(|_| turn.pick(128) as u8).collect(), None)
}

fn random_ids(turn: &mut Turn) -> Case {
    let bytes: Vec<u8> = (0..turn.pick(2000)).map(|_| turn.pick(256) as u8).collect();
    let name = turn.one_of(&["ids.bin", "ids.u16.bin", "ids.u32.bin"]);
    (name, bytes, None)
}

fn archive(turn: &mut Turn) -> Vec<u8> {
    let lines: String =
        (0..30 + turn.pick(30)).map(|n| format!("{{\"text\": \"words of document {n}, {}\"}}\n", turn.pick(1000))).collect();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(lines.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn cut_archive(turn: &mut Turn) -> Case {
    let mut bytes = archive(turn);
    bytes.truncate(1 + turn.pick(bytes.len() as u64 - 1) as usize);
    ("documents.jsonl.gz", bytes, Some("gzip"))
}

/// The damage is after the header, which has unused fields. The padding bits of the last compressed byte are unused, too.
fn damaged_archive(turn: &mut Turn) -> Case {
    let good = archive(turn);
    let mut bytes = good.clone();
    let at = 10 + turn.pick(bytes.len() as u64 - 10) as usize;
    bytes[at] ^= 1 << turn.pick(8);
    let is_whole = expanded(&bytes).is_some_and(|text| Some(text) == expanded(&good));
    ("documents.jsonl.gz", bytes, (!is_whole).then_some("documents"))
}

fn expanded(archive: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    GzDecoder::new(archive).read_to_end(&mut text).ok().map(|_| text)
}

fn broken_array(turn: &mut Turn) -> Case {
    let good = "{\"text\": \"words of a document that is long enough for some sequences\"}, ".repeat(1 + turn.pick(20) as usize);
    let bad = turn.one_of(&["", "{", "nothing]", "{\"no\": \"text\"}]", "{\"text\": 1}]", "{\"text\": \"a\"}", "{\"text\": \"a\"}] {}"]);
    ("documents.json", format!("[{good}{bad}").into_bytes(), Some("documents.json"))
}

/// Forty short texts.
const PARQUET: &[u8] = include_bytes!("../golden/parquet/binary.parquet");

fn cut_parquet(turn: &mut Turn) -> Case {
    ("documents.parquet", PARQUET[..turn.pick(PARQUET.len() as u64) as usize].to_vec(), Some("documents.parquet"))
}

fn damaged_parquet(turn: &mut Turn) -> Case {
    let mut bytes = PARQUET.to_vec();
    for _ in 0..1 + turn.pick(3) {
        let at = turn.pick(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << turn.pick(8);
    }
    ("documents.parquet", bytes, None)
}

fn long_line(harness: &Harness, turn: &mut Turn) -> Result<(), String> {
    turn.kind = "10 million characters in a line".into();
    let line = "ten characters".bytes().cycle().take(10_000_000).collect::<Vec<u8>>();
    let json = turn.pick(2) == 0;
    let bytes = if json { [b"{\"text\": \"", &line[..], b"\"}\n"].concat() } else { line };
    one_file(harness, (if json { "long.jsonl" } else { "long.txt" }, bytes, None))
}

/// The file is truncated or overwritten during training. The run must end in an orderly way, with a valid checkpoint.
fn changes_meanwhile(harness: &Harness, turn: &mut Turn) -> Result<(), String> {
    let cut = turn.pick(2) == 0;
    turn.kind = if cut { "cut meanwhile" } else { "changed meanwhile" }.into();
    let path = harness.write("changing.u16.bin", bytes_of(&(0..20_000).map(|i| (i % 251) as u16).collect::<Vec<_>>()));
    harness.settings("changing.toml", "model", "changing.u16.bin", "");
    harness.remove("out");
    let mut child = harness.spawn(harness.train_by("changing.toml", "out", &["--max-steps", "60"]));
    child.wait_until(|child| child.stdout().contains("\nstep      4"));
    match cut {
        true => fs::OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(2 * turn.pick(300))).unwrap(),
        // Ids far outside the vocabulary.
        false => fs::write(&path, vec![0xff; 40_000]).unwrap(),
    }
    let outcome = child.finish();
    outcome.expect_orderly(&[0, 1])?;
    expect(outcome.code == 0 || outcome.stderr.contains("changing.u16.bin"), || format!("names no file: {outcome}"))?;
    let newest = *checkpoints(&harness.path("out")).last().ok_or("no checkpoint")?;
    harness.digest_of(&harness.path(&format!("out/checkpoint-{newest}"))).map(drop)
}

//! All samples of one record are on the same side of the split into training and evaluation, and so are copies of one text.

use super::mask::TrainOn;
use super::tests::{rules, turn};
use crate::data::context::Preparation;
use crate::data::dataset::Dataset;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::rows::row_rules::{Packing, RowRules};
use crate::data::tokenizer::AddBos;
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Of each conversation it makes a sample for each answer.
const LAST_THINKS: &str = "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}(){% endif %}{{ m.content }};{% endfor %}\
    {% if add_generation_prompt %}{% endif %}";
const ROW: usize = 256;

/// The texts of the samples on each side of a split, and the note about the held-out records.
fn split(records: &[Value], how: &str, seed: u64, is_kept: bool) -> Result<([BTreeSet<String>; 2], String), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chats.jsonl");
    std::fs::write(&path, records.iter().map(|record| format!("{record}\n")).collect::<String>()).unwrap();
    let tokenizer = Tokenizer::bytes_with(None, AddBos::No, rules(LAST_THINKS, TrainOn::Auto).into()).unwrap();
    let (mut message, cache) = (Vec::new(), is_kept.then(|| dir.path().join("cache")));
    let mut preparation = Preparation::new(&StopFlag::default(), cache, None, |event| {
        if let ProgressEvent::Detail(line) = event {
            message.push(line.to_string());
        }
    });
    preparation.in_memory_bytes_max = if is_kept { 0 } else { u64::MAX };
    let rules = RowRules { packing: Packing::Off, ..RowRules::wrapped(ROW) };
    let opened = Dataset::open_split(&[path], &tokenizer, 256, rules, (how.parse().unwrap(), seed), &mut preparation);
    drop(preparation);
    let (kept, held_out) = opened.map_err(|error| error.to_string())?;
    let note = message.into_iter().find(|line| line.starts_with("held out")).unwrap();
    Ok(([texts(&kept), texts(&held_out)], note))
}

/// The samples of a dataset, one a row.
fn texts(dataset: &Dataset) -> BTreeSet<String> {
    let text = |row: usize| dataset.read_tokens(row).iter().map(|token| *token as u8 as char).collect::<String>();
    (0..dataset.sequences()).map(|row| text(row).trim_end_matches(|c| c != ';').to_string()).collect()
}

fn chat(name: &str, answers: usize) -> Value {
    let turns = |n| [turn("user", &format!("{name} asks {n}")), turn("assistant", &format!("{n} it is"))];
    json!({"messages": (0..answers).flat_map(turns).collect::<Vec<_>>()})
}

#[test]
fn all_samples_of_a_conversation_are_on_one_side() {
    let records: Vec<Value> = (0..12).map(|n| chat(&format!("number {n} of all"), 1 + n % 4)).collect();
    for (seed, is_kept) in [(1, false), (2, true), (3, false)] {
        let ([kept, held_out], note) = split(&records, "4", seed, is_kept).unwrap();
        let of = |n: usize, side: &BTreeSet<String>| side.iter().filter(|text| text.contains(&format!("number {n} of"))).count();
        let sides: Vec<_> = (0..12).map(|n| (of(n, &kept), of(n, &held_out))).collect();
        assert!(
            sides.iter().enumerate().all(|(n, (kept, held_out))| [(1 + n % 4, 0), (0, 1 + n % 4)].contains(&(*kept, *held_out))),
            "{sides:?}"
        );
        assert_eq!(sides.iter().filter(|(kept, _)| *kept == 0).count(), 4);
        assert!(note.starts_with(&format!("held out 4 of 12 records ({} of 30 documents), ", held_out.len())), "{note}");
    }
    let refused = split(&records[3..4], "2", 1, false).unwrap_err();
    assert!(refused.starts_with("--eval-split 2: none would be left to train on: the data has 1 record"), "{refused}");
}

#[test]
fn one_text_is_on_one_side_whatever_is_trained_of_it() {
    let (mut once, twice, more) = (chat("anne", 2), chat("anne", 2), chat("anne", 3));
    once["messages"][1]["weight"] = 0.into();
    let records = [once, twice, more, chat("bob", 1), chat("eve", 2), chat("joe", 1)];
    let mut with_anne = 0;
    for seed in 0..12 {
        let ([kept, held_out], note) = split(&records, "1", seed, seed % 2 == 0).unwrap();
        assert!(kept.is_disjoint(&held_out), "{seed}: {kept:?} {held_out:?}");
        let has_anne = held_out.iter().any(|text| text.contains("anne"));
        with_anne += usize::from(has_anne);
        assert_eq!(note.starts_with("held out 3 of 6 records"), has_anne, "{note}");
    }
    assert!((1..12).contains(&with_anne), "{with_anne}");
    let refused = split(&records[..3], "1", 1, false).unwrap_err();
    assert!(refused.starts_with("--eval-split 1: all records have text in common"), "{refused}");
}

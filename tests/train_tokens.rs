//! Runs that train rows of some tokens: bits, exports, checkpoints, refusals.

use crate::frozen::{FLAGS, Tensors, become_exported, deep_workspace, export, golden, tensors, train, workspace};
use crate::processes::{digest_of_one, ends, start};
use crate::program::{CONFIG, Outcome, Workspace, program, run};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use std::fs;
use std::ops::Range;
use std::path::Path;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The digits 2 to 7, which the text of [`workspace`] has.
const DIGITS: &str = "--train-tokens=50..56";

/// The tensors of rows of a table of `vocab` tokens.
fn rows(table: &[u8], vocab: usize) -> std::slice::ChunksExact<'_, u8> {
    table.chunks_exact(table.len() / vocab)
}

/// Checks that `have` differs from `want` in all rows of `tokens` of the `tables`, and in whole tensors for which `trains` holds, and nowhere
/// else.
fn expect_trained(have: &Tensors, want: &Tensors, (tables, vocab): (&[&str], usize), tokens: &Range<usize>, trains: impl Fn(&str) -> bool) {
    assert_eq!(Vec::from_iter(have.keys()), Vec::from_iter(want.keys()));
    for (name, before) in want {
        if !tables.contains(&name.as_str()) {
            assert_eq!(have[name] != *before, trains(name), "{name}");
            continue;
        }
        for (token, (before, after)) in rows(before, vocab).zip(rows(&have[name], vocab)).enumerate() {
            assert_eq!(before != after, tokens.contains(&token), "{name}: row {token}");
        }
    }
}

#[test]
fn an_export_has_other_rows_and_frozen_tensors_byte_for_byte() {
    // Separate and tied output matrices, learned positions, two shards, a text part.
    let cases: [(&str, &[&str], &[&str]); 6] = [
        ("llama", &[EMBEDDING, HEAD], &[]),
        ("qwen3", &[EMBEDDING], &["layers.1.mlp"]),
        ("gpt2", &["transformer.wte.weight"], &["wpe"]),
        ("mistral", &[EMBEDDING, HEAD], &["layers.0."]),
        ("qwen3_5", &[EMBEDDING, HEAD], &[]),
        ("qwen3_vl", &["model.language_model.embed_tokens.weight"], &[]),
    ];
    for (name, tables, also) in cases {
        let workspace = workspace(name);
        let others: Vec<String> = also.iter().map(|pattern| format!("--train-only={pattern}")).collect();
        let flags = |more: &[&'static str]| -> Vec<String> { more.iter().map(|flag| flag.to_string()).chain(others.clone()).collect() };
        let train = |out: &str, flags: &[String]| train(&workspace, out, &flags.iter().map(String::as_str).collect::<Vec<_>>());
        // Decay of weights changes every row that it reaches.
        let outcome = train("out", &flags(&["--max-steps=3", "--weight-decay=0.1", DIGITS]));
        outcome.digest();
        assert!(outcome.stdout.contains("rows 50..56 (6 tokens) of "), "{outcome:?}");
        let (have, want) = (export(&workspace, "out", "exported"), tensors(&workspace.path("model")));
        let trains = |tensor: &str| also.iter().any(|pattern| tensor.contains(pattern));
        expect_trained(&have, &want, (tables, 64), &(50..56), trains);
        assert_eq!(fs::read(workspace.path("exported/config.json")).unwrap(), fs::read(workspace.path("model/config.json")).unwrap());
        let again = format!("--model={}", workspace.path("exported").display());
        train("again", &[flags(&["--max-steps=1", DIGITS]), vec![again]].concat()).digest();
    }
}

#[test]
fn a_second_copy_of_a_tied_embedding_gets_the_rows_too() {
    let workspace = workspace("qwen3");
    let path = workspace.path("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let copy: (String, TensorView<'_>) = (HEAD.into(), file.tensor(EMBEDDING).unwrap());
    let written = safetensors::serialize(file.iter().map(|(name, view)| (name.to_string(), view)).chain([copy]), None).unwrap();
    fs::write(&path, written).unwrap();
    train(&workspace, "out", &["--max-steps=3", DIGITS]).digest();
    let (have, want) = (export(&workspace, "out", "exported"), tensors(&workspace.path("model")));
    expect_trained(&have, &want, (&[EMBEDDING, HEAD], 64), &(50..56), |_| false);
    assert_eq!(have[HEAD], have[EMBEDDING]);
}

/// Every loss: the first step changes the rows as it changes them where all tensors are trained. Without clipping, a row's update depends on
/// no other gradient.
#[test]
fn the_first_step_has_the_rows_of_a_run_that_trains_everything() {
    let workspace = Workspace::new();
    let pairs: String =
        (0..20).map(|n| format!("{{\"prompt\": \"1\", \"chosen\": \"{}\", \"rejected\": \"{}\"}}\n", n % 7, n % 5 + 2)).collect();
    let chat: String = (0..40).map(|n| format!("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", n % 7, n % 5 + 2)).collect();
    let written = [("pairs.jsonl", pairs), ("chat.jsonl", chat)].map(|(name, text)| workspace.write(name, text));
    let [pairs, chat] = written.map(|path| path.display().to_string());
    let [rollouts, teacher] = ["rollouts/rollouts.jsonl", "distill/top64.jsonl"].map(|name| golden(name).display().to_string());
    let (byte_model, trl) = (byte_models(), golden("trl/model"));
    let [tied, untied] = byte_model.each_ref().map(|workspace| workspace.path("model"));
    let text = workspace.path("data.txt").display().to_string();
    let bytes = ["--tokenizer=bytes", "--eos-token=0", "--seq-length=32"];
    let cases: [(&Path, &str, Range<usize>, &[&str]); 8] = [
        (&tied, &text, 97..123, &["--gradient-accumulation-steps=2"]),
        (&untied, &text, 97..123, &["--gradient-shares=2", "--gradient-accumulation-steps=2"]),
        (&untied, &chat, 48..58, &["--head-rows=trained", "--packing=bfd"]),
        (&tied, &pairs, 48..58, &["--loss=dpo"]),
        (&untied, &pairs, 48..58, &["--loss=simpo", "--head-rows=trained"]),
        (&trl, &rollouts, 3..300, &["--loss=grpo"]),
        (&trl, &teacher, 3..300, &["--loss=distill", "--kd-ratio=0.75"]),
        (&tied, &text, 97..123, &["--dtype=bfloat16"]),
    ];
    for (model, data, tokens, more) in cases {
        let model_flags = if model == trl { &["--seq-length=32"][..] } else { &bytes };
        let shared = ["--device=cpu", "--max-grad-norm=0", "--max-steps=1", "--per-device-train-batch-size=2", "--report-to=none"];
        let own = [format!("--model={}", model.display()), format!("--data={data}"), "--learning-rate=1e-2".into()];
        let exported = |out: &str, token_flags: &[String]| {
            let mut command = program(&["train"]);
            command.args(&own).args(shared).args(model_flags).args(more).args(token_flags);
            if !more.iter().any(|flag| flag.starts_with("--dtype")) {
                command.arg("--dtype=float32");
            }
            let outcome = run(command.arg("--output-dir").arg(workspace.path(out)));
            assert_eq!(outcome.code, 0, "{outcome:?}");
            export(&workspace, out, &format!("{out}-exported"))
        };
        let (whole, some) = (exported("whole", &[]), exported("some", &[format!("--train-tokens={}..{}", tokens.start, tokens.end)]));
        let (before, vocab) = (tensors(model), if model == trl { 320 } else { 256 });
        let mut changed = 0;
        for table in [EMBEDDING, HEAD].into_iter().filter(|table| some.contains_key(*table)) {
            for (token, row) in rows(&some[table], vocab).enumerate() {
                let want = if tokens.contains(&token) { &whole[table] } else { &before[table] };
                assert_eq!(row, rows(want, vocab).nth(token).unwrap(), "{more:?} {table}: row {token}");
                changed += usize::from(row != rows(&before[table], vocab).nth(token).unwrap());
            }
        }
        assert!(changed > 2 && changed <= tokens.len() * 2, "{more:?}: {changed}");
        for out in ["whole", "some", "whole-exported", "some-exported"] {
            fs::remove_dir_all(workspace.path(out)).unwrap();
        }
    }
}

/// Models of one layer whose weights an export of a run wrote: with a tied embedding, and with a separate output matrix.
fn byte_models() -> [Workspace; 2] {
    ["true", "false"].map(|tied| {
        let workspace = Workspace::new();
        workspace.write("model/config.json", CONFIG.replace("true", tied));
        become_exported(&workspace, &["--dtype=float32"]);
        workspace
    })
}

#[test]
fn no_bit_of_the_rows_depends_on_places_times_or_ranks() {
    const ALONE: &str = "--gradient-accumulation-steps=2";
    const SMALL: &str = "--bucket-mib=0.03125";
    let variants: [&[&str]; 11] = [
        &[ALONE, "--adversary=7"],
        &[ALONE, "--threads=1"],
        &[ALONE, SMALL, "--slots=2", "--adversary=8"],
        &[ALONE, "--strategy=zero-offload"],
        &[ALONE, "--replan=random", SMALL],
        &[ALONE, "--activations=host"],
        &[ALONE, "--layer-order=segments:2,2"],
        &["--gpus=2"],
        &[ALONE, SMALL, "--weights=flow", "--resident-buckets=0", "--layer-order=segments:2,2"],
        &["--gpus=2", SMALL, "--weights=sharded"],
        &["--gpus=2", SMALL, "--weights=fully-sharded"],
    ];
    for tied in [true, false] {
        let workspace = deep_workspace(tied);
        let shared = ["--gradient-shares=2", "--max-steps=4", "--train-tokens=98..121"];
        let scattered = [r"--freeze=layers\.[01]\.", "--freeze=down_proj", r"--freeze=layers\.4\.", "--freeze=model.norm"];
        // Rows alone need no other places for weights than the device.
        for (also, variants) in [(&scattered[..], &variants[..]), (&[], &variants[..8])] {
            let of = |flags: &[&str]| train(&workspace, "out", &[&shared, also, flags].concat()).digest().to_string();
            let digest = of(&[ALONE]);
            for flags in variants {
                assert_eq!(of(flags), digest, "tied {tied} {also:?} {flags:?}");
            }
        }
    }
}

#[test]
fn a_run_resumes_with_the_same_tokens_and_no_others() {
    let workspace = workspace("llama");
    let digest = train(&workspace, "whole", &[DIGITS, "--max-steps=6"]).digest().to_string();
    train(&workspace, "half", &[DIGITS, "--max-steps=4", "--save-steps=2"]).digest();
    let resume = |flags: &[&str]| train(&workspace, "half", &[&["--max-steps=6", "--resume-from-checkpoint=auto"], flags].concat());
    let refused = |flags: &[&str]| {
        let outcome = resume(flags);
        assert_ne!(outcome.code, 0, "{outcome:?}");
        outcome.stderr
    };
    let was = "--train-tokens: rows of the token embedding were trained for the tokens 50..56 alone when the checkpoint was made";
    let none = refused(&[]);
    assert!(none.contains(was) && none.contains("are not restricted to a range of tokens now"), "{none}");
    let other = refused(&["--train-tokens=50..57", "--allow-changed=model"]);
    assert!(other.contains(was) && other.contains("are trained for the tokens 50..57 alone now"), "{other}");
    let more = refused(&[DIGITS, "--train-only=layers.1"]);
    assert!(more.contains("was frozen when the checkpoint was made and is trained now"), "{more}");
    let from_record = run(program(&["resume", "--max-steps=6"]).arg(workspace.path("half")));
    assert_eq!(from_record.code, 0, "{from_record:?}");
    assert_eq!(run(program(&["digest"]).arg(workspace.path("half"))).digest(), digest);
    assert_eq!(export(&workspace, "half", "resumed"), export(&workspace, "whole", "exported"));
    let sampled = |out: &str| run(program(&["sample", "--prompt", "01234"]).arg(workspace.path(out)));
    let (half, whole) = (sampled("half"), sampled("whole"));
    assert_eq!((half.code, &half.stdout), (0, &whole.stdout), "{half:?}");
}

#[test]
fn losses_and_samples_are_those_of_a_run_that_trains_everything_until_weights_change() {
    let workspace = deep_workspace(false);
    let eval = format!("--eval-data={}", workspace.path("data.txt").display());
    let of = |out: &str, flags: &[&str]| {
        let shared = ["--learning-rate=0", "--max-steps=2", "--eval-steps=1", &eval];
        train(&workspace, out, &[&shared, flags].concat()).digest();
        let losses: Vec<_> = workspace.metrics(out).iter().map(|line| (line["loss"].clone(), line["eval_loss"].clone())).collect();
        let sampled = run(program(&["sample", "--prompt", "Colour"]).arg(workspace.path(out)));
        assert_eq!(sampled.code, 0, "{sampled:?}");
        (losses, sampled.stdout)
    };
    assert_eq!(of("some", &["--train-tokens=90..200"]), of("whole", &[]));
}

#[test]
fn formats_of_weights_states_and_products_train_rows() {
    let workspace = deep_workspace(true);
    for more in [
        &["--dtype=float16"][..],
        &["--moments=int8"],
        &["--head-rows=trained"],
        &["--matmul-dtype=fp8"],
        &["--masters=split", "--strategy=no-offload"],
        &["--gpus=2", "--gradient-shares=2", "--strategy=no-offload"],
        &["--gpus=2", "--sequence-ranks=2"],
    ] {
        train(&workspace, "out", &[&["--train-tokens=97..123", "--max-steps=3"], more].concat()).digest();
        let have = export(&workspace, "out", "exported");
        expect_trained(&have, &tensors(&workspace.path("model")), (&[EMBEDDING], 256), &(97..123), |_| false);
        fs::remove_dir_all(workspace.path("exported")).unwrap();
    }
}

/// Gives the model of `workspace` a tokenizer of words, of which those from `first` on are added. The text has all of them.
fn add_tokenizer(workspace: &Workspace, words: usize, first: usize, added: &[usize]) {
    let vocabulary: serde_json::Map<String, Value> = (0..first).map(|id| (format!("w{id}"), id.into())).collect();
    let tokens: Vec<Value> = added.iter().map(|id| added_token(*id)).collect();
    // The token of id 3 is a word of the vocabulary.
    let known =
        json!({"id": 3, "content": "w3", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let all_added: Vec<Value> = std::iter::once(known).chain(tokens).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": all_added, "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    });
    workspace.write("model/tokenizer.json", tokenizer.to_string());
    let text: Vec<String> = (0..400).map(|n| (n * 7 % words).to_string()).collect();
    let name = |id: &String| if added.contains(&id.parse().unwrap()) { format!("<new{id}>") } else { format!("w{id}") };
    workspace.write("data.txt", text.iter().map(name).collect::<Vec<_>>().join(" "));
}

fn added_token(id: usize) -> Value {
    json!({
        "id": id, "content": format!("<new{id}>"), "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
    })
}

#[test]
fn added_tokens_are_those_beside_the_vocabulary_of_the_tokenizer() {
    let workspace = workspace("qwen3");
    add_tokenizer(&workspace, 60, 55, &[55, 56, 57, 58, 59]);
    let flags = ["--init=checkpoint", "--device=cpu", "--seq-length=16", "--max-steps=3", "--weight-decay=0.1"];
    let of = |tokens: &str| run(&mut workspace.train("out", &[&flags[..], &[tokens]].concat()));
    let outcome = of("--train-tokens=added");
    let digest = outcome.digest().to_string();
    assert!(
        outcome.stdout.contains("rows 55..60 (5 tokens) of the token embedding, which is also the output matrix, are trained"),
        "{outcome:?}"
    );
    let have = export(&workspace, "out", "exported");
    expect_trained(&have, &tensors(&workspace.path("model")), (&[EMBEDDING], 64), &(55..60), |_| false);
    assert_eq!(of("--train-tokens=55..60").digest(), digest);
    let resumed = run(program(&["resume", "--max-steps=4"]).arg(workspace.path("out")));
    assert_eq!(resumed.code, 0, "{resumed:?}");
    let planned =
        run(program(&["plan", "--hardware=h100", "--train-tokens=added", "--seq-length=16", "--model"]).arg(workspace.path("model")));
    assert!(planned.stdout.contains("rows 55..60 (5 tokens) of "), "{planned:?}");
}

#[test]
fn two_processes_train_the_rows_that_the_first_one_finds() {
    let workspace = workspace("qwen3");
    add_tokenizer(&workspace, 60, 55, &[55, 56, 57, 58, 59]);
    let flags = ["--init=checkpoint", "--max-steps=3", "--train-tokens=added"];
    let one = digest_of_one(&workspace, "one", 1, &flags);
    let ended = ends(start(&workspace, "two", 2, &flags));
    assert!(ended.iter().all(|outcome| outcome.code == 0), "{ended:?}");
    assert_eq!(ended[0].digest(), one);
}

#[test]
fn impossible_choices_are_refused_before_data_is_read() {
    let workspace = workspace("llama");
    let refused = |flags: &[&str]| -> String {
        let Outcome { code, stderr, .. } = run(&mut workspace.train("out", &[&["--data=/dev/null", "--device=cpu"], flags].concat()));
        assert_ne!(code, 0, "{flags:?}: {stderr}");
        stderr
    };
    let checkpoint = &FLAGS[..2];
    let cases: [(&[&str], &str); 7] = [
        (&["--train-tokens=5..5"], "the range is empty"),
        (&["--train-tokens=some"], "expected `added` or a range of ids START..END"),
        (&["--train-tokens=60..65"], "--train-tokens 60..65: the model's token embedding has 64 rows"),
        (&["--train-tokens=60..64", "--freeze=embed"], "--freeze \"embed\": matches model.embed_tokens.weight, of which --train-tokens"),
        (&["--train-tokens=60..64", "--freeze=lm_head"], "--freeze \"lm_head\": matches lm_head.weight, of which --train-tokens"),
        (&["--train-tokens=added"], "has no tokenizer.json"),
        (&["--train-tokens=added", "--tokenizer=bytes"], "--train-tokens added: needs the tokenizer.json of a model's directory"),
    ];
    for (flags, words) in cases {
        let refusal = refused(&[checkpoint, flags].concat());
        assert!(refusal.contains(words), "{flags:?}: {refusal}");
    }
    assert!(refused(&["--train-tokens=60..64", "--init=random"]).contains("random weights cannot be frozen"));
    for (added, words) in
        [(&[][..], "the tokenizer has no tokens beside its vocabulary"), (&[70, 71], "has 64 rows, and the first added token is 70")]
    {
        add_tokenizer(&workspace, 20, added.first().map_or(55, |first| *first), added);
        let refusal = refused(&[checkpoint, &["--train-tokens=added"]].concat());
        assert!(refusal.contains(words), "{refusal}");
    }
    let preset = run(&mut program(&["plan", "--hardware=h100", "--model=qwen3-4b", "--train-tokens=added"]));
    assert!(preset.stderr.contains("--train-tokens added: needs the tokenizer.json of a model's directory"), "{preset:?}");
}

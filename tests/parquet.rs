//! Training on parquet files: the records of JSON lines, to the bit; and what is refused.

use crate::program::{Workspace, program, run};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A training on `data` through the chat template `template`.
fn digest(workspace: &Workspace, data: &Path, template: &str) -> String {
    let template = format!("--chat-template={}", golden("chat/templates").join(template).with_extension("jinja").display());
    let data = format!("--data={}", data.display());
    run(&mut workspace.train("out", &[&data, &template, "--max-steps=2", "--tokenizer=bytes", "--packing=wrapped"])).digest().to_string()
}

#[test]
fn a_parquet_file_trains_as_the_lines_that_it_was_made_of() {
    for (case, template) in [("marks", "qwen2_5_training"), ("reasoning", "qwen3"), ("plain", "qwen3")] {
        let name = |dir: &str, extension: &str| golden(dir).join(case).with_extension(extension);
        let of = |data: &Path| digest(&Workspace::new(), data, template);
        assert_eq!(of(&name("parquet", "parquet")), of(&name("trl", "jsonl")), "{case}");
    }
}

#[test]
fn a_directory_of_parquet_files_is_shown_and_broken_ones_are_refused() {
    let workspace = Workspace::new();
    let labels = std::fs::read(golden("parquet/labels.parquet")).unwrap();
    workspace.write("data/0.parquet", &labels);
    let dir = workspace.write("data/1.parquet", &labels);
    let shown = |path: &Path| run(&mut program(&["data", path.to_str().unwrap(), "--seq-length=4"]));
    let both = shown(dir.parent().unwrap());
    assert!(both.stdout.contains("0.parquet, row 1: ") && both.stdout.contains("documents  80"), "{both:?}");
    shown(&workspace.write("cut.parquet", &labels[..labels.len() / 2])).refused(1, &["cut.parquet: not a parquet file, or truncated"]);
    shown(&workspace.write("x.parquet", "text")).refused(1, &["x.parquet: not a parquet file: too short"]);
    for bomb in ["rows", "page"] {
        shown(&golden(&format!("parquet/{bomb}_bomb.parquet"))).refused(1, &["_bomb.parquet: row group 0: "]);
    }
    let binary = workspace.write("b.parquet", std::fs::read(golden("parquet/binary.parquet")).unwrap());
    let named = run(program(&["data", "--columns=messages=image"]).arg(binary));
    named.refused(1, &["b.parquet: row group 0: row 1: column image: bytes that are not UTF-8"]);
}

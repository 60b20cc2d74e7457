//! Against transformers: which tokens stand around documents. golden/tokenizers/generate.py says how the golden values were made.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use superoffload::internals::data::{AddBos, Tokenizer};
use superoffload::internals::model_dir::ModelDir;

#[derive(Deserialize)]
struct Case {
    name: String,
    files: BTreeMap<String, serde_json::Value>,
    text: String,
    plain: Vec<u32>,
    whole: Vec<u32>,
    eos: Option<u32>,
}

#[test]
fn documents_begin_and_end_as_with_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers/cases.json");
    let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut begins = 0;
    for Case { name, files, text, plain, whole, eos } in cases {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, content)| std::fs::write(dir.path().join(name), content.to_string()).unwrap());
        let tokenizer = Tokenizer::load(&ModelDir::open(dir.path()).unwrap(), None, AddBos::Auto).unwrap().unwrap();
        assert_eq!((tokenizer.encode(&text).unwrap(), tokenizer.end_of_text()), (plain.clone(), eos), "{name}");
        let begin = tokenizer.begin_of_text();
        assert!(whole.starts_with(&[begin, &plain].concat()), "{name}: {begin:?}, transformers {whole:?}");
        begins += usize::from(!begin.is_empty());
    }
    assert_eq!(begins, 12);
}

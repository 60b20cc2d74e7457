//! Against transformers: which tokens stand around documents, and which are added from files beside tokenizer.json. The scripts
//! golden/tokenizers/generate.py and added.py say how the golden values were made.

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

#[derive(Deserialize)]
struct AddedFile {
    text: String,
    tokenizers: BTreeMap<String, serde_json::Value>,
    cases: Vec<AddedCase>,
}

#[derive(Deserialize)]
struct AddedCase {
    name: String,
    tokenizer: String,
    files: BTreeMap<String, serde_json::Value>,
    #[serde(rename = "transformers 5")]
    ids: Vec<u32>,
    #[serde(rename = "transformers 4")]
    ids_of_4: Option<Vec<u32>>,
}

#[test]
fn tokens_that_stand_beside_tokenizer_json_are_added_as_by_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers/added.json");
    let golden: AddedFile = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (mut wrong, mut versions_differ) = (Vec::new(), 0);
    for case in &golden.cases {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), golden.tokenizers[&case.tokenizer].to_string()).unwrap();
        case.files.iter().for_each(|(name, content)| std::fs::write(dir.path().join(name), content.to_string()).unwrap());
        let tokenizer = Tokenizer::load(&ModelDir::open(dir.path()).unwrap(), None, AddBos::Auto).unwrap().unwrap();
        let ids = tokenizer.encode(&golden.text).unwrap();
        if ids != case.ids {
            wrong.push(format!("{}: {ids:?}, transformers {:?}", case.name, case.ids));
        }
        versions_differ += usize::from(case.ids_of_4.as_ref().is_some_and(|ids| *ids != case.ids));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!((golden.cases.len(), versions_differ), (96, 9));
}

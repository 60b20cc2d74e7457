//! Data sets as `Dataset.save_to_disk` writes them: folders of streams in Arrow's format, which is not read here. Errors give the command
//! that makes JSON lines of exactly these files.

use super::compression::has_extension;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Files that describe a data set and hold none of its records.
const DESCRIPTIONS: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];
/// Beginnings of files in Arrow's format that are no streams.
const FILE_MARKS: [&[u8]; 2] = [b"ARROW1", b"FEA1"];

/// Whether the file at `path` describes a data set.
pub(in crate::data) fn is_description(path: &Path) -> bool {
    path.file_name().is_some_and(|name| DESCRIPTIONS.iter().any(|description| name == *description))
}

/// Whether the file at `path` is a stream in Arrow's format, which no reader of its files takes.
pub(in crate::data) fn is_stream(path: &Path) -> bool {
    let mark = || {
        let mut mark = Vec::new();
        File::open(path).and_then(|file| file.take(8).read_to_end(&mut mark)).map(|_| mark)
    };
    has_extension(path, "arrow") && path.is_file() && mark().is_ok_and(|mark| !FILE_MARKS.iter().any(|known| mark.starts_with(known)))
}

/// The remedy for a stream at `path`, the end of a message.
pub(in crate::data) fn file_conversion(path: &Path, lines: &Path) -> String {
    let (path, lines) = (path.display(), lines.display());
    format!("; convert it: python -c \"import datasets; datasets.Dataset.from_file('{path}').to_json('{lines}')\"")
}

/// The message for the folder `dir` that `save_to_disk` wrote; `None` for another folder.
pub(in crate::data) fn folder_conversion(dir: &Path) -> Option<String> {
    let has_splits = dir.join("dataset_dict.json").is_file();
    if !has_splits && !dir.join("state.json").is_file() {
        return None;
    }
    let split = if has_splits { "['train']" } else { "" };
    let (path, lines) = (dir.display(), dir.with_extension("jsonl"));
    let command = format!("import datasets; datasets.load_from_disk('{path}'){split}.to_json('{}')", lines.display());
    Some(format!("a data set of Dataset.save_to_disk, in Arrow's format, which is not read; convert it: python -c \"{command}\""))
}

#[cfg(test)]
mod tests {
    use crate::data::encode::tokenizer_handle::tests::model_dir;
    use crate::data::read::files::find_files;
    use std::path::Path;

    fn refusal(path: &Path) -> String {
        find_files(&[path.into()]).unwrap_err().to_string()
    }

    #[test]
    fn a_saved_data_set_is_named_with_the_command_that_converts_it() {
        let dir = model_dir(&[("state.json", "{}"), ("dataset_info.json", "{}"), ("data-00000-of-00001.arrow", "\u{7f}\0\0\0")]);
        let (folder, lines) = (dir.path().display().to_string(), dir.path().with_extension("jsonl").display().to_string());
        let command = format!("python -c \"import datasets; datasets.load_from_disk('{folder}').to_json('{lines}')\"");
        assert!(refusal(dir.path()).contains("a data set of Dataset.save_to_disk") && refusal(dir.path()).ends_with(&command));
        let splits = model_dir(&[("dataset_dict.json", "{}")]);
        assert!(refusal(splits.path()).contains(&format!("datasets.load_from_disk('{}')['train'].to_json(", splits.path().display())));
    }

    #[test]
    fn a_stream_and_a_file_of_arrow_have_each_the_command_that_reads_it() {
        let dir = model_dir(&[("stream.arrow", "\u{7f}\0\0\0"), ("file.arrow", "ARROW1\0\0"), ("old.feather", "FEA1")]);
        let at = |name: &str| refusal(&dir.path().join(name));
        let to = |name: &str| dir.path().join(name).display().to_string();
        let stream = format!("datasets.Dataset.from_file('{}').to_json('{}')\"", to("stream.arrow"), to("stream.jsonl"));
        assert!(at("stream.arrow").ends_with(&stream), "{}", at("stream.arrow"));
        for name in ["file.arrow", "old.feather"] {
            assert!(at(name).contains(&format!("pandas.read_feather('{}').to_json(", to(name))), "{}", at(name));
        }
    }

    #[test]
    fn files_that_describe_a_data_set_are_no_data() {
        let dir = model_dir(&[("dataset_info.json", "{}"), ("a.json", "[]")]);
        assert_eq!(find_files(&[dir.path().into()]).unwrap(), [dir.path().join("a.json")]);
    }
}

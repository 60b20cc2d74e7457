//! No input lies at a name that the run writes, or in a folder that it cleans; nor do its own log and timeline count as data.

use super::owned_names::named;
use super::sinks::metrics_file::METRICS;
use crate::checkpoint::CHECKPOINT;
use crate::config::settings::Settings;
use crate::data::read::files;
use crate::error::{Error, Result};
use crate::trace::file::TRACE;
use std::path::{Component, Path, PathBuf};

/// An input, and the flag that names it.
struct NamedInput<'a> {
    flag: &'static str,
    path: &'a Path,
    /// A checkpoint may be one: rotation keeps it until it is read.
    may_be_checkpoint: bool,
}

/// Rejects `settings` in which an input is also an output of the run.
///
/// # Errors
/// `Usage` that names the flag, the path and a remedy.
pub(super) fn check(settings: &Settings) -> Result<()> {
    let place = OutputPlace::of(&settings.output_dir);
    inputs(settings).into_iter().try_for_each(|input| place.refuse(&input))?;
    let mut data = settings.data.iter().map(|path| ("--data", path)).chain(settings.eval_data.iter().map(|path| ("--eval-data", path)));
    data.try_for_each(|(flag, path)| place.refuse_data(flag, path))
}

fn inputs(settings: &Settings) -> Vec<NamedInput<'_>> {
    let Settings { data, eval_data, model, chat_template, prompts, run_token_file, hardware, sources, .. } = settings;
    let mut inputs: Vec<_> = data.iter().map(|path| ("--data", path)).collect();
    inputs.extend(eval_data.iter().map(|path| ("--eval-data", path)));
    inputs.extend(model.iter().map(|path| ("--model", path)));
    inputs.extend(chat_template.iter().map(|path| ("--chat-template", path)));
    inputs.extend(prompts.iter().map(|path| ("--prompts", path)));
    inputs.extend(run_token_file.iter().map(|path| ("--run-token-file", path)));
    inputs.extend([("--hardware", hardware)]);
    inputs.extend(sources.iter().map(|path| ("--config", path)));
    inputs.into_iter().map(|(flag, path)| NamedInput { flag, path, may_be_checkpoint: flag == "--model" }).collect()
}

/// The output directory, as it is called and as it is.
struct OutputPlace<'a> {
    name: &'a Path,
    written: PathBuf,
    real: PathBuf,
}

impl<'a> OutputPlace<'a> {
    fn of(output_dir: &'a Path) -> Self {
        let written = absolute(output_dir);
        Self { name: output_dir, real: output_dir.canonicalize().unwrap_or(written.clone()), written }
    }

    /// Checks both the given name and the path it resolves to.
    fn refuse(&self, input: &NamedInput<'_>) -> Result<()> {
        let owned = [at_name(input.path), input.path.canonicalize().ok()].into_iter().flatten();
        let found = owned.filter_map(|path| self.owned(&path)).find(|owned| !input.may_be_checkpoint || !is_checkpoint(owned));
        let Some(owned) = found else { return Ok(()) };
        let (flag, path, dir) = (input.flag, input.path.display(), self.name.display());
        let cause = format_args!("the run itself writes {owned} in --output-dir {dir}; put it elsewhere, or name another --output-dir");
        Err(Error::usage(format_args!("{flag} {path}: {cause}")))
    }

    /// The first name of `path` below the directory, if it is the run's own.
    fn owned(&self, path: &Path) -> Option<String> {
        let below = path.strip_prefix(&self.real).ok()?;
        let Component::Normal(first) = below.components().next()? else { return None };
        named(first).map(|_| first.to_string_lossy().into_owned())
    }

    /// A directory or a pattern of data in which the run's own files would be found, now or at a later start; and links in a directory.
    fn refuse_data(&self, flag: &'static str, path: &Path) -> Result<()> {
        let own = [METRICS.pattern, TRACE.pattern];
        let is_here = path.is_dir() && path.canonicalize().is_ok_and(|real| real == self.real);
        let matched = own.into_iter().find(|name| self.is_matched(path, name));
        if let Some(name) = matched.or(is_here.then_some(METRICS.pattern)) {
            let (path, dir) = (path.display(), self.name.display());
            let cause =
                format_args!("the run's own {name} in --output-dir {dir} would count as data; name the files, or another --output-dir");
            return Err(Error::usage(format_args!("{flag} {path}: {cause}")));
        }
        // Missing files are rejected where the data is read.
        let found = files::find_files(&[path.to_path_buf()]).unwrap_or_default();
        let mut links = found.iter().filter(|file| file.is_symlink());
        links.try_for_each(|file| self.refuse(&NamedInput { flag, path: file, may_be_checkpoint: false }))
    }

    fn is_matched(&self, pattern: &Path, name: &str) -> bool {
        let patterns = [absolute(pattern), resolved(pattern)];
        let dirs = [&self.written, &self.real];
        patterns.iter().any(|pattern| dirs.into_iter().any(|dir| files::is_matched(pattern, &dir.join(name))))
    }
}

/// `pattern` with the directories before its first `*`, `?` or `[` resolved.
fn resolved(pattern: &Path) -> PathBuf {
    let pattern = absolute(pattern);
    let is_plain = |part: &Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']);
    let plain: PathBuf = pattern.components().take_while(is_plain).collect();
    let rest: PathBuf = pattern.components().skip_while(is_plain).collect();
    plain.canonicalize().unwrap_or(plain).join(rest)
}

fn is_checkpoint(name: &str) -> bool {
    CHECKPOINT.matches(name.as_ref())
}

/// The path itself, where it may be a link: its directory resolved, its name not.
fn at_name(path: &Path) -> Option<PathBuf> {
    let path = absolute(path);
    Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?))
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or(path.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn refused(settings: &Settings) -> Option<String> {
        check(settings).err().map(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    #[test]
    fn an_input_is_refused_at_a_name_that_the_run_writes_and_welcome_elsewhere() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        for name in [
            "r/.superoffload",
            "r/.checkpoint-4.tmp-1",
            "r/tb",
            "r/checkpoint-4/model",
            "r/corpus",
            "r/previous-1",
            "r/checkpoint-x",
            "elsewhere",
        ] {
            fs::create_dir_all(path(name)).unwrap();
        }
        symlink("r", path("link")).unwrap();
        let settings = || Settings { output_dir: path("r"), ..Settings::default() };
        let own =
            ["metrics.jsonl", "trace.json", ".lock", ".superoffload/a.txt", "tb/a.txt", ".checkpoint-4.tmp-1/a.txt", "checkpoint-4/a.txt"];
        for name in own {
            for dir in ["r", "link", "elsewhere/../r"] {
                let place = path(dir).join(name);
                fs::write(&place, "text").unwrap_or_default();
                let at = |settings: Settings| refused(&settings).unwrap_or_else(|| panic!("{}", place.display()));
                for text in [
                    at(Settings { data: vec![place.clone()], ..settings() }),
                    at(Settings { eval_data: vec![place.clone()], ..settings() }),
                    at(Settings { chat_template: Some(place.clone()), ..settings() }),
                    at(Settings { run_token_file: Some(place.clone()), ..settings() }),
                    at(Settings { hardware: place.clone(), ..settings() }),
                    at(Settings { sources: vec![place.clone()], ..settings() }),
                ] {
                    assert!(text.contains(place.to_str().unwrap()) && text.contains("the run itself writes"), "{text}");
                }
            }
        }
        for name in ["checkpoint-4", "checkpoint-4/model", "corpus", "."] {
            assert_eq!(refused(&Settings { model: Some(path("r").join(name)), ..settings() }), None, "{name}");
        }
        assert!(refused(&Settings { model: Some(path("r/tb")), ..settings() }).is_some());
        for name in ["r/corpus/a.txt", "r/a.txt", "r/data.json", "r/previous-1/a.txt", "r/checkpoint-x/a.txt", "elsewhere/metrics.jsonl"] {
            fs::write(path(name), "text").unwrap();
            assert_eq!(refused(&Settings { data: vec![path(name)], ..settings() }), None, "{name}");
        }
        assert_eq!(refused(&Settings { data: vec![path("r/corpus")], ..settings() }), None);
        symlink("../metrics.jsonl", path("r/corpus/b.jsonl")).unwrap();
        assert!(refused(&Settings { data: vec![path("r/corpus")], ..settings() }).unwrap().contains("corpus/b.jsonl"));
    }

    #[test]
    fn a_run_that_would_read_its_own_log_is_refused_at_its_first_start() {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        fs::create_dir(path("corpus")).unwrap();
        fs::write(path("corpus/a.jsonl"), "{}").unwrap();
        symlink("corpus", path("link")).unwrap();
        let at = |data: &str, out: &str| refused(&Settings { data: vec![path(data)], output_dir: path(out), ..Settings::default() });
        for data in [
            "corpus",
            "link",
            "corpus/*.jsonl",
            "link/*.jsonl",
            "corpus/../corpus/*.jsonl",
            "*/*.json*",
            "**/metrics.jsonl",
            "corpus/[mt]*",
        ] {
            let text = at(data, "corpus").unwrap_or_else(|| panic!("{data}"));
            assert!(text.contains("would count as data") && text.contains(data), "{text}");
        }
        assert!(at("**/*.jsonl", "corpus/not/yet/there").is_some());
        for (data, out) in [("corpus", "corpus/run"), ("corpus/a.jsonl", "corpus"), ("corpus/a*.jsonl", "corpus"), ("corpus", "out")] {
            assert_eq!(at(data, out), None, "{data} {out}");
        }
    }
}

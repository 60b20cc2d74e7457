//! Types of settings with words as values, and deserializers for values of a configuration file.

use crate::scalar::scalar;
use clap::ValueEnum;
use serde::de::value::StrDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

/// Origin of the initial parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitChoice {
    /// Seeded random values; only `config.json` is read.
    Random,
    /// The model directory's safetensors.
    Checkpoint,
}

/// Evaluation schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvalStrategy {
    /// Never.
    No,
    /// Every --eval-steps steps, and after the last step.
    Steps,
    /// When a pass over the data is complete, and after the last step.
    Epoch,
}

/// Destination of step metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportTo {
    /// `metrics.jsonl`, which every run writes.
    Jsonl,
    /// Event files in the output directory's folder `tb`.
    Tensorboard,
    /// Nowhere besides `metrics.jsonl`.
    None,
}

/// Tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenizerChoice {
    /// The model's `tokenizer.json`; bytes for a model of 256 ids that has none.
    Auto,
    /// Bytes.
    Bytes,
}

/// Device of forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceChoice {
    /// The GPU if this build and this machine have one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// Method to undo a failed speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rollback {
    /// Nothing is undone: the state is written only once the verdict is known. Exact.
    Deferred,
    /// The step is written at once and inverted by algebra, as in the paper. Loses bits.
    Inverse,
}

/// Format of weights, activations and gradients on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainDtype {
    /// 16 bits, the exponent of float32.
    Bfloat16,
    /// 16 bits, trained with dynamic loss scaling.
    Float16,
    /// 32 bits.
    Float32,
}

/// Format of the factors of layers' matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MatmulDtype {
    /// The format of weights and activations.
    Bfloat16,
    /// 8 bits, with a scale for each matrix.
    Fp8,
}

/// Whether a run changes its plan between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplanChoice {
    /// If steps differ from the plan's assumptions and another plan is faster.
    Auto,
    /// Never.
    Off,
    /// To random places at random steps, to test the engine.
    #[value(hide = true)]
    Random,
}

/// Checkpoint from which training continues.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", from = "PathBuf")]
pub enum Resume {
    /// The newest good one in the output directory; a fresh start when there is none.
    Auto,
    /// This one.
    Dir(PathBuf),
}

impl From<PathBuf> for Resume {
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "auto" { Self::Auto } else { Self::Dir(path) }
    }
}

/// GPUs that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuCount {
    /// All that are visible.
    All,
    /// This many.
    Count(usize),
}

impl FromStr for GpuCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            number => number.parse().map(Self::Count).map_err(|_| "expected a number of GPUs or `all`".to_string()),
        }
    }
}

/// Tokens whose rows of the token embedding and of the output matrix are trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrainTokens {
    /// The tokens that the model's tokenizer has beside its vocabulary.
    Added,
    /// These ids.
    Ids(Range<usize>),
}

impl fmt::Display for TrainTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added => f.write_str("added"),
            Self::Ids(Range { start, end }) => write!(f, "{start}..{end}"),
        }
    }
}

impl serde::Serialize for TrainTokens {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for TrainTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "added" {
            return Ok(Self::Added);
        }
        let ids = text.split_once("..").and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
        let Some(ids) = ids else {
            return Err("expected `added` or a range of ids START..END, such as `32000..32010` for the ids 32000 to 32009".into());
        };
        if ids.is_empty() { Err("the range is empty; its end is the id after the last token".into()) } else { Ok(Self::Ids(ids)) }
    }
}

/// Reads a string, or an object as its JSON.
pub(super) fn some_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(Some(value.as_str().map_or_else(|| value.to_string(), String::from)))
}

/// Reads a list, or one string as a list of one.
pub(super) fn one_or_many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<Vec<T>>, D::Error> {
    struct List<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string or a list of strings")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            T::deserialize(StrDeserializer::new(text)).map(|one| vec![one])
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = list.next_element()? {
                all.push(one);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_any(List(PhantomData)).map(Some)
}

pub(super) fn some_scalar<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    scalar(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_a_range_or_the_word_added() {
        for text in ["added", "0..1", "32000..32010"] {
            assert_eq!(text.parse::<TrainTokens>().unwrap().to_string(), text);
        }
        for (text, words) in [
            ("all", "expected `added` or a range"),
            ("3..", "expected `added` or a range"),
            ("-1..4", "expected `added` or a range"),
            ("5..5", "the range is empty"),
            ("9..3", "the range is empty"),
        ] {
            assert!(text.parse::<TrainTokens>().unwrap_err().contains(words), "{text}");
        }
    }
}

//! `--deepspeed FILE`: translates a DeepSpeed configuration into flags. Every key is used, ignored with a note, or an error.

use crate::config::deepspeed_keys::{KeyRule, nearest, rule};
use crate::config::document::{Document, DocumentEntry, DocumentNode, NodeValue, Place};
use crate::config::options::GpuCount;
use crate::config::settings::TrainOptions;
use crate::error::Result;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// DeepSpeed's default of `sub_group_size`. It is larger than any sensible bucket.
const SUB_GROUP_DEFAULT: f64 = 1e9;
/// Defaults of DeepSpeed's optimizers and schedulers.
const LR_DEFAULT: f64 = 1e-3;
const WARMUP_DEFAULT: i128 = 1000;
/// 2^53, up to which a float64 represents every whole number.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

type Understood<T> = std::result::Result<T, String>;

/// Merges `upper` over the options of the DeepSpeed configuration at `path`. A note lists the outcome of each key.
///
/// # Errors
/// `Io` or `Format` when the file cannot be read. `Usage` that names file, line, column and key for a key that is unknown or not available,
/// and in DeepSpeed's words where the product of the batch sizes is wrong.
pub(super) fn over_deepspeed(upper: TrainOptions, path: &Path) -> Result<TrainOptions> {
    Document::read(path, |document| {
        let (lower, table) = translate(&document, &upper)?;
        let mut options = upper.over(lower);
        options.notes.push(format!("deepspeed {}:{table}", path.display()));
        Ok(options)
    })
}

/// The options of the file merged below `upper`, and the table of its keys with one line per key.
fn translate(document: &Document, upper: &TrainOptions) -> Understood<(TrainOptions, String)> {
    let mut reader = KeyReader { upper, values: BTreeMap::new(), rows: Vec::new(), sets: Vec::new() };
    reader.visit("", &document.entries)?;
    reader.batch()?;
    reader.format()?;
    reader.optimizer()?;
    reader.scheduler()?;
    reader.offload()?;
    let mut options = TrainOptions::default();
    for set in &reader.sets {
        options = document.setting::<TrainOptions>(set.flag, DocumentNode { at: set.at, value: set.value.clone() })?.over(options);
    }
    Ok((options, reader.table()))
}

/// A flag set by a key.
struct FlagSet {
    from: String,
    at: Place,
    flag: &'static str,
    value: NodeValue,
}

/// A key, its value, and its outcome if no flag describes it.
struct KeyRow {
    path: String,
    value: String,
    fate: Option<String>,
}

struct KeyReader<'a> {
    upper: &'a TrainOptions,
    /// Values by path, without nulls.
    values: BTreeMap<String, &'a DocumentNode>,
    rows: Vec<KeyRow>,
    /// In ascending order of precedence.
    sets: Vec<FlagSet>,
}

impl<'a> KeyReader<'a> {
    /// Visits every key, one at a time.
    fn visit(&mut self, prefix: &str, entries: &'a [DocumentEntry]) -> Understood<()> {
        for DocumentEntry { at, key, node } in entries {
            let path = format!("{prefix}{key}");
            let unknown = || format!("{at}: unknown key `{}`; the nearest key is `{}`", path.escape_debug(), nearest(&path));
            let rule = rule(&path).ok_or_else(unknown)?;
            let refused = |why: &str| Err(format!("{at}: {path} {}: {why}", node.text()));
            let fate = match (rule, &node.value) {
                (_, NodeValue::Null) => Some("ignored: null".into()),
                (KeyRule::Group, NodeValue::Table(inner)) => {
                    self.visit(&format!("{path}."), inner)?;
                    continue;
                }
                (KeyRule::Group, _) => return refused("expected an object"),
                (_, NodeValue::Text(word)) if word == "auto" => Some("used: the default here, or the plan's choice".into()),
                (KeyRule::Off(_), value) if is_off(value) => Some("used: always so in this program".into()),
                (KeyRule::On(_), NodeValue::Truth(true)) => Some("used: always so in this program".into()),
                (KeyRule::Off(why) | KeyRule::On(why), _) => return refused(why),
                (KeyRule::Ignored(why), _) => Some(format!("ignored: {why}")),
                (KeyRule::Flag(_) | KeyRule::Read, NodeValue::Table(_)) => return refused("expected a value"),
                (KeyRule::Flag(flag), _) => {
                    self.set_node(&path, flag, node)?;
                    None
                }
                (KeyRule::Read, _) => None,
            };
            if node.value != NodeValue::Null {
                self.values.insert(path.clone(), node);
            }
            self.rows.push(KeyRow { path, value: node.text(), fate });
        }
        Ok(())
    }

    /// The node at `path`, unless it is absent or `"auto"`.
    fn node_at(&self, path: &str) -> Option<&'a DocumentNode> {
        self.values.get(path).copied().filter(|node| !is_auto(node))
    }

    fn has(&self, group: &str) -> bool {
        self.rows.iter().any(|row| row.path.starts_with(group))
    }

    fn truth(&self, path: &str) -> Understood<Option<bool>> {
        let read = |node: &DocumentNode| match node.value {
            NodeValue::Truth(truth) => Ok(truth),
            _ => Err(format!("{}: {path} {}: expected true or false", node.at, node.text())),
        };
        self.node_at(path).map(read).transpose()
    }

    /// The word at `path`, in lower case.
    fn word(&self, path: &str) -> Option<String> {
        self.node_at(path).map(|node| node.text().to_lowercase())
    }

    fn refuse<T>(&self, path: &str, why: &str) -> Understood<T> {
        let node = self.values.get(path);
        let (at, value) = node.map_or((Place::START, String::new()), |node| (node.at, node.text()));
        Err(format!("{at}: {path} {value}: {why}"))
    }

    fn number(&self, path: &str) -> Understood<Option<f64>> {
        match self.node_at(path).map(|node| &node.value) {
            None => Ok(None),
            Some(NodeValue::Integer(number)) => Ok(Some(*number as f64)),
            Some(NodeValue::Float(number)) => Ok(Some(*number)),
            Some(_) => self.refuse(path, "expected a number"),
        }
    }

    /// Like [`KeyReader::number`], for counts. `4e8` is a whole number, too.
    fn count(&self, path: &str) -> Understood<Option<usize>> {
        match self.number(path)? {
            Some(number) if number.fract() == 0.0 && (0.0..=WHOLE_MAX).contains(&number) => Ok(Some(number as usize)),
            Some(_) => self.refuse(path, "expected a whole number"),
            None => Ok(None),
        }
    }

    fn set(&mut self, from: &str, flag: &'static str, value: NodeValue) {
        let at = self.values.get(from).map_or(Place::START, |node| node.at);
        self.sets.push(FlagSet { from: from.into(), at, flag, value });
    }

    /// Sets a flag to the value as written. A float without a fraction becomes a whole number.
    fn set_node(&mut self, from: &str, flag: &'static str, node: &DocumentNode) -> Understood<()> {
        let value = match node.value {
            NodeValue::Float(number) if number.fract() == 0.0 && number.abs() <= WHOLE_MAX => NodeValue::Integer(number as i128),
            NodeValue::Truth(_) | NodeValue::Integer(_) | NodeValue::Float(_) => node.value.clone(),
            _ => return Err(format!("{}: {from} {}: expected a number, true, false or \"auto\"", node.at, node.text())),
        };
        self.sets.push(FlagSet { from: from.into(), at: node.at, flag, value });
        Ok(())
    }

    /// Records an absent key with a default that has an effect.
    fn absent(&mut self, path: &str, fate: Option<&str>) {
        self.rows.push(KeyRow { path: path.into(), value: "absent".into(), fate: fate.map(Into::into) });
    }

    fn fate(&mut self, path: &str, fate: &str) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.path == path) {
            row.fate.get_or_insert(fate.into());
        }
    }

    /// Batch sizes, as DeepSpeed completes and checks them.
    fn batch(&mut self) -> Understood<()> {
        let (micro_key, steps_key) = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps");
        let micro = self.upper.per_device_train_batch_size.map_or_else(|| self.count(micro_key), |given| Ok(Some(given)))?;
        let steps = self.upper.gradient_accumulation_steps.map_or_else(|| self.count(steps_key), |given| Ok(Some(given)))?;
        let Some(batch) = self.count("train_batch_size")? else { return Ok(()) };
        let world = match self.upper.gpus {
            None => 1,
            // Ranks that share sequences count as one batch.
            Some(GpuCount::Count(gpus)) => (gpus / self.upper.sequence_ranks.unwrap_or(1).max(1)).max(1),
            Some(GpuCount::All) => return self.refuse("train_batch_size", "cannot be combined with --gpus all; use --gpus N"),
        };
        let quotient = |of: usize, by: usize| of.checked_div(by).unwrap_or(0);
        let (all_micro, all_steps) = match (micro, steps) {
            (Some(micro), Some(steps)) => (micro, steps),
            (Some(micro), None) => (micro, quotient(quotient(batch, micro), world)),
            (None, Some(steps)) => (quotient(quotient(batch, world), steps), steps),
            (None, None) => (batch / world, 1),
        };
        for (name, size) in
            [("Train batch size", batch), ("Micro batch size per gpu", all_micro), ("Gradient accumulation steps", all_steps)]
        {
            if size == 0 {
                return self.refuse("train_batch_size", &format!("{name}: {size} has to be greater than 0"));
            }
        }
        if all_micro.checked_mul(all_steps).and_then(|product| product.checked_mul(world)) != Some(batch) {
            return self.refuse(
                "train_batch_size",
                &format!(
                    "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * \
                     world_size {batch} != {all_micro} * {all_steps} * {world}"
                ),
            );
        }
        for (key, flag, size) in
            [(micro_key, "per-device-train-batch-size", all_micro), (steps_key, "gradient-accumulation-steps", all_steps)]
        {
            if self.node_at(key).is_none() {
                self.set("train_batch_size", flag, NodeValue::Integer(size as i128));
            }
        }
        self.fate("train_batch_size", "used: equal to the product of the other sizes");
        Ok(())
    }

    /// The format of weights and gradients.
    fn format(&mut self) -> Understood<()> {
        let keys = [("bf16.enabled", "bfloat16"), ("bfloat16.enabled", "bfloat16"), ("fp16.enabled", "float16")];
        let mut chosen: Option<(&str, &str)> = None;
        for (key, format) in keys {
            if self.truth(key)? != Some(true) {
                continue;
            }
            if let Some((before, _)) = chosen {
                return self.refuse(key, &format!("{before} is true, too"));
            }
            chosen = Some((key, format));
        }
        let is_open = keys.iter().any(|(key, _)| self.values.get(*key).is_some_and(|node| is_auto(node)));
        match chosen {
            Some((key, format)) => self.set(key, "dtype", NodeValue::Text(format.into())),
            None if is_open => {}
            None => {
                let path = "bf16.enabled, fp16.enabled: true";
                self.absent(path, None);
                self.set(path, "dtype", NodeValue::Text("float32".into()));
            }
        }
        if !self.values.contains_key("gradient_clipping") {
            self.absent("gradient_clipping", None);
            self.set("gradient_clipping", "max-grad-norm", NodeValue::Integer(0));
        }
        Ok(())
    }

    fn optimizer(&mut self) -> Understood<()> {
        let name = self.word("optimizer.type");
        let decay = self.upper.weight_decay.map_or_else(|| self.number("optimizer.params.weight_decay"), |given| Ok(Some(given)))?;
        let has_l2 = self.truth("optimizer.params.adam_w_mode")? == Some(false) && name.as_deref() == Some("adam");
        match name.as_deref() {
            None | Some("adamw") => {}
            Some("adam") if !has_l2 || decay.unwrap_or(0.0) == 0.0 => {}
            Some("adam") => return self.refuse("optimizer.params.adam_w_mode", "L2 regularization is not available: AdamW decays weights"),
            Some(_) => {
                return self.refuse("optimizer.type", "the optimizer is AdamW: use AdamW, or Adam, which DeepSpeed runs as AdamW");
            }
        }
        self.fate("optimizer.type", "used: AdamW");
        let betas = "optimizer.params.betas";
        match self.node_at(betas).map(|node| &node.value) {
            None => {}
            Some(NodeValue::List(two)) if two.len() == 2 => {
                self.set_node(betas, "adam-beta1", &two[0])?;
                self.set_node(betas, "adam-beta2", &two[1])?;
            }
            Some(_) => return self.refuse(betas, "expected two numbers"),
        }
        let lr = "optimizer.params.lr";
        match self.node_at(lr) {
            Some(node) => self.set_node(lr, "learning-rate", node)?,
            None if self.has("optimizer.") && !self.values.contains_key(lr) => {
                self.absent(lr, None);
                self.set(lr, "learning-rate", NodeValue::Float(LR_DEFAULT));
            }
            None => {}
        }
        Ok(())
    }

    fn scheduler(&mut self) -> Understood<()> {
        if !self.has("scheduler.") {
            self.absent(
                "scheduler",
                Some("note: --lr-scheduler-type sets the schedule, linear by default; DeepSpeed would keep the rate constant"),
            );
            return Ok(());
        }
        let (kind, has_rate) = match self.word("scheduler.type").as_deref() {
            Some("warmuplr") => ("constant", true),
            Some("warmupdecaylr") => ("linear", true),
            Some("warmupcosinelr") => ("cosine", false),
            None => return Ok(()),
            Some(_) => return self.refuse("scheduler.type", "must be WarmupLR, WarmupDecayLR or WarmupCosineLR"),
        };
        self.set("scheduler.type", "lr-scheduler-type", NodeValue::Text(kind.into()));
        let steps = "scheduler.params.warmup_num_steps";
        if !self.values.contains_key(steps) {
            self.absent(steps, None);
            self.set(steps, "warmup-steps", NodeValue::Integer(WARMUP_DEFAULT));
        }
        let rate = "scheduler.params.warmup_max_lr";
        match self.node_at(rate) {
            Some(node) if has_rate => self.set_node(rate, "learning-rate", node)?,
            None if has_rate && !self.values.contains_key(rate) => {
                self.absent(rate, None);
                self.set(rate, "learning-rate", NodeValue::Float(LR_DEFAULT));
            }
            _ => {}
        }
        let form = "scheduler.params.warmup_type";
        match self.word(form).as_deref() {
            Some("linear") => self.fate(form, "used: always so in this program"),
            Some(_) => return self.refuse(form, "the warm-up is linear: use linear"),
            None if has_rate && !self.values.contains_key(form) => {
                self.absent(form, Some("note: the warm-up is linear here; DeepSpeed's default is logarithmic"));
            }
            None => {}
        }
        let total = "scheduler.params.total_num_steps";
        match self.node_at(total) {
            Some(_) if kind == "constant" => self.fate(total, "ignored: the rate stays constant"),
            Some(_) if self.upper.max_steps.or(self.upper.num_train_epochs.map(|_| 0)).is_some() => {
                self.fate(total, "not used: the rate falls over the run's number of steps, which is set elsewhere");
            }
            Some(node) => self.set_node(total, "max-steps", node)?,
            None => {}
        }
        Ok(())
    }

    fn offload(&mut self) -> Understood<()> {
        let stage = "zero_optimization.stage";
        if self.count(stage)?.is_some_and(|stage| stage > 3) {
            return self.refuse(stage, "must be from 0 to 3");
        }
        self.fate(stage, "used: the plan places weights and optimizer states");
        let (states, speculates) = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.super_offload");
        let strategy = match (self.word(states).as_deref(), self.truth(speculates)?) {
            (Some("cpu"), Some(true)) => Some("superoffload"),
            (Some("cpu"), _) => Some("zero-offload"),
            (_, Some(true)) => return self.refuse(speculates, "add \"device\": \"cpu\" beside it"),
            (Some("none"), _) => Some("no-offload"),
            (None, _) => None,
            (Some(_), _) => return self.refuse(states, "states are in host memory or on the device: use cpu or none"),
        };
        if let Some(strategy) = strategy {
            self.set(states, "strategy", NodeValue::Text(strategy.into()));
        }
        self.states_on_host(strategy)?;
        let weights = "zero_optimization.offload_param.device";
        match self.word(weights).as_deref() {
            Some("cpu") => self.set(weights, "weights", NodeValue::Text("flow".into())),
            Some("none") | None => self.fate(weights, "used: the plan decides"),
            Some(_) => return self.refuse(weights, "weights are in host memory or on the device: use cpu or none"),
        }
        let cores = "zero_optimization.offload_optimizer.cpuadam_cores_perc";
        match self.number(cores)? {
            Some(fraction) if (0.0..=1.0).contains(&fraction) => {
                let all = std::thread::available_parallelism().map_or(1, usize::from);
                self.set(cores, "threads", NodeValue::Integer((fraction * all as f64).floor().max(1.0) as i128));
            }
            Some(_) => return self.refuse(cores, "must be from 0 to 1"),
            None => {}
        }
        let group = "zero_optimization.sub_group_size";
        match self.count(group)?.map(|elements| elements as f64) {
            Some(elements) if elements == 0.0 || elements == SUB_GROUP_DEFAULT => {
                self.fate(group, "ignored: DeepSpeed's default; the plan chooses --bucket-mib");
            }
            Some(elements) => self.set(group, "bucket-mib", NodeValue::Float(elements * 2.0 / f64::from(1 << 20))),
            None => {}
        }
        let activations = "activation_checkpointing.cpu_checkpointing";
        if self.truth(activations)? == Some(true) {
            self.set(activations, "activations", NodeValue::Text("host".into()));
        }
        Ok(())
    }

    /// The fraction of the states in host memory, which the strategy or the plan decides.
    fn states_on_host(&mut self, strategy: Option<&str>) -> Understood<()> {
        let ratio = "zero_optimization.offload_optimizer.ratio";
        let Some(fraction) = self.number(ratio)? else { return Ok(()) };
        if !(0.0..=1.0).contains(&fraction) {
            return self.refuse(ratio, "must be from 0 to 1");
        }
        self.fate(
            ratio,
            match strategy {
                Some("zero-offload") if fraction == 1.0 => "used: always so in this program",
                Some("zero-offload") => "ignored: every state is in host memory; with \"super_offload\": true the plan chooses how many do",
                _ => "ignored: the plan chooses how many buckets stay on the device: --resident-buckets",
            },
        );
        Ok(())
    }

    /// The table with the outcome of each key, one line per key.
    fn table(&self) -> String {
        let given = self.upper.explicit_flags();
        let width = |of: fn(&KeyRow) -> &str| self.rows.iter().map(|row| of(row).chars().count()).max().unwrap_or(0);
        let (keys, values) = (width(|row| &row.path), width(|row| &row.value));
        let mut table = String::new();
        for row in &self.rows {
            let mut fate = row.fate.clone().unwrap_or_default();
            for (i, set) in self.sets.iter().enumerate().filter(|(_, set)| set.from == row.path) {
                let later = self.sets[i + 1..].iter().find(|later| later.flag == set.flag);
                let verdict = match later {
                    _ if given.contains(&set.flag.replace('-', "_").as_str()) => format!("not used: --{} is set elsewhere", set.flag),
                    Some(later) => format!("not used: {} wins, as in DeepSpeed", later.from),
                    None => format!("used: --{} {}", set.flag, DocumentNode { at: set.at, value: set.value.clone() }.text()),
                };
                fate = if row.fate.is_some() || fate.is_empty() { verdict } else { format!("{fate}; {verdict}") };
            }
            let fate = if fate.is_empty() { "used" } else { &fate };
            // Writing to a string does not fail.
            let _ = write!(table, "\n  {:keys$}  {:values$}  {fate}", row.path, row.value);
        }
        table
    }
}

fn is_auto(node: &DocumentNode) -> bool {
    matches!(&node.value, NodeValue::Text(word) if word == "auto")
}

fn is_off(value: &NodeValue) -> bool {
    match value {
        NodeValue::Truth(truth) => !truth,
        NodeValue::Integer(number) => *number == 0,
        NodeValue::Float(number) => *number == 0.0,
        NodeValue::Text(word) => word == "none",
        NodeValue::List(_) | NodeValue::Table(_) | NodeValue::Null => false,
    }
}

#[cfg(test)]
#[path = "deepspeed_tests.rs"]
mod tests;

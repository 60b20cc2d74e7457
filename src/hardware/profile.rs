//! Hardware profiles: a machine as numbers, which `probe` measures and the planner and the simulated device use.
//!
//! A profile is a TOML file of version [`VERSION`]. The program ships with profiles of some machines. Rates are measured with nothing else
//! running; [`Contention`] has the fractions that remain under concurrent load. Every number has a source.

mod table;

use super::peer_route::PeerRoute;
use super::sourced::{Curve, Number, quoted};
use crate::disk;
use crate::error::{Error, Result};
use crate::memory::Addressing;
use serde::Deserialize;
use std::fmt;
use std::path::Path;

/// Maximum size of a profile in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The default profile for unknown machines: a GPU with PCIe 5, measured.
pub(crate) const ASSUMED: &str = "h200-pcie5";

/// The profiles that ship with the program.
const SHIPPED: [(&str, &str); 22] = [
    ("h200-pcie5", include_str!("profiles/h200-pcie5.toml")),
    ("gh200-96", include_str!("profiles/gh200-96.toml")),
    ("gh200-144", include_str!("profiles/gh200-144.toml")),
    ("gb200", include_str!("profiles/gb200.toml")),
    ("gb300", include_str!("profiles/gb300.toml")),
    ("gb10", include_str!("profiles/gb10.toml")),
    ("h100", include_str!("profiles/h100.toml")),
    ("h100-pcie", include_str!("profiles/h100-pcie.toml")),
    ("b200", include_str!("profiles/b200.toml")),
    ("mi300a", include_str!("profiles/mi300a.toml")),
    ("a100-80", include_str!("profiles/a100-80.toml")),
    ("a100-40", include_str!("profiles/a100-40.toml")),
    ("l40s", include_str!("profiles/l40s.toml")),
    ("rtx-3090", include_str!("profiles/rtx-3090.toml")),
    ("rtx-4090", include_str!("profiles/rtx-4090.toml")),
    ("rtx-5090", include_str!("profiles/rtx-5090.toml")),
    ("rtx-6000-ada", include_str!("profiles/rtx-6000-ada.toml")),
    ("rtx-pro-6000", include_str!("profiles/rtx-pro-6000.toml")),
    ("h200-x2", include_str!("profiles/h200-x2.toml")),
    ("h200-x4", include_str!("profiles/h200-x4.toml")),
    ("h100-x2", include_str!("profiles/h100-x2.toml")),
    ("gh200-x4", include_str!("profiles/gh200-x4.toml")),
];

/// Version of the file format that this program reads and writes.
pub(crate) const VERSION: u32 = 1;
/// Maximum spread of samples without a warning. On quiet hosts of four H200 the spread was at most 14 % (24 % for pages of managed memory).
/// On busy hosts the optimizer's samples spread by 23 and 35 %, and plans were 13 to 25 % off: docs/performance.md.
const STEADY: f64 = 0.2;

/// A machine: its host, and one of its GPUs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// Name by which the profile is selected.
    pub name: String,
    /// Description of the machine.
    pub machine: String,
    /// Date of the numbers: `2026-11-21`.
    pub(crate) date: String,
    /// Further facts for the reader: kernel, driver, version of the measuring program.
    #[serde(default)]
    pub facts: Vec<String>,
    /// The GPU, if there is one.
    pub gpu: Option<Gpu>,
    /// The link between GPU and host; `None` if they share memory.
    pub link: Option<Link>,
    /// CPUs and their memory.
    pub host: Host,
    /// Rates of the CPUs as a device, if there is no GPU.
    pub cpu_device: Option<CpuDevice>,
    /// Rates under concurrent load.
    pub contention: Option<Contention>,
    /// Rates of several GPUs that work together; `None` with one GPU or without a measurement.
    pub together: Option<Together>,
    /// Network between several such machines; `None` if unknown.
    pub network: Option<Network>,
}

/// A field of a section.
trait Field {
    /// The error in the value, if any.
    fn nonsense(&self) -> Option<String>;

    /// The value in TOML; `None` if there is nothing to write.
    fn toml(&self) -> Option<String>;

    /// Table rows for the field `name`.
    fn rows(&self, name: &str) -> Vec<table::Row>;

    /// Spread of the samples, if the value was sampled.
    fn spread(&self) -> Option<f64> {
        None
    }
}

macro_rules! sourced_fields {
    ($($kind:ty => $rows:path),*) => {$(
        impl Field for $kind {
            fn nonsense(&self) -> Option<String> {
                self.nonsense()
            }
            fn toml(&self) -> Option<String> {
                Some(self.toml())
            }
            fn rows(&self, name: &str) -> Vec<table::Row> {
                $rows(name, self)
            }
            fn spread(&self) -> Option<f64> {
                self.spread
            }
        }
    )*};
}

sourced_fields!(Number => table::number, Curve => table::curve);

impl<T: Field> Field for Option<T> {
    fn nonsense(&self) -> Option<String> {
        self.as_ref().and_then(Field::nonsense)
    }
    fn toml(&self) -> Option<String> {
        self.as_ref().and_then(Field::toml)
    }
    fn rows(&self, name: &str) -> Vec<table::Row> {
        self.as_ref().map_or(Vec::new(), |field| field.rows(name))
    }
    fn spread(&self) -> Option<f64> {
        self.as_ref().and_then(Field::spread)
    }
}

impl Field for bool {
    fn nonsense(&self) -> Option<String> {
        None
    }
    fn toml(&self) -> Option<String> {
        self.then(|| "true".into())
    }
    fn rows(&self, name: &str) -> Vec<table::Row> {
        self.then(|| (name.into(), "yes".into(), String::new())).into_iter().collect()
    }
}

impl Field for Addressing {
    fn nonsense(&self) -> Option<String> {
        None
    }
    fn toml(&self) -> Option<String> {
        let word = match self {
            Self::Separate => "separate",
            Self::Managed => "managed",
            Self::Coherent => "shared",
        };
        Some(quoted(word))
    }
    fn rows(&self, name: &str) -> Vec<table::Row> {
        vec![(name.into(), String::new(), self.to_string())]
    }
}

impl Field for PeerRoute {
    fn nonsense(&self) -> Option<String> {
        None
    }
    fn toml(&self) -> Option<String> {
        (*self != Self::Own).then(|| quoted(self.word()))
    }
    fn rows(&self, name: &str) -> Vec<table::Row> {
        vec![(name.into(), String::new(), self.to_string())]
    }
}

/// Names and values of a section.
type Fields<'a> = Vec<(&'static str, &'a dyn Field)>;

macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Deserialize, PartialEq)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl $name {
            /// Names and values, in the order of the file.
            fn fields(&self) -> Fields<'_> {
                vec![$((stringify!($field), &self.$field)),*]
            }
        }
    };
}

section! {
    /// A GPU. Its rates are those of a training step, under its power limit.
    Gpu {
        /// GPU access to host memory.
        addressing: Addressing,
        /// GPU and CPUs share one memory: no states move, and both sections describe the same bytes.
        #[serde(default)]
        shares_host_memory: bool,
        /// Free memory.
        memory_bytes: Number,
        /// Bytes per second that pointwise kernels read and write.
        memory_bytes_per_s: Number,
        /// Sustained FLOP/s of large 16-bit matrix products.
        matmul_flops: Number,
        /// FLOP/s of such products in the first tenths of a second after a rest.
        matmul_burst_flops: Number,
        /// Fraction of [`Gpu::matmul_flops`] that a product reaches, by its smallest dimension.
        matmul_share_by_least_dim: Curve,
        /// Sustained FLOP/s of large FP8 products with a scale for each matrix. If absent, a multiple of [`Gpu::matmul_flops`] is assumed.
        fp8_matmul_flops: Option<Number>,
        /// FLOP/s of expert products by this program's kernels, by the mean rows of an expert. If absent, a fraction of single products is
        /// assumed.
        grouped_flops_by_rows: Option<Curve>,
        /// FLOP/s of expert products by cuBLASLt's grouped layouts, by the mean rows of an expert.
        cublaslt_grouped_flops_by_rows: Option<Curve>,
        /// FLOP/s of causal attention's forward pass, counted as in [`crate::model::flops::FLOPS_FORMULA`]: `2 heads head_dim S T`, half of
        /// the full matrix.
        attention_forward_flops: Number,
        /// FLOP/s of its deterministic backward pass, counted as twice the forward pass, although the scores are recomputed.
        attention_backward_flops: Number,
        /// Seconds of the driver's thread to enqueue a kernel.
        launch_s: Number,
        /// Device seconds of the smallest kernel, from the end of the previous one.
        kernel_s: Number,
    }
}

section! {
    /// Copies between pinned host memory and the GPU.
    Link {
        /// Bytes per second from the GPU to the host, for large copies with no copies in the other direction.
        to_host_bytes_per_s: Number,
        /// Bytes per second from the host to the GPU, for large copies with no copies in the other direction.
        to_device_bytes_per_s: Number,
        /// Bytes per second in each direction while both are busy.
        both_ways_bytes_per_s: Number,
        /// Fraction of its rate that a copy to the host reaches, by its bytes and including all waits.
        to_host_share_by_bytes: Curve,
        /// Fraction of its rate that a copy to the GPU reaches, by its bytes and including all waits.
        to_device_share_by_bytes: Curve,
        /// Seconds of the smallest copy.
        latency_s: Number,
        /// Bytes per second in each direction while pages of managed memory migrate; absent if none do.
        managed_bytes_per_s: Option<Number>,
    }
}

section! {
    /// CPUs and their memory.
    Host {
        /// CPUs that a run may use.
        cpus: Number,
        /// Free memory.
        memory_bytes: Number,
        /// Bytes per second that a triad on all CPUs reads and writes.
        memory_bytes_per_s: Number,
        /// Bytes per second that the optimizer's passes read and write, by threads. For a parameter with 16-bit gradient and weight, a step
        /// moves 28 bytes, and a commit with speculation 30 bytes.
        adam_bytes_per_s_by_threads: Curve,
        /// Bytes per second of the scalar optimizer, by threads. If absent, it is as fast as the vector one.
        adam_scalar_bytes_per_s_by_threads: Option<Curve>,
        /// Bytes per second that casts between fp32 and bf16 read and write, by threads.
        cast_bytes_per_s_by_threads: Curve,
        /// Seconds until waiting workers begin a new job.
        wake_up_s: Number,
    }
}

section! {
    /// The CPUs as a device, if there is no GPU: rates of all CPUs in bf16.
    CpuDevice {
        /// Bytes per second that pointwise kernels read and write.
        memory_bytes_per_s: Number,
        /// FLOP/s of large matrix products.
        matmul_flops: Number,
        /// As [`Gpu::matmul_share_by_least_dim`].
        matmul_share_by_least_dim: Curve,
        /// As [`Gpu::grouped_flops_by_rows`]. If absent, the rate of single products.
        grouped_flops_by_rows: Option<Curve>,
        /// As [`Gpu::attention_forward_flops`].
        attention_forward_flops: Number,
        /// As [`Gpu::attention_backward_flops`].
        attention_backward_flops: Number,
        /// Seconds of the driver's thread to enqueue a kernel.
        launch_s: Number,
        /// Seconds of the smallest kernel, from the end of the previous one.
        kernel_s: Number,
        /// Fraction of their rate that products keep while the optimizer runs with all threads on the same cores; half if absent.
        matmul_under_adam: Option<Number>,
        /// Fraction of its rate that the optimizer keeps during products; half if absent.
        adam_under_matmul: Option<Number>,
    }
}

section! {
    /// Fraction of a rate that remains under concurrent load, above 0 and at most 1.
    Contention {
        /// Matrix products during copies in both directions.
        matmul_under_copies: Number,
        /// Copies in each direction while the optimizer runs with all its threads.
        copies_under_adam: Number,
        /// The optimizer during copies.
        adam_under_copies: Number,
    }
}

section! {
    /// Several GPUs of one machine that train together, all of them busy. Rates are per GPU, unless a name says otherwise.
    Together {
        /// Number of GPUs of the machine.
        gpus: Number,
        /// Bytes per second that a GPU's copy engines pull from the memory of other GPUs, while all GPUs pull.
        peer_bytes_per_s: Number,
        /// Route of these copies.
        #[serde(default)]
        peer_route: PeerRoute,
        /// As [`Link::to_host_bytes_per_s`], on every link at once.
        to_host_bytes_per_s: Number,
        /// As [`Link::to_device_bytes_per_s`], on every link at once.
        to_device_bytes_per_s: Number,
        /// As [`Link::both_ways_bytes_per_s`], on every link at once.
        both_ways_bytes_per_s: Number,
        /// As [`Host::adam_bytes_per_s_by_threads`]: the optimizer pools of all GPUs together, on all CPUs.
        all_adam_bytes_per_s: Number,
    }
}

section! {
    /// The network between several machines of this kind, with one process each, while all of their GPUs send and receive.
    Network {
        /// Number of machines.
        machines: Number,
        /// Bytes per second of a GPU, in each direction.
        bytes_per_s: Number,
        /// Seconds of the smallest exchange.
        latency_s: Number,
    }
}

impl Profile {
    /// Loads the profile `name_or_file`: one that ships with the program, or a file.
    ///
    /// # Errors
    /// `Usage` if there is no such profile or file; `Io` if the file cannot be read; errors of [`Profile::parse`].
    pub fn load(name_or_file: &str) -> Result<Self> {
        let spelled = plain_name(name_or_file);
        if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == name_or_file || *name == spelled) {
            return Self::parse(text, Path::new(name));
        }
        let path = Path::new(name_or_file);
        if !path.exists() {
            let names = Self::names().join(", ");
            let nearest = Self::names_like(name_or_file).join(", ");
            let nearest = if nearest.is_empty() { nearest } else { format!("; nearest: {nearest}") };
            return Err(Error::usage(format!("no hardware profile `{name_or_file}`: neither a file nor one of {names}{nearest}")));
        }
        Self::parse(&disk::read_small_text(path, BYTES_MAX)?, path)
    }

    /// Names of shipped profiles whose GPU `name` mentions, as in `NVIDIA H100 80GB HBM3`.
    fn names_like(name: &str) -> Vec<&'static str> {
        let words = name.to_ascii_lowercase();
        let has_digit = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
        let words: Vec<&str> = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(has_digit).collect();
        Self::names().into_iter().filter(|known| known.split('-').take(2).any(|part| words.contains(&part))).collect()
    }

    /// Names of the profiles that ship with the program.
    pub fn names() -> [&'static str; SHIPPED.len()] {
        SHIPPED.map(|(name, _)| name)
    }

    /// Parses a profile; errors name `file`. Missing fields are those of the shipped profile that its key `like` names.
    ///
    /// # Errors
    /// `Format` with the field that is missing, unknown or out of range, or with the error in `like`.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let wrong = |e: &toml::de::Error| Error::format(file, one_line(text, e));
        let table: toml::Table = toml::from_str(text).map_err(|e| wrong(&e))?;
        let profile: Self = if table.contains_key("like") {
            // Lines of the completed text are not those of the file. Reading a table in place of text would compile the format twice.
            let text = whole(table).map_err(|cause| Error::format(file, cause))?.to_string();
            toml::from_str(&text).map_err(|e| Error::format(file, without_lines(&e)))?
        } else {
            toml::from_str(text).map_err(|e| wrong(&e))?
        };
        profile.check().map_err(|cause| Error::format(file, cause))?;
        Ok(profile)
    }

    /// Checks all values. The error names the field and the reason.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version {} of a hardware profile; this program reads {VERSION}", self.version));
        }
        for (section, fields) in self.sections() {
            if let Some((field, why)) = fields.into_iter().find_map(|(name, field)| field.nonsense().map(|why| (name, why))) {
                return Err(format!("{section}.{field}: {why}"));
            }
        }
        self.check_counts()?;
        self.check_contention()?;
        self.check_sections()
    }

    fn check_counts(&self) -> std::result::Result<(), String> {
        let counts = [
            ("host.cpus", Some(&self.host.cpus)),
            ("together.gpus", self.together.as_ref().map(|together| &together.gpus)),
            ("network.machines", self.network.as_ref().map(|network| &network.machines)),
        ];
        match counts.into_iter().find_map(|(field, count)| Some((field, count?.value)).filter(|(_, count)| count.fract() != 0.0)) {
            Some((field, count)) => Err(format!("{field}: {count} is not a whole number")),
            None => Ok(()),
        }
    }

    /// The shipped profiles of several GPUs that derive from the shipped profile `name`, directly or through others.
    pub(crate) fn several(name: &str) -> impl Iterator<Item = Self> {
        Self::derived(name).filter(|profile| profile.gpus() > 1)
    }

    /// The shipped profiles that derive from the shipped profile `name`, directly or through others.
    pub(crate) fn derived(name: &str) -> impl Iterator<Item = Self> {
        let base = |text: &str| like(&text.parse().ok()?).ok();
        let is_like =
            move |shipped: &&(&str, &str)| std::iter::successors(base(shipped.1), |(_, text)| base(text)).any(|(like, _)| *like == name);
        SHIPPED.iter().filter(is_like).filter_map(|(name, _)| Self::load(name).ok())
    }

    /// Number of GPUs of the machine with known rates.
    pub(crate) fn gpus(&self) -> usize {
        self.together.as_ref().map_or(1, |together| together.gpus.value as usize)
    }

    /// Number of machines with a known network.
    pub(crate) fn machines(&self) -> usize {
        self.network.as_ref().map_or(1, |network| network.machines.value as usize)
    }

    fn check_contention(&self) -> std::result::Result<(), String> {
        let (beside, cpus) = (self.contention.as_ref(), self.cpu_device.as_ref());
        let fractions = [
            ("contention.matmul_under_copies", beside.map(|beside| &beside.matmul_under_copies)),
            ("contention.copies_under_adam", beside.map(|beside| &beside.copies_under_adam)),
            ("contention.adam_under_copies", beside.map(|beside| &beside.adam_under_copies)),
            ("cpu_device.matmul_under_adam", cpus.and_then(|cpus| cpus.matmul_under_adam.as_ref())),
            ("cpu_device.adam_under_matmul", cpus.and_then(|cpus| cpus.adam_under_matmul.as_ref())),
        ];
        match fractions.into_iter().find_map(|(field, fraction)| Some((field, fraction.filter(|fraction| fraction.value > 1.0)?.value))) {
            Some((field, fraction)) => Err(format!("{field}: {fraction} is above 1")),
            None => Ok(()),
        }
    }

    /// Checks that the sections are consistent.
    fn check_sections(&self) -> std::result::Result<(), String> {
        let has_link = self.gpu.as_ref().is_some_and(|gpu| !gpu.shares_host_memory);
        for (section, is_there) in [("link", self.link.is_some()), ("contention", self.contention.is_some())] {
            match (has_link, is_there) {
                (true, false) => return Err(format!("missing section `{section}`: required for a GPU with its own memory")),
                (false, true) => return Err(format!("section `{section}`: only for a GPU with its own memory")),
                _ => {}
            }
        }
        if self.together.is_some() && !has_link {
            return Err("section `together`: only for GPUs with their own memory".into());
        }
        match (self.gpu.is_some(), self.cpu_device.is_some()) {
            (false, false) => Err("missing section `cpu_device`: without a section `gpu` the CPUs compute".into()),
            (true, true) => Err("section `cpu_device`: the CPUs compute only where there is no section `gpu`".into()),
            _ => Ok(()),
        }
    }

    /// A sentence about the numbers whose samples spread so much that plans may be off, because the machine was busy; `None` if there are
    /// none.
    pub fn unsteady(&self) -> Option<String> {
        let all = self.sections().flat_map(|(section, fields)| fields.into_iter().map(move |(name, field)| (section, name, field)));
        let spreads = all.filter_map(|(section, name, field)| Some((section, name, field.spread().filter(|spread| *spread > STEADY)?)));
        let listed: Vec<_> = spreads.map(|(section, name, spread)| format!("{section}.{name} by {:.0} %", 100.0 * spread)).collect();
        (!listed.is_empty()).then(|| format!("samples differ in {}; measure again when the machine is quiet", listed.join(", ")))
    }

    /// The sections of this profile.
    fn sections(&self) -> impl Iterator<Item = (&'static str, Fields<'_>)> {
        let gpu = self.gpu.as_ref().map(|gpu| ("gpu", gpu.fields()));
        let link = self.link.as_ref().map(|link| ("link", link.fields()));
        let contention = self.contention.as_ref().map(|contention| ("contention", contention.fields()));
        let cpu_device = self.cpu_device.as_ref().map(|device| ("cpu_device", device.fields()));
        let together = self.together.as_ref().map(|together| ("together", together.fields()));
        let network = self.network.as_ref().map(|network| ("network", network.fields()));
        [gpu, link, Some(("host", self.host.fields())), cpu_device, contention, together, network].into_iter().flatten()
    }
}

/// Words of a GPU's product name that no profile's name has.
const PRODUCT_WORDS: [&str; 10] = ["nvidia", "amd", "instinct", "geforce", "tesla", "sxm", "sxm5", "hbm3", "80gb", "blackwell"];

/// A profile's name as it ships, from another spelling of it: `NVIDIA H100 80GB HBM3` and `H100_SXM` are `h100`.
fn plain_name(spelling: &str) -> String {
    let spelling = spelling.to_ascii_lowercase();
    let words = spelling.split([' ', '-', '_']).filter(|word| !word.is_empty() && !PRODUCT_WORDS.contains(word));
    words.collect::<Vec<_>>().join("-")
}

/// The shipped profile that `table` names in `like`.
fn like(table: &toml::Table) -> std::result::Result<&'static (&'static str, &'static str), String> {
    let name = table.get("like").and_then(toml::Value::as_str);
    let shipped = SHIPPED.iter().find(|(shipped, _)| Some(*shipped) == name);
    shipped.ok_or_else(|| format!("like: not one of {}", Profile::names().join(", ")))
}

/// `table` completed from the profile that it names in `like`, recursively.
fn whole(mut table: toml::Table) -> std::result::Result<toml::Table, String> {
    if !table.contains_key("like") {
        return Ok(table);
    }
    let (_, of) = like(&table)?;
    table.remove("like");
    Ok(over(whole(of.parse().map_err(|e: toml::de::Error| e.message().to_string())?)?, table))
}

/// `base` with the fields of `table`, which take precedence, section by section.
fn over(mut base: toml::Table, table: toml::Table) -> toml::Table {
    for (name, value) in table {
        match (base.get_mut(&name).and_then(toml::Value::as_table_mut), value) {
            (Some(section), toml::Value::Table(fields)) => section.extend(fields),
            (_, value) => _ = base.insert(name, value),
        }
    }
    base
}

fn without_lines(error: &toml::de::Error) -> String {
    error.message().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The parse error in one line with its line number, without the text itself.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let message = without_lines(error);
    let line = error.span().map(|span| 1 + text.bytes().take(span.start).filter(|&byte| byte == b'\n').count());
    line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
}

impl fmt::Display for Profile {
    /// Writes a file that parses to this profile.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, name, machine, date, facts, .. } = self;
        let facts: Vec<_> = facts.iter().map(|fact| quoted(fact)).collect();
        write!(f, "version = {version}\nname = {}\nmachine = {}\ndate = {}\n", quoted(name), quoted(machine), quoted(date))?;
        writeln!(f, "facts = [{}]", facts.join(", "))?;
        for (section, fields) in self.sections() {
            writeln!(f, "\n[{section}]")?;
            for (name, text) in fields.into_iter().filter_map(|(name, field)| field.toml().map(|text| (name, text))) {
                writeln!(f, "{name} = {text}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BAD: [&str; 6] = ["0", "-1", "nan", "inf", "-inf", "1e300"];

    /// Each shipped profile, completed with the fields that it takes from another.
    fn shipped() -> impl Iterator<Item = String> {
        Profile::names().into_iter().map(|name| Profile::load(name).unwrap().to_string())
    }

    fn h200() -> &'static str {
        SHIPPED[0].1
    }

    fn parse(text: &str) -> Result<Profile> {
        Profile::parse(text, Path::new("here.toml"))
    }

    fn refused(text: &str) -> String {
        parse(text).expect_err(text).to_string()
    }

    /// The lines of `text` that set a field, each with its section.
    fn fields(text: &str) -> impl Iterator<Item = (&str, &str)> {
        let mut section = "";
        text.lines().filter_map(move |line| {
            section = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')).unwrap_or(section);
            line.contains(" = {").then_some((section, line))
        })
    }

    #[test]
    fn every_shipped_profile_is_valid_and_named_as_its_file() {
        for name in Profile::names() {
            let profile = Profile::load(name).unwrap();
            assert_eq!(profile.name, name);
            let Profile { host, gpu, .. } = &profile;
            assert_eq!(gpu.as_ref().is_some_and(|gpu| gpu.shares_host_memory), profile.link.is_none(), "{name}");
            let adam = &host.adam_bytes_per_s_by_threads.value;
            assert!(adam.at(1.0) < adam.at(host.cpus.value) && adam.0.last().unwrap().0 == host.cpus.value, "{name}");
            if let Some(link) = &profile.link {
                assert!(link.to_host_bytes_per_s.value < host.memory_bytes_per_s.value, "{name}: a host feeds its link");
                assert!(link.both_ways_bytes_per_s.value < link.to_host_bytes_per_s.value, "{name}");
            }
        }
    }

    #[test]
    fn written_values_read_back() {
        for profile in Profile::names().map(|name| Profile::load(name).unwrap()) {
            assert_eq!(parse(&profile.to_string()).unwrap(), profile);
        }
        let odd = Profile { facts: vec!["two\n\"lines\"".into(), "#".into()], ..Profile::load("mi300a").unwrap() };
        assert_eq!(parse(&odd.to_string()).unwrap(), odd);
    }

    #[test]
    fn every_nonsense_number_is_an_error_naming_file_and_field() {
        for text in shipped() {
            for (section, line) in fields(&text) {
                let (name, value) = line.split_once(" = { value = ").unwrap();
                let (_, rest) = value.split_once(", source").unwrap();
                for bad in BAD {
                    let bad = if value.starts_with('[') { format!("[[1, 2], [3, {bad}]]") } else { bad.into() };
                    let message = refused(&text.replace(line, &format!("{name} = {{ value = {bad}, source{rest}")));
                    assert!(message.starts_with("here.toml: ") && message.contains(&format!("{section}.{name}: ")), "{message}");
                }
            }
        }
    }

    #[test]
    fn numbers_of_other_sources_are_looked_at_too() {
        let message = refused(&h200().replacen("value = 669e12", "value = -669e12", 1));
        assert!(message.contains("gpu.matmul_flops"), "{message}");
    }

    const OPTIONAL: [&str; 5] = [
        "managed_bytes_per_s",
        "adam_scalar_bytes_per_s_by_threads",
        "fp8_matmul_flops",
        "grouped_flops_by_rows",
        "cublaslt_grouped_flops_by_rows",
    ];

    #[test]
    fn every_missing_or_unknown_field_is_named() {
        for text in shipped() {
            for (_, line) in fields(&text) {
                let (name, rest) = line.split_once(" = ").unwrap();
                let message = refused(&text.replace(line, &format!("{name}_ = {rest}")));
                assert!(message.contains(&format!("`{name}_`")), "{message}");
                if !OPTIONAL.contains(&name) {
                    let message = refused(&text.replace(line, ""));
                    assert!(message.contains(&format!("missing field `{name}`")), "{message}");
                }
            }
        }
        assert!(refused("").contains("version"));
    }

    #[test]
    fn mismatched_sections_are_refused() {
        let with = |from: &str, to: &str| {
            assert!(h200().contains(from), "{from}");
            refused(&h200().replacen(from, to, 1))
        };
        assert!(with("version = 1", "version = 2").contains("version 2"));
        assert!(with("cpus = { value = 16", "cpus = { value = 1.5").contains("host.cpus"));
        assert!(
            with("matmul_under_copies = { value = 0.92", "matmul_under_copies = { value = 1.2").contains("contention.matmul_under_copies")
        );
        assert!(with("source = \"the machine\"", "sauce = \"the machine\"").contains("sauce"));
        assert!(with("[[65536, 0.237]", "[[262145, 0.237]").contains("link.to_host_share_by_bytes: points must ascend"));
        assert!(with("addressing = \"managed\"", "addressing = \"managed\"\nshares_host_memory = true").contains("section `link`"));
        let (before, contention) = h200().split_once("[contention]").unwrap();
        assert!(refused(before).contains("missing section `contention`"));
        let host = &before[before.find("[host]").unwrap()..];
        let header = &h200()[..h200().find("[gpu]").unwrap()];
        assert!(refused(&format!("{header}{host}")).contains("section `cpu_device`"));
        let rate = |name: &str| format!("{name} = {{ value = 1e11, source = \"\" }}\n");
        let rates = ["memory_bytes_per_s", "matmul_flops", "attention_forward_flops", "attention_backward_flops", "launch_s", "kernel_s"];
        let curve = "matmul_share_by_least_dim = { value = [[1, 1.0]], source = \"\" }\n";
        let cpu_device = format!("[cpu_device]\n{}{curve}", rates.map(rate).concat());
        let cpus_only = format!("{header}{host}{cpu_device}");
        assert!(parse(&cpus_only).unwrap().gpu.is_none());
        assert!(
            refused(&format!("{cpus_only}{}", rate("matmul_under_adam"))).contains("cpu_device.matmul_under_adam: 100000000000 is above 1")
        );
        assert!(refused(&format!("{before}{cpu_device}[contention]{contention}")).contains("section `cpu_device`"));
        assert!(refused(&format!("{cpus_only}[contention]{contention}")).contains("section `contention`"));
    }

    #[test]
    fn missing_entries_of_a_profile_come_from_its_base_profile() {
        let [one, two] = ["h200-pcie5", "h200-x2"].map(|name| Profile::load(name).unwrap());
        assert_eq!((&two.gpu, &two.link, &two.contention), (&one.gpu, &one.link, &one.contention));
        assert!(two.host.cpus.value == 32.0 && two.host.wake_up_s == one.host.wake_up_s);
        assert_eq!([one.gpus(), two.gpus()], [1, 2]);
        assert_eq!([&two, &Profile::load("gh200-x4").unwrap()].map(Profile::machines), [1, 4]);
        let h100 = Profile::load("h100-x2").unwrap();
        assert_eq!((&h100.host, &h100.together, &h100.link), (&two.host, &two.together, &one.link), "like one that is like another");
        let names = |of: &str| Profile::several(of).map(|profile| profile.name).collect::<Vec<_>>();
        assert_eq!(names("h200-pcie5"), ["h200-x2", "h200-x4", "h100-x2"]);
        assert_eq!([names("gh200-96"), names("gb200")], [vec!["gh200-x4".to_string()], vec![]]);
        let text = SHIPPED.iter().find(|(name, _)| *name == "h200-x2").unwrap().1;
        let with = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            refused(&text.replacen(from, to, 1))
        };
        assert!(with("like = \"h200-pcie5\"", "like = \"h300\"").contains("like: not one of h200-pcie5"));
        assert!(with("like = \"h200-pcie5\"", "like = 1").contains("like: not one of"));
        assert!(with("like = \"h200-pcie5\"", "like = \"mi300a\"").contains("section `together`"));
        assert!(with("gpus = { value = 2", "gpus = { value = 2.5").contains("together.gpus: 2.5 is not a whole number"));
        assert!(with("peer_bytes_per_s", "pear_bytes_per_s").contains("pear_bytes_per_s"));
        let count = "[network]\nmachines = { value = 2.5, source = \"\" }\n[together]";
        let rates = "bytes_per_s = { value = 1e9, source = \"\" }\nlatency_s = { value = 1e-5, source = \"\" }\n[together]";
        assert!(with("[together]", &count.replace("[together]", rates)).contains("network.machines: 2.5 is not a whole number"));
        assert!(with("[together]", count).contains("missing field `bytes_per_s`"));
    }

    #[test]
    fn a_profile_is_found_in_any_spelling() {
        for (spelling, name) in [
            ("H100", "h100"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("h100_sxm", "h100"),
            ("H100 PCIe", "h100-pcie"),
            ("GH200 96", "gh200-96"),
            ("RTX PRO 6000 Blackwell", "rtx-pro-6000"),
            ("GeForce RTX 4090", "rtx-4090"),
            ("AMD Instinct MI300A", "mi300a"),
            ("B200", "b200"),
        ] {
            assert_eq!(Profile::load(spelling).unwrap().name, name, "{spelling}");
        }
        assert!(Profile::load("gb_300").is_err(), "a name is not cut into pieces");
    }

    #[test]
    fn profiles_of_machines_that_nobody_measured_say_so() {
        for name in ["b200", "gb300", "gb10", "rtx-pro-6000"] {
            let profile = Profile::load(name).unwrap();
            let gpu = profile.gpu.as_ref().unwrap();
            assert!(profile.machine.ends_with("; not measured"), "{name}");
            assert!(gpu.matmul_flops.source.starts_with("assumed") && gpu.matmul_flops.others[0].source.contains("data sheet"), "{name}");
        }
        let (h100, h200) = (Profile::load("h100").unwrap(), Profile::load("h200-pcie5").unwrap());
        assert!(h100.gpu.unwrap().memory_bytes.value < h200.gpu.unwrap().memory_bytes.value);
    }

    #[test]
    fn an_unknown_name_lists_the_known_names() {
        let error = Profile::load("tpu").unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("h200-pcie5, gh200-96"), "{error}");
        assert!(!error.to_string().contains("nearest"), "{error}");
        for (name, nearest) in [("h100-nvl", "h100, h100-pcie, h100-x2"), ("GeForce RTX 4090 D", "rtx-4090")] {
            let error = Profile::load(name).unwrap_err().to_string();
            assert!(error.ends_with(&format!("; nearest: {nearest}")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn damaged_profiles_never_panic(which in 0..SHIPPED.len(), from in any::<prop::sample::Index>(), cut in 0usize..200, with in "\\PC{0,8}|[0-9.e\\[\\]{},= -]{0,8}") {
            let text = SHIPPED[which].1;
            let boundary = |at: usize| (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            let from = boundary(from.index(text.len()));
            let _ = parse(&format!("{}{with}{}", &text[..from], &text[boundary(from + cut)..]));
        }
    }
}

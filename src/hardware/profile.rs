//! A machine as numbers: what `probe` writes, the planner predicts from, and the simulated device obeys.
//!
//! A profile is a TOML file of version [`VERSION`]; those of some machines ship with the program. Rates hold alone, with nothing
//! else running; [`Contention`] says what is left of them when others run beside. Every number names its source.

mod table;

use super::peer_route::PeerRoute;
use super::sourced::{Curve, Number, quoted};
use crate::disk;
use crate::error::{Error, Result};
use crate::memory::Addressing;
use serde::Deserialize;
use std::fmt;
use std::path::Path;

/// No profile is larger.
const BYTES_MAX: u64 = 1 << 20;

/// The one that is assumed where nobody says better: a GPU with PCIe 5, measured.
pub(crate) const ASSUMED: &str = "h200-pcie5";

/// The profiles that ship with the program.
const SHIPPED: [(&str, &str); 17] = [
    ("h200-pcie5", include_str!("profiles/h200-pcie5.toml")),
    ("gh200-96", include_str!("profiles/gh200-96.toml")),
    ("gh200-144", include_str!("profiles/gh200-144.toml")),
    ("gb200", include_str!("profiles/gb200.toml")),
    ("h100-pcie", include_str!("profiles/h100-pcie.toml")),
    ("mi300a", include_str!("profiles/mi300a.toml")),
    ("a100-80", include_str!("profiles/a100-80.toml")),
    ("a100-40", include_str!("profiles/a100-40.toml")),
    ("l40s", include_str!("profiles/l40s.toml")),
    ("rtx-3090", include_str!("profiles/rtx-3090.toml")),
    ("rtx-4090", include_str!("profiles/rtx-4090.toml")),
    ("rtx-5090", include_str!("profiles/rtx-5090.toml")),
    ("rtx-6000-ada", include_str!("profiles/rtx-6000-ada.toml")),
    ("h200-x2", include_str!("profiles/h200-x2.toml")),
    ("h200-x4", include_str!("profiles/h200-x4.toml")),
    ("h100-x2", include_str!("profiles/h100-x2.toml")),
    ("gh200-x4", include_str!("profiles/gh200-x4.toml")),
];

/// The form of the files that this program reads and writes.
pub(crate) const VERSION: u32 = 1;
/// On quiet hosts of four H200s samples lay within 14 % (managed memory's pages within 24 %), on busy ones the optimizer's within 23 and 35 %,
/// and plans were 13 to 25 % off: docs/performance.md.
const STEADY: f64 = 0.2;

/// A machine: its host, and one of its GPUs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// What it is asked for by.
    pub name: String,
    /// What it is, for people.
    pub machine: String,
    /// Day on which the numbers were put together: `2026-11-21`.
    pub(crate) date: String,
    /// Other facts, for people: kernel, driver, the program that measured.
    #[serde(default)]
    pub facts: Vec<String>,
    /// The GPU, if there is one.
    pub gpu: Option<Gpu>,
    /// What joins GPU and host; nothing does where they share memory.
    pub link: Option<Link>,
    /// CPUs and their memory.
    pub host: Host,
    /// CPUs that compute, where there is no GPU.
    pub cpu_device: Option<CpuDevice>,
    /// What happens to rates where a link is busy.
    pub contention: Option<Contention>,
    /// What several of its GPUs do together; absent where it has one, or nobody measured.
    pub together: Option<Together>,
    /// What joins several such machines; absent where nobody says.
    pub network: Option<Network>,
}

/// A value of a section.
trait Field {
    /// What makes no sense about it.
    fn nonsense(&self) -> Option<String>;

    /// As TOML writes it; nothing when there is nothing to write.
    fn toml(&self) -> Option<String>;

    /// Rows of a table for people, about the field `name`.
    fn rows(&self, name: &str) -> Vec<table::Row>;

    /// How far its samples lie from it, where it was sampled.
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
            /// Names and values, in the order in which they are written.
            fn fields(&self) -> Fields<'_> {
                vec![$((stringify!($field), &self.$field)),*]
            }
        }
    };
}

section! {
    /// A GPU. Its rates are those of a training step, under its power limit.
    Gpu {
        /// What its kernels reach of the host's memory.
        addressing: Addressing,
        /// GPU and CPUs have one memory: no states move, and the bytes of both sections are the same ones.
        #[serde(default)]
        shares_host_memory: bool,
        /// Free memory.
        memory_bytes: Number,
        /// Bytes a second, read and written, of pointwise kernels.
        memory_bytes_per_s: Number,
        /// FLOPs a second of large 16-bit matrix products for as long as one likes.
        matmul_flops: Number,
        /// The same for the first tenths of a second after a rest.
        matmul_burst_flops: Number,
        /// The share of [`Gpu::matmul_flops`] that a product gets whose smallest dimension is so many elements.
        matmul_share_by_least_dim: Curve,
        /// FLOPs a second of large products in FP8 with a scale for each matrix, for as long as one likes; absent: a multiple of
        /// [`Gpu::matmul_flops`] is assumed.
        fp8_matmul_flops: Option<Number>,
        /// FLOPs a second of products of experts by own kernels, by the mean rows of an expert; absent: a share of single products is assumed.
        grouped_flops_by_rows: Option<Curve>,
        /// The same where cuBLASLt's grouped layouts compute them.
        cublaslt_grouped_flops_by_rows: Option<Curve>,
        /// FLOPs a second of causal attention's forward pass, counted as [`crate::model::flops::FLOPS_FORMULA`] does:
        /// `2 heads head_dim S T`, half of the full matrix.
        attention_forward_flops: Number,
        /// The same of its deterministic backward pass, counted as twice the forward pass, though the scores are computed again.
        attention_backward_flops: Number,
        /// Seconds of the driver's thread to enqueue a kernel.
        launch_s: Number,
        /// Seconds that the smallest kernel takes on the device, from the end of the one before it.
        kernel_s: Number,
    }
}

section! {
    /// Copies between pinned host memory and the GPU.
    Link {
        /// Bytes a second from the GPU to the host: large copies, nothing the other way.
        to_host_bytes_per_s: Number,
        /// The same from the host to the GPU.
        to_device_bytes_per_s: Number,
        /// Bytes a second each way while both ways are busy.
        both_ways_bytes_per_s: Number,
        /// Share of its rate that a copy of so many bytes to the host gets, all it waits for included.
        to_host_share_by_bytes: Curve,
        /// The same to the GPU.
        to_device_share_by_bytes: Curve,
        /// Seconds that the smallest copy takes.
        latency_s: Number,
        /// Bytes a second each way while pages of managed memory come and go; absent where none do.
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
        /// Bytes read and written a second, triad, all CPUs.
        memory_bytes_per_s: Number,
        /// Bytes that the optimizer's passes read and write a second, by threads. A parameter with 16-bit gradient and weight is 28
        /// bytes to step, and 30 to commit and speculate on.
        adam_bytes_per_s_by_threads: Curve,
        /// The same of the scalar optimizer; absent: as fast.
        adam_scalar_bytes_per_s_by_threads: Option<Curve>,
        /// Bytes that casts between fp32 and bf16 read and write a second, by threads.
        cast_bytes_per_s_by_threads: Curve,
        /// Seconds until workers that wait begin a new job.
        wake_up_s: Number,
    }
}

section! {
    /// The CPUs as a device: what they compute where there is no GPU, on all of them, in bf16.
    CpuDevice {
        /// Bytes a second, read and written, of pointwise kernels.
        memory_bytes_per_s: Number,
        /// FLOPs a second of large matrix products.
        matmul_flops: Number,
        /// As [`Gpu::matmul_share_by_least_dim`].
        matmul_share_by_least_dim: Curve,
        /// As [`Gpu::grouped_flops_by_rows`]; absent: as single products.
        grouped_flops_by_rows: Option<Curve>,
        /// As [`Gpu::attention_forward_flops`].
        attention_forward_flops: Number,
        /// As [`Gpu::attention_backward_flops`].
        attention_backward_flops: Number,
        /// Seconds of the driver's thread to enqueue a kernel.
        launch_s: Number,
        /// Seconds that the smallest kernel takes, from the end of the one before it.
        kernel_s: Number,
        /// The share of their rate that products keep while the optimizer runs on all its threads, on the same cores; absent: half.
        matmul_under_adam: Option<Number>,
        /// The share of its rate that the optimizer keeps beside products; absent: half.
        adam_under_matmul: Option<Number>,
    }
}

section! {
    /// The share that is left of a rate, above 0 and at most 1, while something else runs beside.
    Contention {
        /// Matrix products, while copies go both ways.
        matmul_under_copies: Number,
        /// Copies, each way, while the optimizer runs on all its threads.
        copies_under_adam: Number,
        /// The optimizer, while copies run.
        adam_under_copies: Number,
    }
}

section! {
    /// Several GPUs of one machine that train together, all of them busy. Rates are those of each, unless a name says otherwise.
    Together {
        /// GPUs of the machine.
        gpus: Number,
        /// Bytes a second that a GPU's copy engines pull out of other GPUs' memory, while all pull.
        peer_bytes_per_s: Number,
        /// What these copies pass.
        #[serde(default)]
        peer_route: PeerRoute,
        /// As [`Link::to_host_bytes_per_s`], on every link at once.
        to_host_bytes_per_s: Number,
        /// As [`Link::to_device_bytes_per_s`], on every link at once.
        to_device_bytes_per_s: Number,
        /// As [`Link::both_ways_bytes_per_s`], on every link at once.
        both_ways_bytes_per_s: Number,
        /// As [`Host::adam_bytes_per_s_by_threads`]: the pools of all GPUs together, on all CPUs.
        all_adam_bytes_per_s: Number,
    }
}

section! {
    /// What joins several machines of this kind, a process on each, while all of their GPUs send and receive.
    Network {
        /// Machines.
        machines: Number,
        /// Bytes a second of a GPU, each way.
        bytes_per_s: Number,
        /// Seconds that the smallest exchange takes.
        latency_s: Number,
    }
}

impl Profile {
    /// The profile that `name_or_file` names: one that ships with the program, or a file.
    ///
    /// # Errors
    /// `Usage` when there is neither; `Io` when a file cannot be read; those of [`Profile::parse`].
    pub fn load(name_or_file: &str) -> Result<Self> {
        if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == name_or_file) {
            return Self::parse(text, Path::new(name));
        }
        let path = Path::new(name_or_file);
        if !path.exists() {
            let names = Self::names().join(", ");
            return Err(Error::usage(format!("no hardware profile `{name_or_file}`: neither a file nor one of {names}")));
        }
        Self::parse(&disk::read_small_text(path, BYTES_MAX)?, path)
    }

    /// The names of the profiles that ship with the program.
    pub fn names() -> [&'static str; SHIPPED.len()] {
        SHIPPED.map(|(name, _)| name)
    }

    /// Reads a profile; `file` is named in errors. What it does not say is that of the shipped profile `like`, if it names one.
    ///
    /// # Errors
    /// `Format` naming the field that lacks, that nobody knows, or whose number makes no sense; or what is wrong with `like`.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let wrong = |e: &toml::de::Error| Error::format(file, one_line(text, e));
        let table: toml::Table = toml::from_str(text).map_err(|e| wrong(&e))?;
        let profile: Self = match table.contains_key("like") {
            false => toml::from_str(text).map_err(|e| wrong(&e))?,
            true => whole(table).map_err(|cause| Error::format(file, cause))?.try_into().map_err(|e| wrong(&e))?,
        };
        profile.check().map_err(|cause| Error::format(file, cause))?;
        Ok(profile)
    }

    /// Looks for what makes no sense: which field, and why.
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

    /// The shipped profiles of several GPUs that are like the shipped profile `name`, or like one that is.
    pub(crate) fn several(name: &str) -> impl Iterator<Item = Self> {
        let base = |text: &str| like(&text.parse().ok()?).ok();
        let is_like =
            move |shipped: &&(&str, &str)| std::iter::successors(base(shipped.1), |(_, text)| base(text)).any(|(like, _)| *like == name);
        SHIPPED.iter().filter(is_like).filter_map(|(name, _)| Self::load(name).ok()).filter(|profile| profile.gpus() > 1)
    }

    /// GPUs of the machine whose rates are known.
    pub(crate) fn gpus(&self) -> usize {
        self.together.as_ref().map_or(1, |together| together.gpus.value as usize)
    }

    /// Such machines that a network joins, as far as it is known.
    pub(crate) fn machines(&self) -> usize {
        self.network.as_ref().map_or(1, |network| network.machines.value as usize)
    }

    fn check_contention(&self) -> std::result::Result<(), String> {
        let (beside, cpus) = (self.contention.as_ref(), self.cpu_device.as_ref());
        let shares = [
            ("contention.matmul_under_copies", beside.map(|beside| &beside.matmul_under_copies)),
            ("contention.copies_under_adam", beside.map(|beside| &beside.copies_under_adam)),
            ("contention.adam_under_copies", beside.map(|beside| &beside.adam_under_copies)),
            ("cpu_device.matmul_under_adam", cpus.and_then(|cpus| cpus.matmul_under_adam.as_ref())),
            ("cpu_device.adam_under_matmul", cpus.and_then(|cpus| cpus.adam_under_matmul.as_ref())),
        ];
        match shares.into_iter().find_map(|(field, share)| Some((field, share.filter(|share| share.value > 1.0)?.value))) {
            Some((field, share)) => Err(format!("{field}: {share} is more than all, 1")),
            None => Ok(()),
        }
    }

    /// Whether the sections are there that belong together.
    fn check_sections(&self) -> std::result::Result<(), String> {
        let has_link = self.gpu.as_ref().is_some_and(|gpu| !gpu.shares_host_memory);
        for (section, is_there) in [("link", self.link.is_some()), ("contention", self.contention.is_some())] {
            match (has_link, is_there) {
                (true, false) => return Err(format!("missing section `{section}`: a GPU with its own memory has one")),
                (false, true) => return Err(format!("section `{section}`: only a GPU with its own memory has one")),
                _ => {}
            }
        }
        if self.together.is_some() && !has_link {
            return Err("section `together`: only GPUs with their own memory have one".into());
        }
        match (self.gpu.is_some(), self.cpu_device.is_some()) {
            (false, false) => Err("missing section `cpu_device`: without a section `gpu` the CPUs compute".into()),
            (true, true) => Err("section `cpu_device`: the CPUs compute only where there is no section `gpu`".into()),
            _ => Ok(()),
        }
    }

    /// The numbers whose samples differ so much that plans may be off, as a sentence: something else ran on the machine meanwhile.
    pub fn unsteady(&self) -> Option<String> {
        let all = self.sections().flat_map(|(section, fields)| fields.into_iter().map(move |(name, field)| (section, name, field)));
        let spreads = all.filter_map(|(section, name, field)| Some((section, name, field.spread().filter(|spread| *spread > STEADY)?)));
        let listed: Vec<_> = spreads.map(|(section, name, spread)| format!("{section}.{name} by {:.0} %", 100.0 * spread)).collect();
        (!listed.is_empty()).then(|| format!("samples differ in {}; measure again when the machine is quiet", listed.join(", ")))
    }

    /// The sections that are there.
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

/// The shipped profile that `table` is like.
fn like(table: &toml::Table) -> std::result::Result<&'static (&'static str, &'static str), String> {
    let name = table.get("like").and_then(toml::Value::as_str);
    let shipped = SHIPPED.iter().find(|(shipped, _)| Some(*shipped) == name);
    shipped.ok_or_else(|| format!("like: not one of {}", Profile::names().join(", ")))
}

/// `table` with what it leaves to the profile that it is like, and that one to another.
fn whole(mut table: toml::Table) -> std::result::Result<toml::Table, String> {
    if !table.contains_key("like") {
        return Ok(table);
    }
    let (_, of) = like(&table)?;
    table.remove("like");
    Ok(over(whole(of.parse().map_err(|e: toml::de::Error| e.message().to_string())?)?, table))
}

/// `table` and what it leaves out of `base`, field by field of each section.
fn over(mut base: toml::Table, table: toml::Table) -> toml::Table {
    for (name, value) in table {
        match (base.get_mut(&name).and_then(toml::Value::as_table_mut), value) {
            (Some(section), toml::Value::Table(fields)) => section.extend(fields),
            (_, value) => _ = base.insert(name, value),
        }
    }
    base
}

/// What is wrong with `text`, and in which line, without showing it.
fn one_line(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    let line = error.span().map(|span| 1 + text.bytes().take(span.start).filter(|&byte| byte == b'\n').count());
    line.map_or_else(|| message.clone(), |line| format!("line {line}: {message}"))
}

impl fmt::Display for Profile {
    /// The file that reads back as this profile.
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

    /// Each whole: with what it leaves to another.
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

    /// The lines of `text` that set a field, with the section that they are in.
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
    fn what_is_written_reads_back() {
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
    fn what_does_not_belong_together_is_refused() {
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
            refused(&format!("{cpus_only}{}", rate("matmul_under_adam"))).contains("cpu_device.matmul_under_adam: 100000000000 is more")
        );
        assert!(refused(&format!("{before}{cpu_device}[contention]{contention}")).contains("section `cpu_device`"));
        assert!(refused(&format!("{cpus_only}[contention]{contention}")).contains("section `contention`"));
    }

    #[test]
    fn what_a_profile_leaves_out_is_that_of_the_one_it_is_like() {
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
    fn an_unknown_name_lists_what_there_is() {
        let error = Profile::load("tpu").unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("h200-pcie5, gh200-96"), "{error}");
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

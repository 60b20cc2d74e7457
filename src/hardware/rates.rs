//! Rates of a machine, derived from its profile, for predictions and the simulated device.

use crate::hardware::grouped_rates::{ExpertProducts, GroupedRates};
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::profile::{ASSUMED, Contention, CpuDevice, Gpu, Link, Network, Profile};
use crate::hardware::sourced::{Number, Points};
use crate::optim::moments::Moments;
use crate::optim::simd::Isa;
use crate::optim::split::Masters;
use std::sync::{Arc, OnceLock};

/// Rate of optimizer passes with bfloat16 moments relative to fp32 moments, in bytes per second. Stochastic rounding and narrowing take
/// time that memory accesses do not hide. Three workloads on an H200's host had 0.91, 0.94 and 0.96
/// (`paper-figures/results/h200-moments.jsonl`).
const PACKED_FRACTION: f64 = 0.93;

/// Rate of optimizer passes with 8-bit moments relative to fp32 moments. Clipped steps of Llama-8B on two H200 hosts had 0.75 and 0.77
/// (`paper-figures/results/h200-int8.jsonl`).
const INT8_FRACTION: f64 = 0.75;

/// Rate of the step of split masters with 8-bit moments relative to fp32 masters and moments. Arithmetic takes as long as with fp32 masters,
/// and fewer bytes pass beside it. Steps of Qwen3-30B-A3B on an H200's host had 0.58 and 0.60 (`paper-figures/results/h200-int8.jsonl`).
const SPLIT_INT8_FRACTION: f64 = 0.6;

/// Formats of a state that the host steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HostFormats {
    pub(crate) moments: Moments,
    pub(crate) masters: Masters,
}

impl From<Moments> for HostFormats {
    fn from(moments: Moments) -> Self {
        Self { moments, masters: Masters::Float32 }
    }
}

/// Assumed speedup of large FP8 products over bfloat16, for profiles without a measurement: the ratio that NVIDIA states for Hopper.
const FP8_SPEEDUP: f64 = 1.75;

/// Rates between processes, in each direction, while all of their GPUs exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NetworkRates {
    /// Bytes per second of a GPU.
    pub(crate) bytes_per_s: f64,
    /// Seconds of the smallest exchange.
    latency_s: f64,
}

impl NetworkRates {
    /// Seconds in which a GPU receives `bytes` and sends equally many.
    pub(crate) fn exchange_s(self, bytes: usize) -> f64 {
        self.latency_s + bytes as f64 / self.bytes_per_s
    }
}

/// Kernels of attention, where their time differs from the measured one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionKernels {
    /// The kernels whose rate the profile has. Keys that a window hides take no time.
    AsMeasured,
    /// cuDNN's deterministic kernels: keys that a window hides take time in the backward pass. GPT-OSS-20B's layers take 10.8 ms with a window of
    /// 128 tokens, and 10.4 ms with all 4096 (`paper-figures/log/2026-11.md`).
    Deterministic,
    /// This program's plain kernels on a GPU.
    Plain,
    /// Products, for all shapes.
    Products,
    /// cuDNN's kernels and products; see [`Attention::CudnnOrProducts`](crate::device::Attention::CudnnOrProducts).
    CudnnOrProducts { deterministic: bool },
}

/// Rates of kernels, copies and the optimizer without concurrent load, unless a name says otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    pub profile: String,
    large_matmul_flops: f64,
    matmul_share_by_least_dim: Points,
    /// Speedup of FP8 products, if the profile has it.
    fp8_speedup: Option<f64>,
    grouped: GroupedRates,
    /// FLOP/s of attention's forward pass.
    pub(crate) attention_forward_flops: f64,
    /// FLOP/s of attention's backward pass, counted as twice the forward pass.
    pub(crate) attention_backward_flops: f64,
    /// Kernels of attention.
    attention: AttentionKernels,
    /// Bytes per second that pointwise kernels read and write.
    pub(crate) device_bytes_per_s: f64,
    /// Seconds of the driver to enqueue an operation.
    pub launch_s: f64,
    /// Seconds of the smallest kernel.
    pub kernel_s: f64,
    /// Bytes per second of large copies from the device to the host.
    pub(crate) to_host_bytes_per_s: f64,
    /// Bytes per second of large copies from the host to the device.
    pub(crate) to_device_bytes_per_s: f64,
    /// Bytes per second in each direction while both are busy.
    pub(crate) both_ways_bytes_per_s: f64,
    to_host_share_by_bytes: Points,
    to_device_share_by_bytes: Points,
    /// Seconds of the smallest copy.
    pub(crate) latency_s: f64,
    /// Bytes per second pulled from the memory of other GPUs.
    pub(crate) peer_bytes_per_s: f64,
    /// Route of these pulls.
    pub(crate) peer_route: PeerRoute,
    /// Network between machines, if processes run on several and the profile has it.
    network: Option<NetworkRates>,
    /// Bytes per second of managed memory in each direction, while pages migrate.
    pub(crate) managed_bytes_per_s: f64,
    adam_bytes_per_s_by_threads: Points,
    adam_scalar_bytes_per_s_by_threads: Points,
    /// Seconds until waiting workers begin a job.
    pub(crate) wake_up_s: f64,
    /// Fraction of the rate of products during copies in both directions.
    pub(crate) matmul_under_copies: f64,
    /// Fraction of the rate of copies while the optimizer runs.
    pub(crate) copies_under_adam: f64,
    /// Fraction of the rate of the optimizer during copies.
    pub(crate) adam_under_copies: f64,
    /// Fraction of the rate of the CPU device's kernels while the optimizer runs on its cores.
    pub(crate) cpu_device_under_adam: f64,
    /// Fraction of the rate of the optimizer while the CPU device's kernels run on its cores.
    pub(crate) adam_under_cpu_device: f64,
}

/// Rates of a host and its compute device. The profile sections of a GPU and of CPUs have these fields in common. Copies are those of a
/// machine without a link: they read and write host memory.
macro_rules! computing {
    ($profile:expr, $device:expr, $fp8_speedup:expr, $grouped:expr) => {{
        let (host, device, whole) = (&$profile.host, $device, Points(vec![(1.0, 1.0)]));
        let memory = host.memory_bytes_per_s.value;
        let scalar = host.adam_scalar_bytes_per_s_by_threads.as_ref().unwrap_or(&host.adam_bytes_per_s_by_threads);
        Self {
            profile: $profile.name.clone(),
            large_matmul_flops: device.matmul_flops.value,
            matmul_share_by_least_dim: device.matmul_share_by_least_dim.value.clone(),
            fp8_speedup: $fp8_speedup,
            grouped: $grouped,
            attention_forward_flops: device.attention_forward_flops.value,
            attention_backward_flops: device.attention_backward_flops.value,
            attention: AttentionKernels::AsMeasured,
            device_bytes_per_s: device.memory_bytes_per_s.value,
            launch_s: device.launch_s.value,
            kernel_s: device.kernel_s.value,
            to_host_bytes_per_s: memory / 2.0,
            to_device_bytes_per_s: memory / 2.0,
            both_ways_bytes_per_s: memory / 4.0,
            to_host_share_by_bytes: whole.clone(),
            to_device_share_by_bytes: whole,
            latency_s: host.wake_up_s.value,
            peer_bytes_per_s: memory / 4.0,
            peer_route: PeerRoute::Own,
            network: None,
            managed_bytes_per_s: memory / 2.0,
            adam_bytes_per_s_by_threads: host.adam_bytes_per_s_by_threads.value.clone(),
            adam_scalar_bytes_per_s_by_threads: scalar.value.clone(),
            wake_up_s: host.wake_up_s.value,
            matmul_under_copies: 1.0,
            copies_under_adam: 0.5,
            adam_under_copies: 0.5,
            cpu_device_under_adam: 0.5,
            adam_under_cpu_device: 0.5,
        }
    }};
}

/// Rate of the plain attention kernels as a fraction of cuDNN's, by channels of a head. 128: Llama-8B with `--attention plain` took 3227 ms
/// on an H200, compared with 1371 ms (`paper-figures/log/2026-11.md`). 256: Gemma-2-2B took 978 ms (`paper-figures/predictions`).
const PLAIN_ATTENTION_SHARE: [(f64, f64); 2] = [(128.0, 0.075), (256.0, 0.0217)];

fn fp8_speedup(gpu: &Gpu) -> Option<f64> {
    gpu.fp8_matmul_flops.as_ref().map(|fp8| fp8.value / gpu.matmul_flops.value)
}

impl Rates {
    /// The rates of `profile`.
    ///
    /// # Panics
    /// If the profile has neither a GPU nor a CPU device, which [`Profile::parse`] rejects.
    pub fn of(profile: &Profile) -> Self {
        let computing = match (&profile.gpu, &profile.cpu_device) {
            (Some(gpu), _) => computing!(profile, gpu, fp8_speedup(gpu), GroupedRates::of_gpu(gpu)),
            (None, Some(cpus)) => computing!(profile, cpus, Some(1.0), GroupedRates::of_cpus(cpus)).with_sharing(cpus),
            (None, None) => panic!("{}: neither GPU nor CPUs compute", profile.name),
        };
        let linked = profile.link.as_ref().map_or(computing.clone(), |link| computing.with_link(link));
        profile.contention.as_ref().map_or(linked.clone(), |contention| linked.with_contention(contention))
    }

    /// The rates of each of `gpus` GPUs that train together. Their optimizers divide the host's rate, and their links share the host's
    /// memory. Without a section `together`, pulls are as fast as links in both directions, and only the optimizer is shared.
    pub(crate) fn of_each(profile: &Profile, gpus: usize) -> Self {
        let alone = Self::of(profile);
        if gpus == 1 {
            return alone;
        }
        let one_pool = alone.adam_bytes_per_s_by_threads.at(profile.host.cpus.value);
        let all_pools = profile.together.as_ref().map_or(one_pool, |together| together.all_adam_bytes_per_s.value);
        let each = alone.with_faster_host(all_pools / one_pool / gpus as f64);
        let Some(together) = &profile.together else { return each };
        Self {
            to_host_bytes_per_s: each.to_host_bytes_per_s.min(together.to_host_bytes_per_s.value),
            to_device_bytes_per_s: each.to_device_bytes_per_s.min(together.to_device_bytes_per_s.value),
            both_ways_bytes_per_s: each.both_ways_bytes_per_s.min(together.both_ways_bytes_per_s.value),
            peer_bytes_per_s: together.peer_bytes_per_s.value,
            ..each
        }
        .with_peers(together.peer_route)
    }

    /// These rates with peer copies over `route`, or over the present route if that is slower. The slowest link or memory on the route
    /// limits the copies. Each GPU pulls and is pulled from, so its link is busy in both directions. Copies through host memory are two
    /// consecutive hops: two RTX 5090 with links of 28 GB/s pulled 15 GB/s each.
    pub(crate) fn with_peers(self, route: PeerRoute) -> Self {
        let peer_route = self.peer_route.max(route);
        let most = match peer_route {
            PeerRoute::Own => f64::INFINITY,
            PeerRoute::Links => self.both_ways_bytes_per_s,
            PeerRoute::Host => self.both_ways_bytes_per_s / 2.0,
        };
        Self { peer_bytes_per_s: self.peer_bytes_per_s.min(most), peer_route, ..self }
    }

    /// These rates with `network` between the machines of different processes.
    pub(crate) fn with_network(self, network: Option<&Network>) -> Self {
        let rates = |network: &Network| NetworkRates { bytes_per_s: network.bytes_per_s.value, latency_s: network.latency_s.value };
        Self { network: network.map(rates), ..self }
    }

    /// Rates from device to device between processes: those of the network, or, if it is unknown, those of pulls within a process.
    pub(crate) fn between_processes(&self) -> NetworkRates {
        self.network.unwrap_or(NetworkRates { bytes_per_s: self.peer_bytes_per_s, latency_s: self.latency_s })
    }

    /// Rates between processes through the memory of both hosts, in two consecutive hops.
    pub(crate) fn between_hosts(&self) -> NetworkRates {
        let devices = self.between_processes();
        NetworkRates { bytes_per_s: devices.bytes_per_s.min(self.both_ways_bytes_per_s / 2.0), ..devices }
    }

    /// The rates of the default profile, for unknown machines.
    pub(crate) fn assumed() -> Arc<Self> {
        static RATES: OnceLock<Arc<Rates>> = OnceLock::new();
        let read = || Arc::new(Rates::of(&Profile::load(ASSUMED).expect("it ships with the program and is tested")));
        RATES.get_or_init(read).clone()
    }

    fn with_sharing(self, cpus: &CpuDevice) -> Self {
        let fraction = |measured: &Option<Number>, otherwise| measured.as_ref().map_or(otherwise, |fraction| fraction.value);
        Self {
            cpu_device_under_adam: fraction(&cpus.matmul_under_adam, self.cpu_device_under_adam),
            adam_under_cpu_device: fraction(&cpus.adam_under_matmul, self.adam_under_cpu_device),
            ..self
        }
    }

    fn with_link(self, link: &Link) -> Self {
        let both_ways = link.both_ways_bytes_per_s.value;
        Self {
            to_host_bytes_per_s: link.to_host_bytes_per_s.value,
            to_device_bytes_per_s: link.to_device_bytes_per_s.value,
            both_ways_bytes_per_s: both_ways,
            to_host_share_by_bytes: link.to_host_share_by_bytes.value.clone(),
            to_device_share_by_bytes: link.to_device_share_by_bytes.value.clone(),
            latency_s: link.latency_s.value,
            peer_bytes_per_s: both_ways,
            managed_bytes_per_s: link.managed_bytes_per_s.as_ref().map_or(both_ways, |managed| managed.value),
            ..self
        }
    }

    fn with_contention(self, contention: &Contention) -> Self {
        Self {
            matmul_under_copies: contention.matmul_under_copies.value,
            copies_under_adam: contention.copies_under_adam.value,
            adam_under_copies: contention.adam_under_copies.value,
            ..self
        }
    }

    /// Rates with host memory, and therefore an optimizer, that is `factor` times as fast.
    pub(crate) fn with_faster_host(&self, factor: f64) -> Self {
        Self {
            adam_bytes_per_s_by_threads: self.adam_bytes_per_s_by_threads.faster(factor),
            adam_scalar_bytes_per_s_by_threads: self.adam_scalar_bytes_per_s_by_threads.faster(factor),
            ..self.clone()
        }
    }

    /// Rates of a process that has `part` of `all` CPUs: its threads reach its share of the machine's optimizer rate, although they are
    /// fewer than the profile's.
    pub(crate) fn in_part(self, part: usize, all: usize) -> Self {
        let [part, all] = [part, all].map(|threads| self.adam_bytes_per_s_by_threads.at(threads as f64));
        self.with_faster_host(all / part)
    }

    /// Rates with a link that is `factor` times as fast.
    pub(crate) fn with_faster_link(&self, factor: f64) -> Self {
        Self {
            to_host_bytes_per_s: self.to_host_bytes_per_s * factor,
            to_device_bytes_per_s: self.to_device_bytes_per_s * factor,
            both_ways_bytes_per_s: self.both_ways_bytes_per_s * factor,
            managed_bytes_per_s: self.managed_bytes_per_s * factor,
            ..self.clone()
        }
    }

    /// Rates with a network that is `factor` times as fast.
    pub(crate) fn with_faster_network(&self, factor: f64) -> Self {
        let network = self.between_processes();
        Self { network: Some(NetworkRates { bytes_per_s: network.bytes_per_s * factor, ..network }), ..self.clone() }
    }

    /// Rates with a device that computes and accesses its memory `factor` times as fast.
    pub(crate) fn with_faster_device(&self, factor: f64) -> Self {
        Self {
            large_matmul_flops: self.large_matmul_flops * factor,
            grouped: self.grouped.faster(factor),
            attention_forward_flops: self.attention_forward_flops * factor,
            attention_backward_flops: self.attention_backward_flops * factor,
            device_bytes_per_s: self.device_bytes_per_s * factor,
            ..self.clone()
        }
    }

    /// FLOP/s of a product with the smallest dimension `least_dim`.
    pub fn matmul_flops(&self, least_dim: usize) -> f64 {
        self.large_matmul_flops * self.matmul_share_by_least_dim.at(least_dim as f64)
    }

    /// Fraction of attention's measured rate for heads of `head_dim` channels.
    pub(crate) fn attention_share(&self, head_dim: usize) -> f64 {
        match self.attention {
            AttentionKernels::Plain => Points(PLAIN_ATTENTION_SHARE.to_vec()).at(head_dim as f64),
            _ => 1.0,
        }
    }

    /// Kernels of attention.
    pub(crate) fn attention_kernels(&self) -> AttentionKernels {
        self.attention
    }

    /// Whether keys that a window hides take time in attention's backward pass.
    pub(crate) fn backward_visits_hidden_keys(&self) -> bool {
        matches!(self.attention, AttentionKernels::Deterministic | AttentionKernels::CudnnOrProducts { deterministic: true })
    }

    /// These rates with `attention` as its kernels.
    pub(crate) fn attending_by(&self, attention: AttentionKernels) -> Self {
        Self { attention, ..self.clone() }
    }

    /// FLOP/s of an FP8 product with the smallest dimension `least_dim`.
    pub(crate) fn fp8_flops(&self, least_dim: usize) -> f64 {
        self.fp8_speedup.unwrap_or(FP8_SPEEDUP) * self.matmul_flops(least_dim)
    }

    /// FLOP/s of expert products with `rows` mean rows per expert and weights of smaller dimension `width`.
    pub(crate) fn grouped_flops(&self, rows: usize, width: usize) -> f64 {
        self.grouped.flops(rows, self.matmul_flops(rows.min(width)))
    }

    /// These rates with `by` as the implementation of expert products.
    pub(crate) fn multiplying_experts_by(&self, by: ExpertProducts) -> Self {
        Self { grouped: self.grouped.clone().by(by), ..self.clone() }
    }

    /// A line about the assumed rate of FP8 products; `None` if it was measured.
    pub(crate) fn unknown_fp8(&self) -> Option<String> {
        let assumed = || format!("{FP8_SPEEDUP} times as fast as in bfloat16, assumed: {} has no measured rate", self.profile);
        self.fp8_speedup.is_none().then(assumed)
    }

    /// A line about the assumed rate of expert products; `None` if it was measured.
    pub(crate) fn unknown_grouped(&self) -> Option<String> {
        let text = |fraction: f64| {
            format!(
                "products of experts at {:.0} % of the rate of single ones, assumed: {} has no measured rate",
                100.0 * fraction,
                self.profile
            )
        };
        self.grouped.assumed_fraction().map(text)
    }

    /// Seconds of a copy of `bytes` to the host, without concurrent load.
    pub(crate) fn to_host_s(&self, bytes: usize) -> f64 {
        let bytes = bytes as f64;
        self.latency_s.max(bytes / (self.to_host_bytes_per_s * self.to_host_share_by_bytes.at(bytes)))
    }

    /// Seconds of a copy of `bytes` to the device, without concurrent load.
    pub(crate) fn to_device_s(&self, bytes: usize) -> f64 {
        let bytes = bytes as f64;
        self.latency_s.max(bytes / (self.to_device_bytes_per_s * self.to_device_share_by_bytes.at(bytes)))
    }

    /// Bytes per second that `workers` optimizer workers read and write. All vector instruction sets are equally fast, because memory is
    /// the bottleneck. Profiles have the rate with fp32 moments and masters.
    pub(crate) fn adam_bytes_per_s(&self, workers: usize, isa: Isa, formats: impl Into<HostFormats>) -> f64 {
        let curve = if isa == Isa::Scalar { &self.adam_scalar_bytes_per_s_by_threads } else { &self.adam_bytes_per_s_by_threads };
        let HostFormats { moments, masters } = formats.into();
        let fraction = match (moments, masters) {
            (Moments::Float32, _) => 1.0,
            (Moments::Bfloat16, _) => PACKED_FRACTION,
            (Moments::Int8, Masters::Float32) => INT8_FRACTION,
            (Moments::Int8, Masters::Split) => SPLIT_INT8_FRACTION,
        };
        curve.at(workers as f64) * fraction
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::hardware::profile::Gpu;

    /// A machine with round numbers: 1e12 FLOP/s and 1e12 bytes per second on the device, and 1e11 bytes per second on the link and for the
    /// optimizer, each alone; half of that when both directions are busy.
    pub(crate) fn round_rates() -> Rates {
        let whole = Points(vec![(1.0, 1.0)]);
        Rates {
            profile: "round".into(),
            large_matmul_flops: 1e12,
            matmul_share_by_least_dim: whole.clone(),
            fp8_speedup: Some(2.0),
            grouped: GroupedRates::whole(),
            attention_forward_flops: 1e12,
            attention_backward_flops: 1e12,
            attention: AttentionKernels::AsMeasured,
            device_bytes_per_s: 1e12,
            launch_s: 0.0,
            kernel_s: 0.0,
            to_host_bytes_per_s: 1e11,
            to_device_bytes_per_s: 1e11,
            both_ways_bytes_per_s: 5e10,
            to_host_share_by_bytes: whole.clone(),
            to_device_share_by_bytes: whole,
            latency_s: 0.0,
            peer_bytes_per_s: 1e11,
            peer_route: PeerRoute::Own,
            network: None,
            managed_bytes_per_s: 1e10,
            adam_bytes_per_s_by_threads: Points(vec![(1.0, 1e11)]),
            adam_scalar_bytes_per_s_by_threads: Points(vec![(1.0, 1e10)]),
            wake_up_s: 0.0,
            matmul_under_copies: 1.0,
            copies_under_adam: 0.5,
            adam_under_copies: 0.5,
            cpu_device_under_adam: 0.5,
            adam_under_cpu_device: 0.5,
        }
    }

    #[test]
    fn gpus_that_work_together_share_the_host() {
        let [one, two] = ["h200-pcie5", "h200-x2"].map(|name| Profile::load(name).unwrap());
        let (alone, each) = (Rates::of(&two), Rates::of_each(&two, 2));
        assert_eq!(Rates::of_each(&two, 1), alone);
        assert!((2.0 * each.adam_bytes_per_s(32, Isa::Avx512, Moments::Float32) / 195e9 - 1.0).abs() < 1e-9);
        assert_eq!([each.to_host_bytes_per_s, each.to_device_bytes_per_s, each.both_ways_bytes_per_s], [54.0e9, 53.8e9, 44.6e9]);
        assert_eq!((each.peer_bytes_per_s, each.device_bytes_per_s), (348e9, alone.device_bytes_per_s));
        // The profile has no rates for two of these GPUs together.
        let (alone, each) = (Rates::of(&one), Rates::of_each(&one, 2));
        assert_eq!(
            2.0 * each.adam_bytes_per_s(16, Isa::Avx512, Moments::Float32),
            alone.adam_bytes_per_s(16, Isa::Avx512, Moments::Float32)
        );
        assert_eq!((each.peer_bytes_per_s, each.to_host_bytes_per_s), (alone.both_ways_bytes_per_s, alone.to_host_bytes_per_s));
    }

    #[test]
    fn a_process_with_half_of_the_cpus_has_half_of_the_optimizer_rate() {
        let each = Rates::of_each(&Profile::load("h200-x2").unwrap(), 2);
        let adam = |rates: &Rates, threads| rates.adam_bytes_per_s(threads, Isa::Avx512, Moments::Float32);
        let half = each.clone().in_part(16, 32);
        assert!(adam(&each, 16) < adam(&each, 32) && (adam(&half, 16) / adam(&each, 32) - 1.0).abs() < 1e-9);
        assert_eq!(each.clone().in_part(32, 32), each);
    }

    #[test]
    fn copies_between_gpus_are_no_faster_than_the_links_they_cross() {
        let each = Rates::of_each(&Profile::load("h200-x2").unwrap(), 2);
        let over = |route| each.clone().with_peers(route).peer_bytes_per_s;
        assert_eq!([PeerRoute::Own, PeerRoute::Links, PeerRoute::Host].map(over), [348e9, 44.6e9, 22.3e9]);
        // A measured lower rate and a slower route of the profile are kept.
        let slow = Rates { peer_bytes_per_s: 9e9, ..each.clone().with_peers(PeerRoute::Host) };
        assert_eq!(slow.clone().with_peers(PeerRoute::Own), slow);
    }

    #[test]
    fn bytes_between_processes_are_those_of_the_network_or_of_pulls() {
        let profile = Profile::load("gh200-x4").unwrap();
        let each = Rates::of_each(&profile, 4);
        let rates = |rates: &Rates| [rates.between_processes(), rates.between_hosts()].map(|network| network.bytes_per_s);
        assert_eq!(rates(&each), [330e9, 82.5e9], "no network, and a hop of each kind through the host's memory");
        let joined = each.with_network(profile.network.as_ref());
        assert_eq!(rates(&joined), [25e9; 2]);
        assert_eq!(joined.between_processes().exchange_s(25_000_000), 18e-6 + 1e-3);
        assert_eq!(rates(&joined.with_faster_network(2.0)), [50e9; 2]);
    }

    #[test]
    fn products_in_fp8_have_a_measured_or_an_assumed_rate() {
        let mut profile = Profile::load(ASSUMED).unwrap();
        let measured = Rates::of(&profile);
        assert_eq!((measured.fp8_flops(8192), measured.unknown_fp8()), (1238e12, None));
        profile.gpu.as_mut().unwrap().fp8_matmul_flops = None;
        let assumed = Rates::of(&profile);
        assert_eq!(assumed.fp8_flops(512), FP8_SPEEDUP * assumed.matmul_flops(512));
        assert_eq!(assumed.unknown_fp8().unwrap(), "1.75 times as fast as in bfloat16, assumed: h200-pcie5 has no measured rate");
    }

    #[test]
    fn a_machine_without_a_gpu_copies_through_its_memory() {
        let mut profile = Profile::load(ASSUMED).unwrap();
        let gpu = Rates::of(&profile);
        assert!(gpu.matmul_flops(8192) > 100.0 * gpu.matmul_flops(1).min(1e9) && gpu.to_host_s(4) == gpu.latency_s);
        let Gpu { memory_bytes_per_s, matmul_flops, matmul_share_by_least_dim, .. } = profile.gpu.take().unwrap();
        let tenth = |whole: &Number| Number { value: whole.value / 10.0, ..whole.clone() };
        profile.cpu_device = Some(CpuDevice {
            attention_forward_flops: tenth(&matmul_flops),
            attention_backward_flops: tenth(&matmul_flops),
            launch_s: profile.host.wake_up_s.clone(),
            kernel_s: profile.host.wake_up_s.clone(),
            matmul_flops: tenth(&matmul_flops),
            memory_bytes_per_s,
            matmul_share_by_least_dim,
            grouped_flops_by_rows: None,
            matmul_under_adam: None,
            adam_under_matmul: Some(tenth(&matmul_flops)),
        });
        (profile.link, profile.contention) = (None, None);
        let cpus = Rates::of(&profile);
        assert_eq!(10.0 * cpus.matmul_flops(8192), gpu.matmul_flops(8192));
        assert_eq!((cpus.cpu_device_under_adam, cpus.adam_under_cpu_device), (0.5, matmul_flops.value / 10.0));
        assert_eq!(cpus.to_host_bytes_per_s, profile.host.memory_bytes_per_s.value / 2.0);
        assert_eq!(cpus.adam_bytes_per_s(16, Isa::Avx2, Moments::Float32), gpu.adam_bytes_per_s(16, Isa::Sve2, Moments::Float32));
        assert!(gpu.adam_bytes_per_s(16, Isa::Scalar, Moments::Float32) < gpu.adam_bytes_per_s(16, Isa::Avx2, Moments::Float32));
    }
}

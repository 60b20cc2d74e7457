//! The printed form of a plan: a line for each subject, then tables of memory.

use super::plan::Plan;
use crate::bucket::layout::Tier;
use crate::device::{Attention, DeviceKind};
use crate::dtype::Dtype;
use crate::memory::{Addressing, DeviceMemory, MemorySpace, RingShape};
use crate::model::head_rows::HeadRows;
use crate::model::policy::LayerPolicy;
use crate::model::tensors::TensorTable;
use crate::optim::moments::Moments;
use crate::optim::simd::Isa;
use crate::optim::split::Masters;
use crate::recipe::Numerics;
use crate::request::choices::LayerOrder;
use crate::units::{Bytes, counted};
use clap::ValueEnum;
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan")?;
        self.write_step(f)?;
        self.write_buckets(f)?;
        self.write_models_own(f)?;
        self.write_optimizer(f)?;
        // The estimate ranks plans before simulation. Next to a simulated time it would be a second, conflicting value.
        match (self.forecast.simulated_step_ms, &self.forecast.predicted) {
            (Some(ms), _) => writeln!(f, "  simulated   {ms:.1} ms a step, at the rates of {}", self.site.machine.rates.profile)?,
            (None, Some(predicted)) => writeln!(f, "  predicted   {predicted}, at the rates of {}", self.site.machine.rates.profile)?,
            (None, None) => {}
        }
        self.write_memory(f)
    }
}

impl Plan {
    /// Writes the work of a step and the devices that share it.
    fn write_step(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  strategy    {:?}, {:?}; techniques: {}",
            self.protocol.strategy,
            self.protocol.rules.policy,
            self.protocol.techniques.names()
        )?;
        writeln!(
            f,
            "  model       {:.2} M parameters, {} on the device, {} on the link",
            self.params() as f64 / 1e6,
            self.recipe.numerics.dtype,
            self.protocol.link_dtype
        )?;
        self.write_frozen(f)?;
        let (batch, seq, accum) = (self.recipe.step.micro_batch, self.recipe.step.seq_length, self.micro_batches_of_rank());
        let devices = if self.site.machine.kind == DeviceKind::Gpu { "GPUs" } else { "ranks" };
        let ranks = match (self.site.ranks / self.recipe.step.sequence_ranks, self.recipe.step.sequence_ranks) {
            (1, 1) => String::new(),
            (ranks, 1) => format!("{ranks} {devices} x "),
            (1, each) => format!("{each} {devices} on the same sequences x "),
            (groups, each) => format!("{groups} x {each} {devices} on the same sequences x "),
        };
        let groups = if self.recipe.step.group > 1 { format!(" in groups of {}", self.recipe.step.group) } else { String::new() };
        let partial_sums =
            if self.recipe.step.shares > 1 { format!(" in {} gradient shares{groups}", self.recipe.step.shares) } else { String::new() };
        writeln!(
            f,
            "  step        {ranks}{accum} x {batch} x {seq} = {}{partial_sums}; loss in tiles of {}",
            counted(self.tokens_per_step(), "token"),
            self.recipe.numerics.loss_tile
        )?;
        self.write_order(f)?;
        if let Some([fewest, most]) = self.uneven_heads() {
            writeln!(
                f,
                "  heads       {fewest} to {most} query heads on each of {}: the devices with the most set the time",
                self.recipe.step.sequence_ranks
            )?;
        }
        if self.recipe.numerics.loss_tile.rows != self.forecast.usual_tile.rows {
            let rows = self.forecast.usual_tile.rows;
            writeln!(f, "  bits        differ from runs with loss tiles of {rows} rows, which do not fit here")?;
        }
        if let Some(block) = self.recipe.numerics.attention_block {
            writeln!(f, "  attention   backward pass in blocks of {block} queries and keys; their gradients are added in fp32")?;
        }
        self.write_head(f)?;
        if let Some(tile) = self.recipe.numerics.mlp_tile {
            writeln!(f, "  MLP         computed in tiles of {tile} tokens; weight gradients are summed over the tiles")?;
        }
        if self.site.ranks > 1 && self.site.machine.kind == DeviceKind::Gpu {
            let rates = &self.site.machine.rates;
            if self.site.ranks > self.site.processes {
                writeln!(f, "  peers       {:.1} GB/s from each other, {}", rates.peer_bytes_per_s / 1e9, rates.peer_route)?;
            }
            if self.site.processes > 1 {
                writeln!(f, "  network     {}", self.forecast.peer_traffic.describe_far(rates))?;
            }
        }
        Ok(())
    }

    /// Writes the numbers of trained and of frozen parameters, if any are frozen.
    fn write_frozen(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.recipe.model.frozen.is_empty() {
            return Ok(());
        }
        let (trained, all) = (self.trained_params(), self.params());
        let [trained, frozen] = [trained, all - trained].map(|params| params as f64 / 1e6);
        writeln!(f, "  frozen      {frozen:.2} M parameters, which have weights alone; {trained:.2} M parameters are trained")?;
        if let Some(line) = self.recipe.model.describe_trained_tokens() {
            writeln!(f, "  tokens      {line}")?;
        }
        let (table, width) = (TensorTable::new(&self.recipe.model), self.recipe.numerics.dtype.bytes());
        let [packed, expanded] = [table.packed_bytes(), width * table.expanded_elems()].map(|bytes| Bytes(bytes as u64));
        match table.packed() {
            [] => Ok(()),
            specs => writeln!(
                f,
                "  packed      {} of experts stay in MXFP4 ({packed}); each pass of a layer expands its own into {expanded}",
                counted(specs.len(), "frozen tensor")
            ),
        }
    }

    /// Writes the rows that the head computes, unless it computes all, and the format of logits, unless it is that of the weights.
    fn write_head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Numerics { dtype, logits_dtype, head_rows, .. } = self.recipe.numerics;
        let logits = if logits_dtype == dtype { String::new() } else { format!("logits in {logits_dtype}") };
        match head_rows {
            HeadRows::All if logits.is_empty() => Ok(()),
            HeadRows::All => writeln!(f, "  head        {logits}"),
            HeadRows::Trained => {
                let logits = if logits.is_empty() { logits } else { format!(", {logits}") };
                writeln!(
                    f,
                    "  head        computed for rows with trained targets{logits}; times of this plan assume that every row has one"
                )
            }
        }
    }

    /// Writes the segments of layers, if there are several.
    fn write_order(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LayerOrder::Segments { layers, turn } = self.layer_order() else { return Ok(()) };
        let below = counted(self.placement.segments.count() - 1, "segment");
        let kept = Bytes((self.site.ranks * self.boundaries().host_elems() * self.recipe.numerics.dtype.bytes()) as u64);
        writeln!(
            f,
            "  order       {below} of {} and a last one of {turn}, each for all micro-batches before the next; {kept} of their inputs are kept \
             in host memory",
            counted(layers, "layer")
        )
    }

    /// Writes the locations of states, weights and sums, and the streams between them.
    fn write_buckets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = &self.placement.layout;
        let bucket = Bytes((layout.bucket_elems() * self.recipe.numerics.dtype.bytes()) as u64);
        let (count, offloaded) = (layout.count(), layout.offloaded());
        match offloaded {
            0 if !layout.buckets_in(Tier::Unified).is_empty() => self.write_paged(f, bucket)?,
            0 => writeln!(f, "  buckets     {count} of {bucket}; fits without offload: every optimizer state stays on the device")?,
            _ => writeln!(
                f,
                "  buckets     {count} of {bucket}, {} with a resident optimizer; {}, {}",
                count - offloaded,
                counted(self.placement.grad_slots, "gradient slot"),
                counted(self.placement.param_slots, "parameter slot")
            )?,
        }
        if self.protocol.masters == Masters::Split {
            let (split, buckets) = match self.host_masters() {
                Masters::Float32 => (layout.buckets_in(Tier::Device).len(), "every bucket that the device steps"),
                Masters::Split => (count, "those on the host stepped after the verdict"),
            };
            writeln!(f, "  masters     split in {split} of {count} buckets, {buckets}: 16 bits beside each bfloat16 weight, without loss")?;
        }
        if !layout.early().is_empty() {
            let early = layout.early().len();
            writeln!(
                f,
                "  early       {early} buckets of the embedding are sent after the output matrix's gradient; rows of the batch follow"
            )?;
        }
        if let Some(RingShape { ringed_elems, period_elems }) = self.placement.rings.weights {
            let [streamed, ring] = [ringed_elems, period_elems].map(|elems| Bytes((elems * self.recipe.numerics.dtype.bytes()) as u64));
            let each = if self.placement.segments.is_whole() { "" } else { " once a step" };
            let from = match self.site.processes {
                _ if self.streams_from_host() => "host memory",
                1 => "the slices of all GPUs",
                _ if self.placement.rings.fully_sharded => "the slices of all GPUs, those of other processes over the network",
                _ => "the slices that the GPUs of each process have",
            };
            writeln!(f, "  weights     {streamed} stream from {from} through a ring of {ring}, forward and backward{each}")?;
        }
        if self.placement.rings.sums_on_host {
            let summed = Bytes((4 * layout.offloaded_elems()) as u64);
            let why = "the device has no room for them";
            writeln!(f, "  sums        {summed} of gradient sums are kept in host memory and added on the device: {why}")?;
        }
        Ok(())
    }

    /// Writes requirements that only some models have on a GPU.
    fn write_models_own(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = &self.recipe.model;
        let lacking = || model.layers_with_scores().find_map(|layer| Attention::cudnn_lacks(&model.attention(1, 1, layer)));
        match self.recipe.numerics.attention {
            _ if self.site.machine.kind == DeviceKind::Cpu => {}
            Attention::Plain if self.recipe.numerics.dtype != Dtype::Float32 => writeln!(f, "  attention   plain, which is slow")?,
            Attention::Products => writeln!(f, "  attention   by products of blocks of queries")?,
            Attention::CudnnOrProducts { .. } => {
                writeln!(f, "  attention   by products in layers with {}, by cuDNN in all other layers", lacking().unwrap_or_default())?;
            }
            Attention::Plain | Attention::Cudnn { .. } => {}
        }
        if self.recipe.numerics.fp8 {
            let assumed = self.site.machine.rates.unknown_fp8().filter(|_| self.site.machine.kind == DeviceKind::Gpu);
            let assumed = assumed.map_or(String::new(), |assumed| format!("; {assumed}"));
            writeln!(f, "  products    of layers in FP8, E4M3 and for gradients E5M2{assumed}")?;
        }
        for line in self.site.expert_products_note.iter().chain(&self.unknown_grouped()) {
            writeln!(f, "  experts     {line}")?;
        }
        Ok(())
    }

    fn write_optimizer(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let isa =
            if self.site.for_other_machine && self.site.isa != Isa::Scalar { "vector code".into() } else { self.site.isa.to_string() };
        let moments = if self.recipe.numerics.moments == Moments::Float32 {
            String::new()
        } else {
            format!(", moments in {}", self.recipe.numerics.moments)
        };
        writeln!(
            f,
            "  optimizer   {} on {}, {isa}{moments}; clip above {}",
            self.optimizer().name(),
            counted(self.site.threads, "thread"),
            self.recipe.max_grad_norm
        )
    }

    /// The assumption about expert products in the step time, if the profile lacks their rate.
    fn unknown_grouped(&self) -> Option<String> {
        let is_timed = self.recipe.model.experts() > 0 && self.site.machine.kind == DeviceKind::Gpu;
        self.site.machine.rates.unknown_grouped().filter(|_| is_timed)
    }

    fn write_paged(&self, f: &mut fmt::Formatter<'_>, bucket: Bytes) -> fmt::Result {
        let how = match self.site.machine.device {
            DeviceMemory::Shared => Addressing::Coherent,
            DeviceMemory::Own { addressing, .. } => addressing,
        };
        writeln!(
            f,
            "  buckets     {} of {bucket}, all stepped on the device; states of {} are unified: {how}",
            self.placement.layout.count(),
            self.placement.layout.buckets_in(Tier::Unified).len()
        )
    }

    /// Writes a table for each memory with its free bytes. A device without its own memory uses the host's.
    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [device_free, host_free] = self.balances().map(|balance| balance.free());
        let titles = match self.site.machine.device {
            DeviceMemory::Shared => ["host memory, compute", "host memory, optimizer"],
            DeviceMemory::Own { .. } if self.site.processes > 1 => ["memory of each GPU", "host, of each process"],
            DeviceMemory::Own { .. } if self.site.ranks > 1 => ["memory of each GPU", "host memory, in all"],
            DeviceMemory::Own { .. } => ["device memory", "host memory"],
        };
        let on_device = self.bytes_at(MemorySpace::Device).div_ceil(self.devices());
        let on_host = self.bytes_at(MemorySpace::Host).div_ceil(self.site.processes as u64) + self.forecast.transient_bytes;
        self.write_space(f, MemorySpace::Device, titles[0], on_device, device_free)?;
        writeln!(f)?;
        self.write_space(f, MemorySpace::Host, titles[1], on_host, host_free)
    }

    /// Number of devices with their own memory.
    fn devices(&self) -> u64 {
        if self.site.machine.device == DeviceMemory::Shared { 1 } else { self.site.ranks as u64 }
    }

    fn write_space(&self, f: &mut fmt::Formatter<'_>, space: MemorySpace, title: &str, planned: u64, free: Option<u64>) -> fmt::Result {
        let (transient, parts) =
            if space == MemorySpace::Host { (self.forecast.transient_bytes, self.site.processes as u64) } else { (0, self.devices()) };
        let classes = self.forecast.memory.iter().filter(|class| class.space == space);
        let classes = classes.map(|class| (class.name, (class.bytes as u64).div_ceil(parts)));
        let rows = classes.chain(Some(("loading, saving", transient)).filter(|row| row.1 > 0)).chain(free.map(|free| ("free", free)));
        write!(f, "  {title:<22}{:>10}", Bytes(planned).to_string())?;
        for (name, bytes) in rows {
            write!(f, "\n    {name:<20}{:>10}", Bytes(bytes).to_string())?;
            if name == "activations" {
                write!(f, "  {}", describe_policies(&self.placement.layer_policies))?;
            }
        }
        Ok(())
    }
}

/// `36 layers: 30 keep, 6 recompute-cheap`.
pub(crate) fn describe_policies(policies: &[LayerPolicy]) -> String {
    let count = |policy: &LayerPolicy| policies.iter().filter(|other| *other == policy).count();
    let used = LayerPolicy::value_variants().iter().map(|policy| (count(policy), policy)).filter(|(count, _)| *count > 0);
    let named: Vec<_> = used.map(|(count, policy)| format!("{count} {policy}")).collect();
    format!("{}: {}", counted(policies.len(), "layer"), named.join(", "))
}

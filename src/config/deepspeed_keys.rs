//! All keys of a DeepSpeed configuration and their translation.

/// Treatment of a key that is neither null nor `"auto"`.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyRule {
    /// An object. Its keys have their own entries.
    Group,
    /// The value of this flag.
    Flag(&'static str),
    /// Read together with other keys.
    Read,
    /// The key is ignored for this reason. It does not change the training result.
    Ignored(&'static str),
    /// The key must be off. The text gives the reason or the alternative.
    Off(&'static str),
    /// The key must be on. The text gives the reason or the alternative.
    On(&'static str),
}

use KeyRule::{Flag, Group, Ignored, Off, On, Read};

const NOT_HERE: &str = "not available here, and without it training gives other results: leave it out";
const PLANNED: &str = "the plan decides about memory and copies";
const NO_LOGGER: &str = "every run writes metrics.jsonl, an object a step, into its output directory";
const NO_NVME: &str = "nothing is kept on NVMe";
const IS_OFF: &str = "belongs to a feature that is off, or to its report";
const ONE_FORMAT: &str = "--cast sets the format on the link";

/// Paths of keys. A path that ends with `*` is a prefix. The first match applies.
#[rustfmt::skip]
pub(super) const KEYS: &[(&str, KeyRule)] = &[
    ("train_batch_size", Read),
    ("train_micro_batch_size_per_gpu", Flag("per-device-train-batch-size")),
    ("gradient_accumulation_steps", Flag("gradient-accumulation-steps")),
    ("gradient_clipping", Flag("max-grad-norm")),
    ("steps_per_print", Flag("logging-steps")),
    ("wall_clock_breakdown", Flag("perf-counters")),

    ("bf16", Group), ("bfloat16", Group), ("fp16", Group),
    ("bf16.enabled", Read), ("bfloat16.enabled", Read), ("fp16.enabled", Read),
    ("bf16.immediate_grad_update", Ignored("gradients are used as soon as they are computed")),
    ("bf16.check_grad_overflow", Ignored("every gradient is checked")),
    ("bf16.bf16_*", Off("master weights and states have 32 bits")),
    ("fp16.loss_scale", Off("the loss scale is dynamic: use 0")),
    ("fp16.loss_scale_window", Ignored("the constants of the dynamic loss scale are fixed")),
    ("fp16.initial_scale_power", Ignored("the constants of the dynamic loss scale are fixed")),
    ("fp16.hysteresis", Ignored("the constants of the dynamic loss scale are fixed")),
    ("fp16.consecutive_hysteresis", Ignored("the constants of the dynamic loss scale are fixed")),
    ("fp16.min_loss_scale", Ignored("the constants of the dynamic loss scale are fixed")),
    ("fp16.auto_cast", Ignored("inputs are token ids")),
    ("fp16.fp16_*", Off("master weights and states have 32 bits")),

    ("optimizer", Group), ("optimizer.params", Group),
    ("optimizer.type", Read),
    ("optimizer.legacy_fusion", Ignored("kernels are chosen with the plan")),
    ("optimizer.params.lr", Read),
    ("optimizer.params.betas", Read),
    ("optimizer.params.eps", Flag("adam-epsilon")),
    ("optimizer.params.weight_decay", Flag("weight-decay")),
    ("optimizer.params.adam_w_mode", Read),
    ("optimizer.params.torch_adam", Ignored("there is only one AdamW")),
    ("optimizer.params.fused", Ignored("there is only one AdamW")),
    ("optimizer.params.bias_correction", On("the moments are always corrected")),
    ("optimizer.params.fp32_optimizer_states", On("states have 32 bits")),
    ("optimizer.params.amsgrad", Off(NOT_HERE)),

    ("scheduler", Group), ("scheduler.params", Group),
    ("scheduler.type", Read),
    ("scheduler.params.warmup_max_lr", Read),
    ("scheduler.params.warmup_num_steps", Flag("warmup-steps")),
    ("scheduler.params.warmup_type", Read),
    ("scheduler.params.total_num_steps", Read),
    ("scheduler.params.warmup_min_lr", Off("the warm-up begins at 0")),
    ("scheduler.params.warmup_min_ratio", Off("the warm-up begins at 0")),
    ("scheduler.params.cos_min_ratio", Off("the cosine ends at 0")),
    ("scheduler.params.last_batch_iteration", Ignored("a resumed run continues its schedule")),

    ("zero_optimization", Group),
    ("zero_optimization.stage", Read),
    ("zero_optimization.offload_optimizer", Group),
    ("zero_optimization.offload_optimizer.device", Read),
    ("zero_optimization.offload_optimizer.super_offload", Read),
    ("zero_optimization.offload_optimizer.cpuadam_cores_perc", Read),
    ("zero_optimization.offload_optimizer.ratio", Read),
    ("zero_optimization.offload_optimizer.pin_memory", Ignored("states are in pinned memory: --memory")),
    ("zero_optimization.offload_optimizer.nvme_path", Ignored(NO_NVME)),
    ("zero_optimization.offload_optimizer.buffer_count", Ignored(PLANNED)),
    ("zero_optimization.offload_optimizer.buffer_size", Ignored(PLANNED)),
    ("zero_optimization.offload_optimizer.pipeline*", Ignored(PLANNED)),
    ("zero_optimization.offload_optimizer.fast_init", Ignored(PLANNED)),
    ("zero_optimization.offload_param", Group),
    ("zero_optimization.offload_param.device", Read),
    ("zero_optimization.offload_param.pin_memory", Ignored("weights are in pinned memory: --memory")),
    ("zero_optimization.offload_param.nvme_path", Ignored(NO_NVME)),
    ("zero_optimization.offload_param.buffer_count", Ignored(PLANNED)),
    ("zero_optimization.offload_param.buffer_size", Ignored(PLANNED)),
    ("zero_optimization.offload_param.max_in_cpu", Ignored(PLANNED)),
    ("zero_optimization.cpu_offload*", Off("use offload_optimizer or offload_param: {\"device\": \"cpu\"}")),
    ("zero_optimization.sub_group_size", Read),
    ("zero_optimization.zenflow", Off(NOT_HERE)),
    ("zero_optimization.zero_quantized*", Off(NOT_HERE)),
    ("zero_optimization.allgather_partitions", Ignored(PLANNED)),
    ("zero_optimization.allgather_bucket_size", Ignored(PLANNED)),
    ("zero_optimization.overlap_comm", Ignored(PLANNED)),
    ("zero_optimization.reduce_scatter", Ignored(PLANNED)),
    ("zero_optimization.reduce_bucket_size", Ignored(PLANNED)),
    ("zero_optimization.contiguous_gradients", Ignored(PLANNED)),
    ("zero_optimization.round_robin_gradients", Ignored(PLANNED)),
    ("zero_optimization.use_multi_rank_bucket_allreduce", Ignored(PLANNED)),
    ("zero_optimization.stage3_gather_*", Ignored("superoffload export writes the weights")),
    ("zero_optimization.stage3_*", Ignored(PLANNED)),
    ("zero_optimization.prefetch_bucket_size", Ignored(PLANNED)),
    ("zero_optimization.param_persistence_threshold", Ignored(PLANNED)),
    ("zero_optimization.model_persistence_threshold", Ignored(PLANNED)),
    ("zero_optimization.max_live_parameters", Ignored(PLANNED)),
    ("zero_optimization.max_reuse_distance", Ignored(PLANNED)),
    ("zero_optimization.gather_16bit_weights_on_model_save", Ignored("superoffload export writes the weights")),
    ("zero_optimization.module_granularity_threshold", Ignored(PLANNED)),
    ("zero_optimization.memory_efficient_linear", Ignored(PLANNED)),
    ("zero_optimization.zero_hpz_partition_size", Ignored(PLANNED)),
    ("zero_optimization.mics_*", Ignored(PLANNED)),
    ("zero_optimization.legacy_stage1", Ignored(PLANNED)),
    ("zero_optimization.elastic_checkpoint", Ignored("checkpoints are of one format")),
    ("zero_optimization.load_from_fp32_weights", Ignored("checkpoints hold float32 weights")),
    ("zero_optimization.pipeline_loading_checkpoint", Ignored(PLANNED)),
    ("zero_optimization.ignore_unused_parameters", Ignored("every parameter has a gradient")),
    ("zero_optimization.override_module_apply", Ignored("this program does not use PyTorch")),
    ("zero_optimization.log_trace_cache_warnings", Ignored("this program does not use PyTorch")),
    ("zero_allow_untested_optimizer", Ignored("there is only one AdamW")),
    ("zero_force_ds_cpu_optimizer", Ignored("there is only one AdamW")),

    ("activation_checkpointing", Group),
    ("activation_checkpointing.cpu_checkpointing", Read),
    ("activation_checkpointing.partition_activations", Ignored(PLANNED)),
    ("activation_checkpointing.contiguous_memory_optimization", Ignored(PLANNED)),
    ("activation_checkpointing.number_checkpoints", Ignored(PLANNED)),
    ("activation_checkpointing.synchronize_checkpoint_boundary", Ignored(PLANNED)),
    ("activation_checkpointing.profile", Ignored(PLANNED)),

    ("communication_data_type", Ignored(ONE_FORMAT)),
    ("seq_parallel_communication_data_type", Ignored(ONE_FORMAT)),
    ("prescale_gradients", Ignored("gradients are summed in float32")),
    ("gradient_predivide_factor", Ignored("gradients are summed in float32")),
    ("sparse_gradients", Off("gradients are dense")),
    ("disable_allgather", Ignored(PLANNED)),
    ("data_types", Group),
    ("data_types.grad_accum_dtype", Off("gradients of a share are summed in --dtype, those of --gradient-shares in float32")),
    ("dump_state", Ignored("every run prints its plan")),
    ("memory_breakdown", Ignored("every run prints its plan")),
    ("dataloader_drop_last", Ignored("a step has all its sequences")),
    ("checkpoint", Group), ("checkpoint.*", Ignored("checkpoints are of one format")),
    ("use_node_local_storage", Ignored("checkpoints are of one format")),
    ("load_universal_checkpoint", Off("checkpoints of DeepSpeed are not read: --model takes safetensors")),
    ("aio", Group), ("aio.*", Ignored(NO_NVME)),
    ("tensorboard", Group), ("tensorboard.*", Ignored("--report-to tensorboard writes event files into the output directory")),
    ("wandb", Group), ("wandb.*", Ignored(NO_LOGGER)),
    ("csv_monitor", Group), ("csv_monitor.*", Ignored(NO_LOGGER)),
    ("comet", Group), ("comet.*", Ignored(NO_LOGGER)),
    ("comms_logger", Group), ("comms_logger.*", Ignored("trace.json in the output directory has every copy")),
    ("flops_profiler", Group), ("flops_profiler.*", Ignored("every step's TFLOP/s are in metrics.jsonl")),
    ("compile", Group), ("compile.*", Ignored("this program does not use PyTorch")),
    ("nebula", Group), ("nebula.*", Ignored("checkpoints are of one format")),
    ("autotuning", Group), ("autotuning.enabled", Off("superoffload plan chooses")), ("autotuning.*", Ignored(IS_OFF)),
    ("amp", Group), ("amp.enabled", Off("--dtype is the format")), ("amp.*", Ignored(IS_OFF)),
    ("torch_autocast", Group), ("torch_autocast.enabled", Off("--dtype is the format")), ("torch_autocast.*", Ignored(IS_OFF)),
    ("elasticity", Group), ("elasticity.enabled", Off(NOT_HERE)), ("elasticity.*", Ignored(IS_OFF)),
    ("curriculum_learning", Group), ("curriculum_learning.enabled", Off(NOT_HERE)), ("curriculum_learning.*", Ignored(IS_OFF)),
    ("data_efficiency", Group), ("data_efficiency.enabled", Off(NOT_HERE)), ("data_efficiency.*", Ignored(IS_OFF)),
    ("progressive_layer_drop", Group), ("progressive_layer_drop.enabled", Off(NOT_HERE)), ("progressive_layer_drop.*", Ignored(IS_OFF)),
    ("eigenvalue", Group), ("eigenvalue.enabled", Off(NOT_HERE)), ("eigenvalue.*", Ignored(IS_OFF)),
    ("hybrid_engine", Group), ("hybrid_engine.enabled", Off(NOT_HERE)), ("hybrid_engine.*", Ignored(IS_OFF)),
];

/// The rule of the key at `path`.
pub(super) fn rule(path: &str) -> Option<KeyRule> {
    let fits = |pattern: &str| pattern.strip_suffix('*').map_or(pattern == path, |start| path.starts_with(start));
    KEYS.iter().find(|(pattern, _)| fits(pattern)).map(|(_, rule)| *rule)
}

/// The known key with the spelling closest to `path`.
pub(super) fn nearest(path: &str) -> &'static str {
    let names = KEYS.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('*'));
    names.max_by(|a, b| strsim::jaro_winkler(a, path).total_cmp(&strsim::jaro_winkler(b, path))).unwrap_or_default()
}

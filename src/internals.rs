//! Unstable library items for this repository's program, tests, microbenchmarks and fuzzers.
//!
//! Nothing here is promised: names come and go with the code behind them. Items are listed by name, so that the compiler reports
//! unused ones.

pub mod bucket {
    pub use crate::bucket::layout::{BucketLayout, BucketStarts, LayoutRequest, Tier};
    pub use crate::bucket::slot::Slot;
}

pub mod checkpoint {
    pub use crate::checkpoint::digest::{StateDigest, digest_checkpoint};
    pub use crate::checkpoint::{open, verify};
}

/// Commands of the program besides training.
pub mod commands {
    pub use crate::bench::options::StepOptions;
    pub use crate::commands::{
        bench_step, convert_config, doctor, prepare_process, probe, respell, resume, sample, simulate, superchip_check, under_launcher,
    };
    pub use crate::probe::ProbeOptions;
    pub use crate::superchip::{Calls as SuperchipCalls, SuperchipOptions};
    pub use crate::train::sample::SampleOptions;
}

pub mod config {
    pub use crate::config::options::DeviceChoice;
    pub mod file {
        pub use crate::config::file::load;
    }
}

pub mod data {
    pub use crate::data::chat::render_in_this_process;
    pub use crate::data::context::Preparation;
    pub use crate::data::dataset::Dataset;
    pub use crate::data::encode::tokenizer_handle::Tokenizer;
    pub use crate::data::loader::{DataPosition, Loader};
    pub use crate::data::rows::batch::{Batch, Batches};
    pub use crate::data::rows::row_rules::{Packing, RowRules};
    pub use crate::data::tokenizer::AddBos;
    pub use crate::simulate::random_tokens::RandomTokens;
}

pub mod device {
    pub use crate::device::cpu::{CpuDevice, StreamOrder};
    pub use crate::device::footprint::gpu::RING_CHUNK_BYTES;
    pub use crate::device::kernels::*;
    pub use crate::device::{Attention, Device, DeviceKind, DeviceSlice, Engines, EventId, ExpertProducts, Kernel, Stream};
    #[cfg(feature = "cuda")]
    pub mod cuda {
        pub use crate::device::cuda::{CudaDevice, CudaOptions, free_bytes, probe, visible_gpus};
    }
}

pub mod dtype {
    pub use crate::dtype::mxfp4::Mxfp4;
    pub use crate::dtype::{Dtype, E4m3, E5m2, Element};
}

pub mod engine {
    pub use crate::engine::evaluate::Evaluated;
    pub use crate::engine::executor::{Engine, StepReport};
    pub use crate::engine::memory::expert_rows::ExpertLoad;
    pub use crate::engine::pool::Pool;
    pub use crate::engine::protocol::coordinator::{Counts, GradUpdate, Work};
    pub use crate::engine::protocol::verdict::{SpeculationHistory, Verdict};
    pub use crate::engine::save::frozen_state::FrozenState;
    pub use crate::engine::step_job::{HostState, Segment, SlotMemory, StepJob, StepMemory};
    pub use crate::engine::watch::watchdog::Watchdog;
}

pub mod error {
    pub use crate::error::terminal::{printable_json, printable_lines};
}

pub mod facts {
    pub use crate::facts::{BuildFacts, MachineFacts};
}

pub mod hardware {
    pub use crate::hardware::gpu::{GpuFacts, GpuId};
    pub use crate::hardware::profile::Profile;
    pub use crate::hardware::topology::Topology;
}

pub mod host {
    pub use crate::host::affinity::{CpuPlacement, name_and_pin, workers_beside_others};
    pub use crate::host::doorbell::Doorbell;
    pub use crate::host::memory_policy::{HugePagesChoice, MemoryPolicy};
    #[cfg(feature = "mpam")]
    pub use crate::host::partition::join_optimizer;
    pub use crate::host::pinned::{HostMemory, PinnedSlice, RING_GRAIN_BYTES};
    pub use crate::host::pool::{Call, Job, Threads, run_alone};
    pub use crate::host::resctrl_group::ResctrlGroup;
    pub use crate::host::wakeup::{Latency, WakeUp};
    pub use crate::host::worker_nodes::WorkerNodes;
}

pub mod launch {
    pub use crate::launch::engine::{UseEngine, cpu_engine, gpu_engine, on_cpus, on_gpus};
    pub mod devices {
        pub use crate::launch::devices::choose;
    }
    pub mod gpu {
        pub use crate::launch::gpu::grouped_layouts;
    }
}

pub mod memory {
    pub use crate::memory::{Addressing, DeviceMemory, MemorySpace, RingShape};
}

pub mod metrics {
    pub use crate::metrics::rss_bytes;
}

pub mod model {
    pub use crate::model::activations::{ActivationPlan, LossTile};
    pub use crate::model::freeze::FreezeRules;
    pub use crate::model::head_rows::HeadRows;
    pub use crate::model::init::init_tensor;
    pub use crate::model::products::products;
    pub use crate::model::shape::ModelShape;
    pub use crate::model::tensors::{Module, TensorSpec, TensorTable};
    pub use crate::model::weights::ModelWeights;
    pub use crate::model::weights::carried::CarriedTensors;
    pub mod presets {
        pub use crate::model::presets::{PRESETS, shape};
    }
}

pub mod model_dir {
    pub use crate::model_dir::ModelDir;
}

pub mod optim {
    pub use crate::optim::adam::{AdamConsts, AdamElement, AdamHyper, AdamState, AdamStep};
    pub use crate::optim::clip::{ClipMemory, ClipRule};
    pub use crate::optim::formats::{Grads, Weights};
    pub use crate::optim::int8::{MomentGroup, MomentKind};
    pub use crate::optim::int8_state::{Int8State, MomentGroups};
    pub use crate::optim::moments::{Moment, Moments};
    pub use crate::optim::norm::{BLOCK, fold};
    pub use crate::optim::optimizer::{Optimizer, Update};
    pub use crate::optim::simd::{AdamKernels, Isa, Stores};
    pub use crate::optim::split::{Masters, SplitMaster, SplitState};
    pub use crate::optim::state_array::{StateArrays, StatePart};
}

/// Losses of pairs and of sampled completions.
pub mod objective {
    pub use crate::policy_loss::{PolicyLoss, PolicyLossKind, PolicyTerms, PolicyToken};
    pub use crate::teacher_loss::{TeacherEntry, TeacherLoss, TeacherRow, TeacherTerms};
}

/// Losses of pairs.
pub mod pair_loss {
    pub use crate::pair_loss::{AnswerSum, PairLoss, PairLossKind, PairTerms};
}

pub mod planner {
    pub use crate::planner::machine::{GroupedLayouts, Machine};
}

pub mod probe {
    pub use crate::probe::copies::CopyDirection;
    pub use crate::probe::grouped::upload_bounds;
    pub use crate::probe::product::{Product, fill};
    pub use crate::probe::samples::Samples;
    pub use crate::probe::states::{States, Triad};
    pub use crate::probe::timer::Timer;
    pub use crate::probe::workers::{Workers, memory_policy};
    pub mod kernels {
        pub use crate::probe::kernels::{SmallKernels, measure};
    }
}

pub mod train {
    pub use crate::train::owned_names::patterns;
}

pub mod trace {
    pub use crate::trace::Recorder;
}

pub mod units {
    pub use crate::units::{ClipScale, NormSq};
}

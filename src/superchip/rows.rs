//! The rows of `superchip-check`: two workloads, and the paper's Table 2.

/// A run of steps.
pub(super) struct TimedRow {
    /// Name in the report.
    pub(super) name: &'static str,
    /// Model of the steps.
    pub(super) model: &'static str,
    /// Settings of the run, in the format of a configuration file.
    pub(super) settings: &'static str,
    /// Minutes with loading.
    pub(super) minutes: f64,
    /// The paper's TFLOP/s on a GH200, if it has the row.
    pub(super) paper_tflops: Option<f64>,
}

/// Steps before the clock starts, and steps that are timed.
pub(super) const WARMUP: u64 = 2;
pub(super) const STEPS: u64 = 5;

const W1: &str = "per-device-train-batch-size = 4\nseq-length = 4096\nresident-buckets = 0\n";
const AUTOMATIC: &str = "per-device-train-batch-size = 4\nseq-length = 4096\n";
/// Batch and length of Table 2.
macro_rules! table_2 {
    ($without:literal) => {
        concat!("per-device-train-batch-size = 8\nseq-length = 1024\nwithout = [", $without, "]\n")
    };
}

const fn row(name: &'static str, model: &'static str, settings: &'static str, minutes: f64, paper_tflops: Option<f64>) -> TimedRow {
    TimedRow { name, model, settings, minutes, paper_tflops }
}

/// Every row, in the order of the runs.
pub(super) const ROWS: [TimedRow; 9] = [
    row("W1: Qwen3-4B, 4 x 4096, every state on the CPU", "qwen3-4b", W1, 0.6, None),
    row("W1: Qwen3-4B, 4 x 4096, automatic", "qwen3-4b", AUTOMATIC, 0.6, None),
    row("W2: Llama-8B, 4 x 4096, automatic", "llama-8b", AUTOMATIC, 0.9, None),
    row(
        "Table 2: ZeRO-Offload alike",
        "gpt-5b",
        table_2!("\"stv\", \"deadline-order\", \"repartition\", \"superchip-cast\", \"grace-adam\", \"adaptive\""),
        1.2,
        Some(116.2),
    ),
    row(
        "Table 2: + vector Adam",
        "gpt-5b",
        table_2!("\"stv\", \"deadline-order\", \"repartition\", \"superchip-cast\", \"adaptive\""),
        0.6,
        Some(128.23),
    ),
    row("Table 2: + cast on the GPU", "gpt-5b", table_2!("\"stv\", \"deadline-order\", \"repartition\", \"adaptive\""), 0.6, Some(144.49)),
    row("Table 2: + speculation", "gpt-5b", table_2!("\"deadline-order\", \"repartition\""), 0.5, Some(209.36)),
    row("Table 2: + resident buckets", "gpt-5b", table_2!("\"deadline-order\""), 0.5, Some(238.92)),
    row("Table 2: + deadline order (not in the paper)", "gpt-5b", table_2!(""), 0.5, None),
];

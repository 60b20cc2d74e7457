# Written by SUPEROFFLOAD_WRITE_FLAGS=1 cargo test --test main python::
from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

class Settings(TypedDict, total=False):
    """Settings of a training run."""

    config: str | PathLike[str]
    """TOML, YAML or JSON file with these flags as keys; flags win [default: none]."""
    deepspeed: str | PathLike[str]
    """DeepSpeed configuration; flags and --config win [default: none]."""
    freeze: str | int | float | Sequence[str | int | float]
    """Tensors to freeze: a regular expression for names in the model's files; repeatable [default: none]."""
    train_only: str | int | float | Sequence[str | int | float]
    """Tensors to train, all others are frozen: a regular expression for names; repeatable [default: all]."""
    train_tokens: str | int | float
    """Tokens whose rows alone of embedding and output matrix are trained [default: none]."""
    init: Literal["random", "checkpoint"]
    """Source of the initial weights [default: checkpoint with --model, else random]."""
    eval_data: str | PathLike[str] | Sequence[str | PathLike[str]]
    """Evaluation data: files, directories, patterns or hub names [default: none]."""
    eval_split: str | int | float
    """Fraction or number of the data's documents to hold out for evaluation [default: none]."""
    tokenizer: Literal["auto", "bytes"]
    """Tokenizer: the model's tokenizer.json, or bytes [default: auto]."""
    eos_token: str | int | float
    """The token between documents, as text or id [default: from the model's files]."""
    add_bos: Literal["auto", "yes", "no"]
    """Begin each document with the begin-of-text token; auto follows the tokenizer [default: auto]."""
    data_format: Literal["auto", "text", "messages", "prompt-completion", "alpaca", "input-ids", "preference", "rollouts", "teacher"]
    """Meaning of the columns of records; auto goes by their names [default: auto]."""
    columns: str | int | float | Sequence[str | int | float]
    """Column names of the data, as OURS=THEIRS, separated by commas [default: none]."""
    train_on: Literal["auto", "all", "completion", "assistant", "last"]
    """Trained part of a record; auto: whole texts, completions, answers of chats [default: auto]."""
    chat_template: str | PathLike[str]
    """Chat template to use, a Jinja file [default: the model's]."""
    packing: Literal["auto", "wrapped", "bfd", "off"]
    """Packing of rows: one stream of text, whole documents, or one document each [default: auto]."""
    overlong: Literal["auto", "truncate", "split", "drop"]
    """Handling of documents longer than a row; auto splits text, truncates records [default: auto]."""
    pair_length: int
    """Largest number of tokens of an answer with its prompt, for --loss [default: half of a row]."""
    chat_template_name: str | int | float
    """Name of the chat template, if the model has several [default: the template named default]."""
    chat_template_kwargs: str | int | float
    """Variables of chat templates, as JSON: {"enable_thinking": false} [default: none]."""
    chat_date: str | int | float
    """Date that chat templates receive [default: today, or the checkpoint's]."""
    output_dir: str | PathLike[str]
    """Output directory for checkpoints and metrics [default: runs/train]."""
    gpus: str | int | float
    """GPUs that train together, in each process [default: 1]."""
    sequence_ranks: int
    """Sequence-parallel degree (Ulysses): GPUs that share each sequence [default: 1]."""
    device: Literal["auto", "cpu", "cuda"]
    """Device for the forward and backward passes [default: auto]."""
    strategy: Literal["superoffload", "zero-offload", "no-offload"]
    """Set of offloading techniques [default: superoffload]."""
    rollback: Literal["deferred", "inverse"]
    """Method to undo a failed speculation [default: deferred]."""
    loss: Literal["dpo", "hinge", "ipo", "robust", "apo-zero", "apo-down", "sigmoid-norm", "simpo", "cpo", "orpo", "dapo", "grpo", "dr-grpo", "distill"]
    """Loss of pairs of answers, sampled completions or a teacher [default: none: the loss of tokens]."""
    beta: float
    """Factor on log-ratios of pairs, or on divergences of completions [default: 0.1 with pairs, else 0]."""
    cpo_alpha: float
    """Factor on the chosen answer's cross-entropy, for --loss cpo and simpo [default: 1, 0 with simpo]."""
    epsilon: float
    """Range below 1 of ratios that count, for --loss dapo [default: 0.2 with --loss]."""
    epsilon_high: float
    """Range above 1 of ratios that count, for --loss dapo [default: that of --epsilon]."""
    max_completion_length: int
    """Tokens by which --loss dr-grpo divides [default: 512 with --loss]."""
    kd_ratio: float
    """Part of distillation in --loss distill, beside cross-entropy [default: 1 with --loss distill]."""
    loss_top_k: int
    """Most tokens of a teacher for each token, for --loss distill [default: 64 with --loss distill]."""
    reference: str | PathLike[str]
    """Model that is the reference of --loss: a directory, or a hub name [default: the initial model]."""
    label_smoothing: float
    """Probability that a label is wrong, for --loss robust [default: 0 with --loss]."""
    simpo_gamma: float
    """Margin of --loss simpo [default: 0.5 with --loss]."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """Format of weights and gradients on the device [default: bfloat16]."""
    matmul_dtype: Literal["bfloat16", "fp8"]
    """Format of layers' matrix products; fp8 is faster and coarser [default: that of --dtype]."""
    moments: Literal["float32", "bfloat16", "int8"]
    """Format of AdamW's moments between steps [default: float32]."""
    masters: Literal["auto", "float32", "split"]
    """Storage of master weights; split saves 2 bytes a parameter, without loss [default: auto]."""
    processes: int
    """Processes that train together [default: the launcher's, else 1]."""
    process: int
    """Number of this process, from 0 [default: the launcher's, else 0]."""
    rendezvous: str | int | float
    """Host and port of process 0, to which the other processes connect [default: the launcher's]."""
    rendezvous_limit: int
    """Seconds that a process waits for the other processes at the start [default: 600]."""
    run_token_file: str | PathLike[str]
    """File with the secret of a run's processes [default: the variable SUPEROFFLOAD_RUN_TOKEN]."""
    transport: Literal["auto", "nccl", "tcp"]
    """Transport of gradients and weights between processes [default: auto]."""
    max_steps: int
    """Optimizer steps; wins over --num-train-epochs [default: none]."""
    num_train_epochs: float
    """Passes over the data, fractions allowed [default: 3]."""
    per_device_train_batch_size: int
    """Sequences of a micro-batch [default: 8]."""
    tokens_per_step: int
    """Tokens of an optimizer step, which the plan cuts into micro-batches [default: none]."""
    gradient_accumulation_steps: int
    """Micro-batches of an optimizer step on each GPU [default: one for each gradient share]."""
    gradient_shares: int
    """Partial gradient sums of a step, added in float32 [default: the GPUs, or the checkpoint's]."""
    gradient_group: int
    """Partial sums in a group; the sum of each group is rounded [default: none, or the checkpoint's]."""
    seq_length: int
    """Tokens of a sequence [default: 1024]."""
    learning_rate: float
    """Peak learning rate [default: 5e-5]."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"]
    """Shape of the learning rate over the steps [default: linear]."""
    warmup_steps: int
    """Steps of linear warm-up [default: 0]."""
    warmup_ratio: float
    """Fraction of all steps for warm-up, rounded up, if --warmup-steps is 0 [default: 0]."""
    weight_decay: float
    """Decoupled weight decay; norms and biases have none [default: 0]."""
    adam_beta1: float
    """Decay of Adam's first moment [default: 0.9]."""
    adam_beta2: float
    """Decay of Adam's second moment [default: 0.999]."""
    adam_epsilon: float
    """Adam's epsilon [default: 1e-8]."""
    max_grad_norm: float
    """Gradient norm above which gradients are clipped; 0 disables clipping [default: 1]."""
    router_aux_loss_coef: float
    """Coefficient of the load-balancing loss of routers; 0 disables it [default: 0]."""
    seed: int
    """Seed of random weights and of the data order [default: 42]."""
    logging_steps: int
    """Steps between log lines [default: 10]."""
    report_to: Literal["jsonl", "tensorboard", "none"] | Sequence[Literal["jsonl", "tensorboard", "none"]]
    """Loggers of steps besides metrics.jsonl, separated by commas [default: tensorboard]."""
    eval_strategy: Literal["no", "steps", "epoch"]
    """Schedule of evaluations [default: steps with --eval-data or --eval-split]."""
    eval_steps: int
    """Steps between evaluations [default: as --save-steps]."""
    eval_on_start: bool
    """Evaluate before the first step, too [default: false]."""
    prompts: str | PathLike[str]
    """Prompts, one a line; the model continues each of them at every evaluation [default: none]."""
    early_stopping_patience: int
    """Number of consecutive evaluations without a lower loss after which a run ends [default: none]."""
    early_stopping_threshold: float
    """Smallest decrease of the loss that counts for --early-stopping-patience [default: 0]."""
    save_steps: int
    """Steps between checkpoints [default: 500]."""
    save_total_limit: int
    """Number of newest checkpoints to keep, besides the one with the best evaluation [default: all]."""
    save_memory: str | int | float
    """Host memory for saves beside steps; off: a save stops training [default: auto]."""
    save_rate: str | int | float
    """Let saves write at most this much in a second, for example 500MiB [default: as fast as the disk]."""
    max_skipped_steps: int
    """Consecutive steps with non-finite gradients after which a run ends; 0 is never [default: 100]."""
    stall_limit: int
    """Seconds without progress after which a run reports the cause and ends; 0 is never [default: 300]."""
    stop_signals: Literal["TERM", "INT", "HUP", "USR1", "USR2", "XCPU"] | Sequence[Literal["TERM", "INT", "HUP", "USR1", "USR2", "XCPU"]]
    """Signals that save and end a run, separated by commas [default: TERM,INT,HUP,USR1,USR2,XCPU]."""
    resume_from_checkpoint: str | int | float
    """Checkpoint to continue from, `auto` for the newest good one [default: none]."""
    dry_run: bool
    """Show the data and the plan, then exit without training or writing files [default: false]."""
    allow_changed: Literal["model", "tokenizer", "data", "numerics", "moments"] | Sequence[Literal["model", "tokenizer", "data", "numerics", "moments"]]
    """Parts of a run that may differ from the checkpoint, separated by commas [default: none]."""
    threads: int
    """Compute threads, and as many optimizer threads [default: one for each core]."""
    bucket_mib: float
    """Size of a bucket in MiB of 16-bit parameters [default: the plan decides]."""
    layer_order: str | int | float
    """Order of layers and micro-batches; with segments fewer bytes cross the link [default: auto]."""
    resident_buckets: str | int | float
    """Tail buckets with their optimizer states on the device [default: auto]."""
    activations: Literal["auto", "keep", "recompute-cheap", "recompute-block", "host-attention", "host"]
    """Activations that layers keep for their backward pass [default: auto]."""
    weights: Literal["auto", "replicated", "sharded", "fully-sharded", "flow"]
    """Placement of layer weights: on the device, or streamed from host memory [default: auto]."""
    replan: Literal["auto", "off", "random"]
    """Replan during the run if steps differ from the plan's assumptions [default: auto]."""
    hardware: str | PathLike[str]
    """Hardware profile with the rates for a GPU's plan: auto, a name or a file [default: auto]."""
    hbm_limit: str | int | float
    """Use no more GPU memory than this, for example 80GiB [default: all free memory]."""
    host_limit: str | int | float
    """Use no more host memory than this, for example 1.5TiB [default: free memory, less a reserve]."""
    memory: Literal["pinned", "unified"]
    """Host memory of offloaded states; unified needs a GPU [default: pinned]."""
    huge_pages: Literal["auto", "explicit", "off"]
    """Page sizes of host memory [default: auto]."""
    attention: Literal["auto", "cudnn", "products", "plain"]
    """Implementation of attention on a GPU [default: auto]."""
    expert_products: Literal["auto", "own", "cublaslt"]
    """Implementation of expert matrix products on a GPU [default: auto]."""
    head_rows: Literal["auto", "all", "trained"]
    """Rows that the head computes: output matrix and loss [default: auto]."""
    logits_dtype: Literal["auto", "bfloat16", "float16", "float32"]
    """Format of the logits, from which losses and log-probabilities are computed [default: auto]."""
    nondeterministic: bool
    """Allow GPU kernels whose results may differ between runs in the last bit [default: false]."""
    cuda_libraries: str | PathLike[str]
    """Directory to search first for NVIDIA's libraries [default: the system's search path]."""
    no_shuffle: bool
    """Take the sequences in file order [default: false]."""
    trace: str | PathLike[str]
    """Write the timeline for Perfetto here, not to trace.json in the output directory [default: none]."""
    perf_counters: bool
    """Count cycles, cache misses and page faults of the optimizer's threads [default: false]."""
    digest: bool
    """Print a digest of the final state as the last line [default: false]."""
    isa: Literal["auto", "scalar", "avx2", "avx512", "neon", "sve2"]
    """Instruction set of the CPU optimizer [default: auto]."""
    resctrl_group: str | int | float
    """Partition of cache and bandwidth that the optimizer's threads join [default: auto]."""
    slots: int
    """Staging slots for gradients and as many for parameters [default: chosen with the plan]."""
    without: Literal["stv", "deadline-order", "repartition", "superchip-cast", "grace-adam", "mpam", "weight-flow", "adaptive", "early-commit"] | Sequence[Literal["stv", "deadline-order", "repartition", "superchip-cast", "grace-adam", "mpam", "weight-flow", "adaptive", "early-commit"]]
    """Techniques to turn off, separated by commas [default: none]."""
    cast: Literal["auto", "device", "host"]
    """Side that converts gradients [default: auto]."""
    early_rows: Literal["auto", "on", "off"]
    """Step the rows of a tied embedding first that the batch does not use [default: auto]."""

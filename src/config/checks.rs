//! Checks of settings before any file is read.

use super::options::{DeviceChoice, EvalStrategy, InitChoice, ReplanChoice, Resume, Rollback, TrainDtype};
use super::settings::Settings;
use crate::describe;
use crate::device::PARTS_MAX;
use crate::error::{Error, Result};
use crate::host::resctrl_group::ResctrlGroup;
use crate::optim::moments::Moments;
use crate::optim::schedule::TrainLength;
use crate::ranks::RANKS_MAX;
use crate::request::check::require;
use crate::request::choices::{HostMemoryKind, MastersChoice, Strategy, Technique, Transport, WeightsChoice};
use crate::request::cut::MICRO_BATCH_TOKENS_MAX;
use crate::signals::StopSignal;
use std::path::Path;

/// Largest learning rate. A step of AdamW moves every parameter by about the learning rate, and parameters are of order 1: a larger rate
/// overwrites all weights with noise in one step.
const LEARNING_RATE_MAX: f64 = 10.0;
/// Largest epsilon of Adam. Gradients are far smaller, so a larger epsilon would suppress them.
const EPSILON_MAX: f64 = 1.0;
/// Largest bucket in MiB: 1 TiB.
const BUCKET_MIB_MAX: f64 = 1_048_576.0;
/// Largest number of optimizer threads, above the core count of any machine.
const THREADS_MAX: usize = 4096;
/// Largest number of staging slots, above the needs of any model.
const SLOTS_MAX: usize = 4096;
/// Largest number of tokens per optimizer step, far above the batch size of any training run.
pub(crate) const STEP_TOKENS_MAX: usize = 1 << 40;

/// The rendezvous timeout is at most one month.
const RENDEZVOUS_SECONDS_MAX: u64 = 31 * 24 * 3600;

impl Settings {
    /// Checks every value by itself and all values together.
    ///
    /// # Errors
    /// `Usage` that names the flag, its value and the allowed values.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_paths()?;
        self.check_counts()?;
        self.check_numbers()?;
        self.check_combinations()
    }

    /// Paths are written into JSON, which only holds UTF-8. The check fails at the start rather than at the first checkpoint.
    fn check_paths(&self) -> Result<()> {
        let resume = match &self.resume_from_checkpoint {
            Some(Resume::Dir(dir)) => Some(dir),
            _ => None,
        };
        let single = [
            ("model", self.model.as_ref()),
            ("output-dir", Some(&self.output_dir)),
            ("resume-from-checkpoint", resume),
            ("trace", self.trace.as_ref()),
            ("prompts", self.prompts.as_ref()),
            ("cuda-libraries", self.cuda_libraries.as_ref()),
            ("run-token-file", self.run_token_file.as_ref()),
        ];
        let data = self.data.iter().map(|path| ("data", Some(path)));
        let eval_data = self.eval_data.iter().map(|path| ("eval-data", Some(path)));
        single
            .into_iter()
            .chain(data)
            .chain(eval_data)
            .filter_map(|(flag, path)| Some((flag, path?)))
            .try_for_each(|(flag, path)| check_path(flag, path))
    }

    /// Checks that every count is in its valid range.
    ///
    /// # Errors
    /// `Usage` that names the flag, its value and the allowed values.
    pub(crate) fn check_counts(&self) -> Result<()> {
        let at_least_one = [
            ("gpus", self.gpus as u64),
            ("processes", self.processes as u64),
            ("sequence-ranks", self.sequence_ranks as u64),
            ("per-device-train-batch-size", self.per_device_train_batch_size as u64),
            ("gradient-accumulation-steps", self.gradient_accumulation_steps.unwrap_or(1) as u64),
            ("gradient-shares", self.cut().partial_sums() as u64),
            ("gradient-group", self.gradient_group.unwrap_or(1) as u64),
            ("seq-length", self.seq_length as u64),
            ("logging-steps", self.logging_steps),
            ("save-steps", self.save_steps),
            ("eval-steps", self.eval_steps.unwrap_or(1)),
            ("early-stopping-patience", self.early_stopping_patience.unwrap_or(1)),
            ("save-total-limit", self.save_total_limit.unwrap_or(1) as u64),
            ("save-rate", self.save_rate.map_or(1, |rate| rate.0)),
            ("hbm-limit", self.hbm_limit.map_or(1, |limit| limit.0)),
            ("host-limit", self.host_limit.map_or(1, |limit| limit.0)),
        ];
        for (flag, count) in at_least_one {
            require(count >= 1, flag, count, "must be at least 1")?;
        }
        let threads = self.threads.unwrap_or(1);
        require((1..=THREADS_MAX).contains(&threads), "threads", threads, format!("must be from 1 to {THREADS_MAX}"))?;
        let slots = self.slots.unwrap_or(1);
        require((1..=SLOTS_MAX).contains(&slots), "slots", slots, format!("must be from 1 to {SLOTS_MAX}"))?;
        let tokens = self.tokens_per_step.unwrap_or(1);
        require((1..=STEP_TOKENS_MAX).contains(&tokens), "tokens-per-step", tokens, format!("must be from 1 to {STEP_TOKENS_MAX}"))?;
        if !self.all_gpus {
            self.cut().check_sequence_ranks(self.router_aux_loss_coef)?;
        }
        // The number of GPUs is not known yet.
        if self.all_gpus && self.tokens_per_step.is_some() {
            return Ok(());
        }
        self.cut().splits(self.split())?.into_iter().try_for_each(|split| self.settled(split).check_batch())
    }

    /// Checks the sizes of micro-batches and steps.
    fn check_batch(&self) -> Result<()> {
        let tokens = self.per_device_train_batch_size.checked_mul(self.seq_length);
        let fits = tokens.is_some_and(|tokens| tokens <= MICRO_BATCH_TOKENS_MAX);
        require(
            fits,
            "per-device-train-batch-size",
            self.per_device_train_batch_size,
            format!("with --seq-length {}, a micro-batch must have at most {MICRO_BATCH_TOKENS_MAX} tokens", self.seq_length),
        )?;
        let step_tokens = self.per_device_train_batch_size.checked_mul(self.seq_length).and_then(|t| t.checked_mul(self.micro_batches()));
        require(
            step_tokens.is_some_and(|tokens| tokens <= STEP_TOKENS_MAX),
            "gradient-accumulation-steps",
            self.micro_batches(),
            format!("a step must have at most {STEP_TOKENS_MAX} tokens"),
        )?;
        self.check_partial_sums()
    }

    fn check_evaluation(&self) -> Result<()> {
        let (evaluates, rule) = (!self.eval_data.is_empty() || self.eval_split.is_some(), "needs --eval-data or --eval-split");
        if let Some(split) = self.eval_split {
            require(self.eval_data.is_empty(), "eval-split", split, "cannot be combined with --eval-data")?;
        }
        let strategy = self.eval_strategy.filter(|strategy| *strategy != EvalStrategy::No);
        let name = strategy.map_or(String::new(), |strategy| describe::written(&describe::value(&strategy)));
        require(evaluates || strategy.is_none(), "eval-strategy", name, rule)?;
        require(evaluates || self.eval_steps.is_none(), "eval-steps", self.eval_steps.unwrap_or_default(), rule)?;
        require(evaluates || !self.eval_on_start, "eval-on-start", true, rule)?;
        let (patience, threshold) = (self.early_stopping_patience, self.early_stopping_threshold);
        let stops = evaluates && self.eval_strategy != Some(EvalStrategy::No);
        require(
            stops || patience.is_none(),
            "early-stopping-patience",
            patience.unwrap_or_default(),
            "needs evaluations: --eval-data or --eval-split, without --eval-strategy no",
        )?;
        check(threshold.is_finite() && threshold >= 0.0, "early-stopping-threshold", threshold, "must be finite and at least 0")?;
        check(patience.is_some() || threshold == 0.0, "early-stopping-threshold", threshold, "needs --early-stopping-patience")
    }

    /// Checks that all partial sums have the same number of micro-batches, once the number of GPUs is known.
    ///
    /// # Errors
    /// `Usage` that names both numbers.
    pub(crate) fn check_partial_sums(&self) -> Result<()> {
        if self.all_gpus {
            return Ok(());
        }
        let (partial_sums, micro_batches) = (self.cut().partial_sums(), self.micro_batches());
        let parts = micro_batches.saturating_mul(self.sequence_ranks);
        let of_parts = if self.sequence_ranks > 1 { format!(" times --sequence-ranks {}", self.sequence_ranks) } else { String::new() };
        let rule = format!("must divide the {micro_batches} micro-batches of a step (--gradient-accumulation-steps){of_parts}");
        let (ranks, all) = (self.cut().ranks(), self.cut().ranks_in_words());
        // Number of parts that a rank adds at once: first within its group, then across groups.
        let parts_of_sum = if self.cut().group() == self.gpus { self.gpus.max(self.processes) } else { ranks };
        if ranks > RANKS_MAX || parts_of_sum > PARTS_MAX {
            let in_groups = format!(", or {RANKS_MAX} with --gradient-group {}", self.gpus);
            let more = if (2..=PARTS_MAX).contains(&self.gpus) && self.processes > 1 { in_groups } else { String::new() };
            return Err(Error::usage(format!("{all}: must be at most {PARTS_MAX} devices{more}")));
        }
        require(parts.is_multiple_of(partial_sums), "gradient-shares", partial_sums, rule)?;
        require(partial_sums.is_multiple_of(ranks), "gradient-shares", partial_sums, format!("must be a multiple of {all}"))?;
        let group = self.gradient_group.unwrap_or(1);
        require(partial_sums.is_multiple_of(group), "gradient-group", group, format!("must divide --gradient-shares {partial_sums}"))?;
        let rank_of_fault = self.faults.iter().map(|fault| fault.rank).max().unwrap_or(0);
        require(rank_of_fault < ranks, "faults", format!("rank = {rank_of_fault}"), format!("must be below {all}"))?;
        let last_faulty_sum = self.inject.iter().map(|injection| injection.share).max().unwrap_or(0);
        require(
            last_faulty_sum < partial_sums,
            "inject",
            format!("share = {last_faulty_sum}"),
            format!("must be below --gradient-shares {partial_sums}"),
        )
    }

    /// Checks the flags of runs with several processes: required flags are set and unsupported flags are not.
    fn check_processes(&self) -> Result<()> {
        let Self { processes, process, .. } = *self;
        require(process < processes, "process", process, format!("must be less than --processes {processes}"))?;
        if let Some(address) = &self.rendezvous {
            let port = address.rsplit_once(':').and_then(|(host, port)| Some(port).filter(|_| !host.is_empty()));
            let is_address = port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
            require(is_address, "rendezvous", address, "must be HOST:PORT, equal for all processes")?;
            require(processes > 1, "rendezvous", address, "needs --processes 2 or more")?;
        }
        let rule = format!("must be from 1 to {RENDEZVOUS_SECONDS_MAX} seconds");
        require((1..=RENDEZVOUS_SECONDS_MAX).contains(&self.rendezvous_limit), "rendezvous-limit", self.rendezvous_limit, rule)?;
        let transport = describe::written(&describe::value(&self.transport));
        if processes == 1 {
            return require(self.transport == Transport::Auto, "transport", transport, "needs --processes 2 or more");
        }
        let on_gpus = self.transport != Transport::Nccl || self.device != DeviceChoice::Cpu;
        require(on_gpus, "transport", transport, "must be tcp with --device cpu, because NCCL needs GPUs")?;
        require(!self.all_gpus, "gpus", "all", "must be a number with several --processes: the GPUs of each process")?;
        let is_allowed = match self.weights {
            WeightsChoice::Auto | WeightsChoice::Replicated | WeightsChoice::FullySharded => true,
            WeightsChoice::Sharded => self.gpus > 1,
            WeightsChoice::Flow => false,
        };
        let weights = describe::written(&describe::value(&self.weights));
        let rule = if self.gpus > 1 {
            "must be replicated, sharded or fully-sharded with several --processes"
        } else {
            "must be replicated or fully-sharded with several --processes of one GPU each"
        };
        require(is_allowed, "weights", weights, rule)?;
        require(self.replan != ReplanChoice::Random, "replan", "random", "must be off with several --processes")
    }

    fn check_combinations(&self) -> Result<()> {
        self.check_processes()?;
        require(self.init == InitChoice::Random || self.model.is_some(), "init", "checkpoint", "must be random without --model")?;
        let (unified, rule) = (self.memory == HostMemoryKind::Unified, "needs --strategy superoffload and --rollback deferred");
        let states_move = self.strategy == Strategy::Superoffload && self.rollback == Rollback::Deferred;
        require(!unified || states_move, "memory", "unified", rule)?;
        let rule = "needs --rollback deferred: the inverse step cannot restore rounded moments";
        require(self.moments == Moments::Float32 || self.rollback == Rollback::Deferred, "moments", self.moments, rule)?;
        let is_split = self.masters == MastersChoice::Split;
        let rule = "needs --dtype bfloat16, whose numbers are the upper halves of float32 numbers";
        require(!is_split || self.dtype == TrainDtype::Bfloat16, "masters", "split", rule)?;
        let rule = "needs --rollback deferred: the inverse step can make second moments negative, and split masters use their signs";
        require(!is_split || self.rollback == Rollback::Deferred, "masters", "split", rule)?;
        if let Some(matmul_dtype) = self.matmul_dtype {
            let name = describe::written(&describe::value(&matmul_dtype));
            require(self.dtype == TrainDtype::Bfloat16, "matmul-dtype", name, "needs --dtype bfloat16")?;
        }
        let on_cpu = self.adversary.is_none() || self.device == DeviceChoice::Cpu;
        require(on_cpu, "adversary", self.adversary.unwrap_or_default(), "needs --device cpu")?;
        if self.device == DeviceChoice::Cpu {
            self.site().check_needs_no_gpu(self.kernels())?;
        }
        let named = matches!(self.resctrl_group, ResctrlGroup::Named(_));
        let mpam = cfg!(feature = "mpam") && !self.without.contains(&Technique::Mpam);
        require(mpam || !named, "resctrl-group", "NAME", "needs the technique mpam")?;
        self.check_evaluation()?;
        self.check_objective()?;
        let names = describe::written(&describe::value(&StopSignal::ALL));
        require(!self.stop_signals.is_empty(), "stop-signals", "without a signal", format!("must be one or more of {names}"))?;
        for injection in &self.inject {
            require(injection.step >= 1, "inject", injection.step, "must be at least 1: steps are counted from 1")?;
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        self.check_update()?;
        let norm = self.max_grad_norm;
        check(norm.is_finite() && norm >= 0.0, "max-grad-norm", norm, "must be finite and at least 0")?;
        let balance = self.router_aux_loss_coef;
        check(balance.is_finite() && balance >= 0.0, "router-aux-loss-coef", balance, "must be finite and at least 0")?;
        check((0.0..=1.0).contains(&self.warmup_ratio), "warmup-ratio", self.warmup_ratio, "must be from 0 to 1")?;
        let mib = self.bucket_mib.unwrap_or(1.0);
        check(mib > 0.0 && mib <= BUCKET_MIB_MAX, "bucket-mib", mib, &format!("must be above 0 and at most {BUCKET_MIB_MAX}"))?;
        match self.train_length {
            TrainLength::Steps(steps) => require(steps >= 1, "max-steps", steps, "must be at least 1"),
            TrainLength::Epochs(epochs) => {
                check(epochs.is_finite() && epochs > 0.0, "num-train-epochs", epochs, "must be finite and above 0")
            }
        }
    }

    fn check_update(&self) -> Result<()> {
        let (lr, decay) = (self.learning_rate, self.weight_decay);
        let rule = format!("must be between 0 and {LEARNING_RATE_MAX}");
        check((0.0..=LEARNING_RATE_MAX).contains(&lr), "learning-rate", lr, &rule)?;
        check(decay.is_finite() && decay >= 0.0, "weight-decay", decay, "must be finite and at least 0")?;
        // A step multiplies parameters by `1 - lr * decay`.
        check(lr * decay < 1.0, "weight-decay", decay, &format!("must be less than 1 / --learning-rate {lr:?}"))?;
        for (flag, beta) in [("adam-beta1", self.adam_beta1), ("adam-beta2", self.adam_beta2)] {
            // The optimizer computes in float32, in which a decay may round to 1 and an epsilon to 0.
            check((0.0..1.0).contains(&beta) && (beta as f32) < 1.0, flag, beta, "must be at least 0 and below 1 in float32")?;
        }
        let (moments, beta1) = (self.moments, self.adam_beta1);
        let most = moments.beta1_max();
        check(beta1 <= most, "adam-beta1", beta1, &format!("must be at most {most} with --moments {moments}"))?;
        let eps = self.adam_epsilon;
        check(eps <= EPSILON_MAX && eps as f32 > 0.0, "adam-epsilon", eps, &format!("must be above 0 in float32 and at most {EPSILON_MAX}"))
    }
}

fn check_path(flag: &str, path: &Path) -> Result<()> {
    require(!path.as_os_str().is_empty(), flag, "\"\"", "must not be empty")?;
    require(path.to_str().is_some(), flag, path.display(), "must be a path in UTF-8")
}

/// Like [`require`], with numbers in their shortest form: 1e300 rather than 301 digits.
pub(super) fn check(holds: bool, flag: &str, value: f64, rule: &str) -> Result<()> {
    require(holds, flag, format_args!("{value:?}"), rule)
}

#[cfg(test)]
mod tests {
    use crate::config::settings::Settings;
    use crate::config::settings::tests::command_line;

    fn resolve(args: &[&str]) -> crate::error::Result<Settings> {
        Settings::resolve(command_line(args).unwrap())
    }

    #[test]
    fn more_devices_than_a_kernel_adds_parts_of_are_of_groups() {
        let of = |gpus, processes, gradient_group| Settings { gpus, processes, gradient_group, ..Settings::default() }.check_partial_sums();
        for (gpus, processes, group) in [(8, 1, None), (4, 2, None), (4, 4, Some(4)), (2, 8, Some(2)), (8, 2, Some(8))] {
            of(gpus, processes, group).unwrap();
        }
        let refused = |gpus, processes, group| of(gpus, processes, group).unwrap_err().to_string();
        let sixteen = "--processes 4 times --gpus 4: must be at most 8 devices, or 16 with --gradient-group 4";
        assert_eq!([refused(4, 4, None), refused(4, 4, Some(2))], [sixteen; 2]);
        assert_eq!(refused(9, 1, None), "--gpus 9: must be at most 8 devices");
        assert_eq!(refused(1, 9, None), "--processes 9: must be at most 8 devices");
        assert!(refused(4, 5, Some(4)).contains("at most 8 devices, or 16"));
    }

    #[test]
    fn numbers_that_cannot_train_are_refused_in_a_line_with_flag_and_range() {
        let cases = [
            ("--learning-rate", "1e30", "1e30: must be between 0 and 10"),
            ("--learning-rate", "1e308", "1e308: must be"),
            ("--learning-rate", "inf", "inf: must be"),
            ("--learning-rate", "-3e-4", "-0.0003: must be"),
            ("--weight-decay", "-0.1", "-0.1: must be finite and at least 0"),
            ("--weight-decay", "400", "400.0: must be less than 1 / --learning-rate 0.003"),
            ("--adam-beta1", "-0.9", "-0.9: must be at least 0 and below 1"),
            ("--adam-beta2", "0.999999999", "0.999999999: must be at least 0 and below 1 in float32"),
            ("--adam-beta2", "inf", "inf: must be"),
            ("--adam-epsilon", "2", "2.0: must be above 0 in float32 and at most 1"),
            ("--adam-epsilon", "-1e-8", "-1e-8: must be"),
            ("--adam-epsilon", "inf", "inf: must be"),
            ("--adam-epsilon", "nan", "NaN: must be"),
            ("--max-grad-norm", "nan", "NaN: must be finite and at least 0"),
            ("--max-grad-norm", "-1", "-1.0: must be"),
            ("--num-train-epochs", "-1", "-1.0: must be finite and above 0"),
            ("--num-train-epochs", "inf", "inf: must be"),
        ];
        for (flag, value, message) in cases {
            let refused = resolve(&["--seed", "1", flag, value]).unwrap_err();
            assert_eq!(refused.exit_code(), 2);
            let printed = refused.to_string();
            assert!(printed.starts_with(&format!("{flag} {message}")) && printed.lines().count() == 1, "{flag} {value}: {printed}");
        }
    }

    #[test]
    fn split_masters_are_refused_without_upper_halves_and_without_free_signs() {
        let refused = |args: &[&str]| resolve(&[&["--masters", "split"], args].concat()).unwrap_err().to_string();
        for dtype in ["float16", "float32"] {
            assert!(refused(&["--dtype", dtype]).starts_with("--masters split: needs --dtype bfloat16"));
        }
        assert!(refused(&["--rollback", "inverse"]).starts_with("--masters split: needs --rollback deferred"));
        assert!(resolve(&["--masters", "split", "--matmul-dtype", "fp8"]).is_ok() && resolve(&["--masters", "auto"]).is_ok());
    }

    #[test]
    fn packed_moments_are_refused_where_they_would_be_wrong() {
        let refused = |args: &[&str]| resolve(&[&["--moments", "bfloat16"], args].concat()).unwrap_err().to_string();
        let inverse = refused(&["--rollback", "inverse"]);
        assert_eq!(inverse, "--moments bfloat16: needs --rollback deferred: the inverse step cannot restore rounded moments");
        assert!(refused(&["--adam-beta1", "0.999"]).starts_with("--adam-beta1 0.999: must be at most 0.99 with --moments bfloat16"));
        assert!(resolve(&["--moments", "bfloat16", "--adam-beta1", "0.99"]).is_ok() && resolve(&["--adam-beta1", "0.999"]).is_ok());
        let int8 = |args: &[&str]| resolve(&[&["--moments", "int8"], args].concat()).map(drop).map_err(|error| error.to_string());
        assert!(int8(&["--adam-beta1", "0.94"]).unwrap_err().starts_with("--adam-beta1 0.94: must be at most 0.93 with --moments int8"));
        let inverse = int8(&["--rollback", "inverse"]).unwrap_err();
        assert_eq!(inverse, "--moments int8: needs --rollback deferred: the inverse step cannot restore rounded moments");
        assert_eq!([int8(&["--adam-beta1", "0.93"]), int8(&["--adam-beta2", "0.9999"])], [Ok(()), Ok(())]);
    }

    #[test]
    fn common_settings_are_allowed() {
        for args in [
            ["--learning-rate", "0"],
            ["--learning-rate", "1"],
            ["--weight-decay", "0.3"],
            ["--adam-beta1", "0"],
            ["--adam-epsilon", "1e-15"],
            ["--max-grad-norm", "0"],
        ] {
            assert!(resolve(&args).is_ok(), "{args:?}");
        }
    }
}

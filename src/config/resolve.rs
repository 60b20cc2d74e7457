//! Resolves options to settings: fills in defaults and checks every value.

use super::options::{GpuCount, InitChoice};
use super::settings::{Settings, TrainOptions};
use crate::data::chat::record::DataFormat;
use crate::data::rows::row_rules::Packing;
use crate::error::{Error, Result};
use crate::hub::is_model_name;
use crate::model_dir::expect_exists;
use crate::objective::ObjectiveKind;
use crate::optim::schedule::{LrScheduler, TrainLength};
use crate::request::check::require;

impl TrainOptions {
    /// Flags of the demo run, which trains the built-in model on the shipped text.
    pub const DEMO_FLAGS: &str = "--output-dir runs/demo --max-steps 300 --seq-length 256 --learning-rate 3e-3 \
        --lr-scheduler-type cosine --warmup-steps 10 --weight-decay 0.1 --adam-beta2 0.95 --save-steps 150";
}

impl Settings {
    /// Settings of the demo, used when neither a model nor data is given. A small model learns the shipped text in a minute or two.
    pub fn demo() -> Self {
        Self {
            output_dir: "runs/demo".into(),
            train_length: TrainLength::Steps(300),
            seq_length: 256,
            learning_rate: 3e-3,
            lr_scheduler_type: LrScheduler::Cosine,
            warmup_steps: 10,
            weight_decay: 0.1,
            adam_beta2: 0.95,
            save_steps: 150,
            ..Self::default()
        }
    }

    /// Fills the options that are not set with defaults (from [`Settings::demo`] when neither model nor data is given)
    /// and checks everything.
    ///
    /// # Errors
    /// `Usage` that names the flag, its value and the allowed values. Also for a model that does not exist, and for a model, or a loss of
    /// pairs, completions or a teacher, without data.
    pub fn resolve(options: TrainOptions) -> Result<Self> {
        let is_demo = options.model.is_none() && options.data.is_none();
        if let Some(model) = options.model.as_ref().filter(|_| options.data.is_none()) {
            if !is_model_name(model) {
                expect_exists(model)?;
            }
            let remedy = match options.resume_from_checkpoint {
                Some(_) => "`superoffload resume DIR` takes it from the run in DIR",
                None => "name the text to train on (only the built-in model has text of its own)",
            };
            return Err(Error::usage(format!("--model: --data is missing; {remedy}")));
        }
        require(options.data.as_ref().is_none_or(|data| !data.is_empty()), "data", "[]", "name at least one file or directory")?;
        let settings = Self::resolve_over(if is_demo { Self::demo() } else { Self::default() }, options)?;
        settings.check_data_of_objective()?;
        Ok(settings)
    }

    /// Like [`Settings::resolve`], with the defaults of `base`.
    ///
    /// # Errors
    /// `Usage` that names the flag, its value and the allowed values.
    pub(crate) fn resolve_over(base: Self, options: TrainOptions) -> Result<Self> {
        let settings = base.overridden_by(options);
        settings.check()?;
        Ok(settings)
    }

    /// These settings on `count` GPUs if `--gpus all` was given, else unchanged.
    ///
    /// # Errors
    /// `Usage` that names the settings that do not fit `count` GPUs.
    pub(crate) fn on_gpus(&self, count: usize) -> Result<Self> {
        let gpus = if self.all_gpus { count } else { self.gpus };
        let settings = Self { gpus, all_gpus: false, ..self.clone() };
        settings.check()?;
        Ok(settings)
    }

    fn overridden_by(mut self, mut options: TrainOptions) -> Self {
        if options.model.is_some() {
            options.init.get_or_insert(InitChoice::Checkpoint);
        }
        // A ratio that was set takes precedence over a default number of steps.
        if options.warmup_ratio.is_some() {
            options.warmup_steps.get_or_insert(0);
        }
        let (steps, epochs) = (options.max_steps.map(TrainLength::Steps), options.num_train_epochs.map(TrainLength::Epochs));
        self.train_length = steps.or(epochs).unwrap_or(self.train_length);
        match options.gpus {
            Some(GpuCount::All) => self.all_gpus = true,
            Some(GpuCount::Count(count)) => self.gpus = count,
            None => {}
        }
        self.sources.extend(options.config.iter().chain(&options.deepspeed).cloned());
        self.is_batch_open = options.tokens_per_step.is_some() && options.per_device_train_batch_size.is_none();
        self.take(options);
        if let Some(loss) = self.loss {
            self.read_for(loss);
        }
        self.without.sort_unstable();
        self.without.dedup();
        self.allow_changed.sort_unstable();
        self.allow_changed.dedup();
        self.stop_signals.sort_unstable();
        self.stop_signals.dedup();
        self
    }
}

impl Settings {
    /// Chooses the format and the packing of data for `loss` where they are open.
    fn read_for(&mut self, loss: ObjectiveKind) {
        if self.data_format == DataFormat::Auto {
            self.data_format = loss.data_format();
        }
        if self.packing == Packing::Auto {
            self.packing = Packing::Bfd;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Resume;
    use crate::config::settings::KEYS;
    use crate::config::settings::tests::{command_line, flags, sample, sample_options};
    use crate::describe;
    use crate::faults::Injection;
    use crate::request::choices::Technique;
    use serde_json::{Map, Value};
    use std::path::PathBuf;

    fn resolve(args: &[&str]) -> Result<Settings> {
        Settings::resolve(command_line(args).unwrap())
    }

    /// Settings of a run that is not the demo.
    fn base() -> Settings {
        resolve(&["--data", "corpus.txt"]).unwrap()
    }

    /// Settings that differ from those of `other`, with their values.
    fn unlike(settings: &Settings, other: &Settings) -> Map<String, Value> {
        let [mut settings, other] = [settings, other].map(|settings| serde_json::to_value(settings).unwrap().as_object().unwrap().clone());
        settings.retain(|name, value| other.get(name) != Some(value));
        settings
    }

    /// Everything derived from the table must agree: the flag, the key of the file, the merge, the field, its JSON, and the flag again.
    #[test]
    fn every_flag_is_a_setting_that_goes_round_or_is_refused_by_name() {
        for flag in flags().into_iter().filter(|flag| !["config", "deepspeed"].contains(&flag.get_id().as_str())) {
            let (name, _) = sample(&flag);
            let given = sample_options(&flag);
            assert_eq!(given.explicit_flags(), [flag.get_id().as_str()]);
            let settings = match Settings::resolve(given.over(command_line(&["--data", "corpus.txt"]).unwrap())) {
                Ok(settings) => settings,
                Err(refused) => {
                    assert!(refused.to_string().contains(&name), "--{name}: {refused}");
                    continue;
                }
            };
            let changed = unlike(&settings, &base());
            assert!(!changed.is_empty(), "--{name}");
            assert!(changed.keys().all(|key| KEYS.iter().any(|known| known.name == key)), "{changed:?}");
            let again: Vec<_> = changed.iter().map(|(key, value)| describe::flag(key, value).replacen(' ', "=", 1)).collect();
            let again = command_line(&again.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
            assert_eq!(Settings::resolve_over(base(), again).unwrap(), settings, "--{name}");
        }
    }

    #[test]
    fn the_defaults_that_help_names_are_the_defaults() {
        let mut checked = 0;
        for flag in flags() {
            let help = flag.get_help().unwrap().to_string();
            let default = help.rsplit("[default: ").next().unwrap().trim_end_matches(']');
            let words = default.contains(' ') || ["none", "all"].contains(&default);
            if !words {
                let named = format!("--{}={default}", flag.get_long().unwrap());
                assert_eq!(resolve(&["--data=corpus.txt", &named]).unwrap(), base(), "{named}");
                checked += 1;
            }
        }
        assert!(checked >= 24, "only {checked} defaults are literal");
    }

    #[test]
    fn nonsense_is_refused_with_flag_value_and_range() {
        let cases = [
            ("--learning-rate=nan", "between 0 and 10"),
            ("--learning-rate=-1", "between 0 and 10"),
            ("--weight-decay=inf", "finite and at least 0"),
            ("--max-grad-norm=-0.5", "finite and at least 0"),
            ("--adam-beta1=1", "below 1"),
            ("--adam-beta2=-0.1", "at least 0"),
            ("--adam-beta2=nan", "below 1"),
            ("--adam-epsilon=0", "above 0"),
            ("--adam-epsilon=1e-60", "above 0 in float32"),
            ("--per-device-train-batch-size=0", "at least 1"),
            ("--gradient-accumulation-steps=0", "at least 1"),
            ("--gradient-group=0", "at least 1"),
            ("--gradient-group=2", "must divide --gradient-shares 1"),
            ("--seq-length=0", "at least 1"),
            ("--logging-steps=0", "at least 1"),
            ("--save-steps=0", "at least 1"),
            ("--save-total-limit=0", "at least 1"),
            ("--threads=0", "from 1 to"),
            ("--slots=0", "1 to"),
            ("--bucket-mib=0", "above 0"),
            ("--bucket-mib=nan", "above 0"),
            ("--max-steps=0", "at least 1"),
            ("--num-train-epochs=0", "above 0"),
            ("--num-train-epochs=nan", "above 0"),
            ("--init=checkpoint", "--model"),
            ("--adversary=5", "--device cpu"),
            ("--hbm-limit=0", "at least 1"),
            ("--host-limit=0GiB", "at least 1"),
            ("--per-device-train-batch-size=9223372036854775807", "a micro-batch must have at most"),
        ];
        for (arg, range) in cases {
            let args = if arg.contains("epochs") { vec![arg, "--data=corpus.txt"] } else { vec![arg] };
            let refused = resolve(&args).unwrap_err();
            let message = refused.to_string();
            assert!(message.starts_with(arg.split('=').next().unwrap()) && message.contains(range), "{arg}: {message}");
            assert_eq!(refused.exit_code(), 2);
        }
    }

    #[test]
    fn the_cpu_refuses_gpu_options() {
        for (flag, value) in
            [("--memory", "unified"), ("--attention", "cudnn"), ("--expert-products", "cublaslt"), ("--hbm-limit", "2.0 GiB")]
        {
            let message = resolve(&["--device=cpu", flag, value]).unwrap_err().to_string();
            assert_eq!(message, format!("{flag} {value}: needs --device cuda"));
            assert!(resolve(&["--device=cuda", flag, value]).is_ok());
        }
    }

    #[test]
    fn all_gpus_are_as_many_as_are_counted() {
        let all = resolve(&["--gpus=all"]).unwrap();
        assert!(all.all_gpus);
        let counted = all.on_gpus(4).unwrap();
        assert_eq!(counted, resolve(&["--gpus=4"]).unwrap(), "in checkpoints and records a number");
        assert_eq!((counted.cut().partial_sums(), counted.micro_batches()), (4, 4));
        assert_eq!(resolve(&["--gpus=2"]).unwrap().on_gpus(4).unwrap().gpus, 2);
        let partial_sums = resolve(&["--gpus=all", "--gradient-shares=3", "--gradient-accumulation-steps=3"]).unwrap();
        assert!(partial_sums.on_gpus(2).unwrap_err().to_string().contains("a multiple of --gpus 2"));
        let accumulating = resolve(&["--gpus=all", "--gradient-shares=8", "--gradient-accumulation-steps=2"]).unwrap();
        assert_eq!(accumulating.on_gpus(4).unwrap().micro_batches(), 8);
        let on_cpus = resolve(&["--gpus=all", "--device=cpu"]).unwrap_err().to_string();
        assert_eq!(on_cpus, "--gpus all: must be a number if CPUs are used instead of GPUs");
        let file = TrainOptions::from_toml("gpus = \"all\"").unwrap();
        assert_eq!(Settings::resolve(file).unwrap(), all);
        assert_eq!(TrainOptions::from_toml("gpus = 2").unwrap().gpus, Some(GpuCount::Count(2)));
    }

    #[test]
    fn unified_memory_holds_states_that_the_gpu_steps_after_the_verdict() {
        for other in ["--strategy=zero-offload", "--strategy=no-offload", "--rollback=inverse"] {
            let message = resolve(&["--device=cuda", "--memory=unified", other]).unwrap_err().to_string();
            assert!(message.starts_with("--memory unified: needs --strategy superoffload"), "{message}");
        }
    }

    #[test]
    fn max_steps_wins_and_three_epochs_are_the_default() {
        assert_eq!(base().train_length, TrainLength::Epochs(3.0));
        let both = resolve(&["--max-steps=5", "--num-train-epochs=2"]).unwrap();
        assert_eq!(both.train_length, TrainLength::Steps(5));
    }

    #[test]
    fn the_demo_runs_when_there_is_neither_model_nor_data_and_flags_still_win() {
        assert_eq!(resolve(&[]).unwrap(), Settings::demo());
        let epochs = resolve(&["--num-train-epochs=0.5"]).unwrap();
        assert_eq!(epochs, Settings { train_length: TrainLength::Epochs(0.5), ..Settings::demo() });
        let model = resolve(&["--model", "gpt2", "--data", "corpus.txt"]).unwrap();
        assert_eq!((model.init, model.seq_length, model.output_dir), (InitChoice::Checkpoint, 1024, "runs/train".into()));
        assert_eq!(resolve(&["--model", "gpt2", "--data", "corpus.txt", "--init=random"]).unwrap().init, InitChoice::Random);
        for model in ["src", "openai-community/gpt2"] {
            let refused = resolve(&["--model", model]).unwrap_err();
            assert!(refused.exit_code() == 2 && refused.to_string().starts_with("--model: --data is missing"), "{refused}");
        }
        let refused = resolve(&["--model", "srcc"]).unwrap_err().to_string();
        assert!(refused.starts_with("--model srcc: no such directory; did you mean src?"), "the model comes first: {refused}");
    }

    #[test]
    fn warm_up_is_counted_as_hugging_face_counts_it() {
        let warmup = |args: &[&str]| resolve(&[args, &["--data=x"]].concat()).unwrap().schedule().warmup(250);
        assert_eq!((warmup(&[]), warmup(&["--warmup-ratio=0.1"]), warmup(&["--warmup-ratio=0.003"])), (0, 25, 1));
        assert_eq!(warmup(&["--warmup-ratio=0.1", "--warmup-steps=7"]), 7);
        assert_eq!(
            resolve(&["--warmup-ratio=0.5"]).unwrap().schedule().warmup(300),
            150,
            "the built-in model's ten steps were not asked for"
        );
        assert!(resolve(&["--warmup-ratio=1.5"]).unwrap_err().to_string().contains("0 to 1"));
    }

    #[test]
    fn the_help_names_the_settings_of_the_built_in_model() {
        let given: Vec<_> = TrainOptions::DEMO_FLAGS.split(' ').collect();
        assert_eq!(resolve(&[&given[..], &["--data=x"]].concat()).unwrap(), Settings { data: vec!["x".into()], ..Settings::demo() });
    }

    #[test]
    fn long_numbers_are_short_in_messages() {
        let message = resolve(&["--adam-epsilon=-1e300"]).unwrap_err().to_string();
        assert!(message.starts_with("--adam-epsilon -1e300: "), "{message}");
    }

    #[test]
    fn techniques_are_sorted_and_named_once() {
        let without = resolve(&["--without=mpam,stv", "--without=mpam"]).unwrap().without;
        assert_eq!(without, [Technique::Stv, Technique::Mpam]);
    }

    #[test]
    fn settings_are_json_even_with_a_nan_injected() {
        let inject = Some(vec![Injection { step: 1, element: 0, share: 0, value: f32::NAN }]);
        let settings = Settings::resolve(TrainOptions { inject, ..Default::default() }).unwrap();
        let json = serde_json::to_value(&settings).unwrap();
        assert_eq!(json["inject"][0]["value"], "NaN");
        assert_eq!(json["train_length"]["steps"], 300);
        let back: Injection = serde_json::from_value(json["inject"][0].clone()).unwrap();
        assert!(back.value.is_nan());
    }

    #[test]
    fn paths_that_json_cannot_hold_are_refused() {
        use std::os::unix::ffi::OsStringExt;
        let odd = PathBuf::from(std::ffi::OsString::from_vec(vec![b'a', 0xff]));
        for (options, flag) in [
            (TrainOptions { model: Some(odd.clone()), data: Some(vec!["corpus.txt".into()]), ..Default::default() }, "--model"),
            (TrainOptions { data: Some(vec![odd.clone()]), ..Default::default() }, "--data"),
            (TrainOptions { resume_from_checkpoint: Some(Resume::Dir(odd)), ..Default::default() }, "--resume-from-checkpoint"),
            (TrainOptions { output_dir: Some("".into()), ..Default::default() }, "--output-dir"),
            (TrainOptions { cuda_libraries: Some("".into()), ..Default::default() }, "--cuda-libraries"),
            (TrainOptions { data: Some(vec![]), ..Default::default() }, "--data"),
        ] {
            let message = Settings::resolve(options).unwrap_err().to_string();
            assert!(message.starts_with(flag), "{message}");
        }
    }
}

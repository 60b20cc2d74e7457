"""Tests the package with the program: the one that `SUPEROFFLOAD_PROGRAM` names, or else the installed one."""

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import typing
import unittest
import warnings
from pathlib import Path
from unittest import mock

import superoffload
from superoffload import _data, _metrics, _program, _run, follow

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
# Mounts file systems in a private namespace, without privileges.
MOUNTING = ["unshare", "--user", "--map-root-user", "--mount"]
TEXT = "Colourless green ideas sleep furiously. " * 40


class Runs(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())) if hasattr(self, "enterContext") else self._folder()
        (self.folder / "model").mkdir()
        (self.folder / "model/config.json").write_text(json.dumps(TINY))
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")

    def _folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return Path(folder.name)

    def start(self, out="out", data=({"text": TEXT},), **settings):
        common = {"init": "random", "tokenizer": "bytes", "device": "cpu", "threads": 1, "seq_length": 16, "max_steps": 5}
        common |= {"per_device_train_batch_size": 1, "save_steps": 100, "output_dir": self.folder / out, "report_to": "none"}
        return superoffload.start(self.folder / "model", list(data) if isinstance(data, tuple) else data, **common | settings)

    def endless(self):
        run = self.start(max_steps=1_000_000)
        next(run.steps())
        return run

    def test_a_run_is_waited_for_and_tells_its_steps(self):
        run = self.start()
        steps = [step["step"] for step in run.steps()]
        self.assertEqual((steps, run.returncode, run.max_steps), ([1, 2, 3, 4, 5], 0, 5))
        self.assertEqual(run.wait().checkpoint, self.folder / "out/checkpoint-5")
        self.assertEqual(run.metrics[4]["step"], 5)
        self.assertIn("finished 5 of 5 steps", run.log)
        self.assertIn("done, step 5 of 5", repr(run))
        out = superoffload.export(run, self.folder / "exported", dtype="float32")
        self.assertTrue((out / "model.safetensors").is_file())

    def test_a_second_run_in_a_directory_tells_only_its_own_steps(self):
        self.start(max_steps=3).wait()
        run = self.start(max_steps=4, resume_from_checkpoint="auto").wait()
        self.assertEqual([step["step"] for step in run.metrics], [4])

    def test_what_makes_no_sense_is_an_error_with_the_programs_words(self):
        for settings, words in [
            ({"learning_rate": -1}, "learning-rate"),
            ({"lerning_rate": 1}, "--learning-rate"),
            ({"dtype": "int8"}, "bfloat16"),
        ]:
            run = self.start(**settings)
            with self.assertRaisesRegex(superoffload.UsageError, words) as raised:
                run.wait()
            self.assertEqual(raised.exception.returncode, 2)
            self.assertIsInstance(raised.exception, ValueError)
            self.assertEqual(run.metrics, [])
        with self.assertRaisesRegex(superoffload.TrainError, "no-such-model"):
            superoffload.plan("no-such-model", hardware="h200-pcie5")

    def test_the_checkpoint_of_a_run_is_whole_at_any_time(self):
        run = self.start(max_steps=60, save_steps=1, save_rate="2MiB")
        while run.returncode is None:
            if newest := run.checkpoint:
                self.assertGreater((newest / "state.bin").stat().st_size, 0)
                self.assertIn(b'"crc32c"', (newest / "trainer_state.json").read_bytes()[-32:])
        (self.folder / "out/checkpoint-99").mkdir()
        self.assertEqual(run.wait().checkpoint, self.folder / "out/checkpoint-60")

    def test_a_plan_that_does_not_fit_is_an_answer(self):
        fits = superoffload.plan(self.folder / "model", hardware="h200-pcie5", seq_length=16, per_device_train_batch_size=1)
        self.assertIs(fits["fits"], True)
        for limit in ({"hbm_limit": "1GiB"}, {"host_limit": "1GiB"}):
            answer = superoffload.plan("llama-8b", hardware="h200-pcie5", **limit)
            self.assertIs(answer["fits"], False)
            self.assertRegex(answer["why"], r"^not enough (device|host) memory: 8030261248 parameters need .* GiB.*, 1.0 GiB")

    def test_a_run_is_a_context_manager_which_stops_it(self):
        with self.endless() as run:
            self.assertIsNone(run.returncode)
        self.assertEqual(run.returncode, _program.INTERRUPTED)
        self.assertIsNotNone(run.checkpoint)
        with self.assertRaises(ZeroDivisionError), self.endless() as run:
            raise ZeroDivisionError
        self.assertIsNotNone(run.returncode)
        with self.start("other") as run:
            run.wait()
        self.assertEqual(run.returncode, 0)
        with self.assertRaisesRegex(TypeError, "cannot be pickled or copied: keep its output_dir"):
            pickle.dumps(run)

    def test_a_run_that_is_done_leaves_no_file_open(self):
        run = self.start()
        run.wait()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            del run
            gc.collect()
        self.assertEqual([str(warning.message) for warning in seen], [])

    def test_what_is_no_model_and_no_list_of_records_is_named(self):
        class Split(list):
            def to_parquet(self, path):
                raise AssertionError("not asked for")

        class DatasetDict(dict):
            pass

        class LlamaForCausalLM:
            def save_pretrained(self, path):
                raise AssertionError("not asked for")

        for data, why in (
            (DatasetDict(train=Split(), test=Split()), r"this DatasetDict has the splits 'train', 'test': pass one of them, as in data=dataset\['train'\]"),
            ({"text": ["a", "b"]}, r"this dict with 'text' is no list of records: pass datasets.Dataset.from_dict\(data\)"),
            ({}, "this dict with nothing in it is no list"),
        ):
            for keyword in ("data", "eval_data"):
                with self.assertRaisesRegex(TypeError, why):
                    superoffload.start("model", **{keyword: data})
        for ask in (superoffload.start, superoffload.plan):
            with self.assertRaisesRegex(TypeError, r"this LlamaForCausalLM is in memory.*save_pretrained\(DIR\)"):
                ask(LlamaForCausalLM())
            with self.assertRaisesRegex(TypeError, "a path or a name on the hub, not a int"):
                ask(7)

    def test_the_package_has_a_version_and_runs_as_a_module(self):
        said = subprocess.run([sys.executable, "-m", "superoffload", "--version"], capture_output=True, text=True, check=True).stdout
        self.assertRegex(said, r"^superoffload \d+\.\d+\.\d+")
        self.assertIn(superoffload.__version__, (said.split()[1], "unknown: the package is not installed"))
        wrong = subprocess.run([sys.executable, "-m", "superoffload", "trian"], capture_output=True, text=True, check=False)
        self.assertEqual((wrong.returncode, "trian" in wrong.stderr), (2, True))

    def test_type_hints_are_there_at_run_time(self):
        for function in (superoffload.train, superoffload.start, superoffload.plan):
            self.assertIn("settings", typing.get_type_hints(function))

    def test_the_page_of_the_package_stands_alone(self):
        packaging = Path(__file__).parents[2]
        page = subprocess.run([sys.executable, packaging / "page.py", packaging.parent / "README.md"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(re.findall(r"\]\((?!https?://|#)[^)]*\)", page), [])
        self.assertNotIn("![", page)
        self.assertIn("## What fits", page)
        self.assertNotIn("*Two steps of", page)

    def test_a_killed_run_is_an_exception(self):
        run = self.endless()
        os.kill(run.pid, signal.SIGKILL)
        with self.assertRaisesRegex(superoffload.TrainError, "signal 9") as raised:
            list(run.steps())
        self.assertEqual(raised.exception.returncode, -9)
        self.assertIn("failed", repr(run))

    def test_a_run_that_is_stopped_can_be_resumed(self):
        run = self.endless().stop()
        self.assertEqual(run.returncode, 75)
        step = run.metrics[-1]["step"]
        self.assertEqual(run.checkpoint.name, f"checkpoint-{step}")
        other = self.endless()
        os.kill(other.pid, signal.SIGTERM)
        with self.assertRaises(superoffload.Interrupted):
            other.wait()

    def test_a_run_that_is_stopped_at_once_is_no_failure(self):
        for seconds in [0, 0.005, 0.02, 0.05, 0.2]:
            run = self.start(f"early-{seconds}", max_steps=1_000_000)
            time.sleep(seconds)
            run.stop()
            self.assertIn(run.returncode, (75, -signal.SIGTERM))
            self.assertIn("interrupted", repr(run))
            self.assertNotIn("<pre>", run._repr_html_())
        # A signal from another process is a failure.
        run = self.start("others")
        os.kill(run.pid, signal.SIGTERM)
        with self.assertRaises(superoffload.TrainError):
            run.wait()

    def test_a_path_that_begins_with_a_dash_is_no_flag(self):
        self.start("--best").wait()
        here = os.getcwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, here)
        out = superoffload.export("--best", "-x", dtype="float32")
        self.assertTrue((self.folder / out / "model.safetensors").is_file())

    def test_damaged_lines_are_left_out_and_said(self):
        run = self.start().wait()
        good = (self.folder / "out/metrics.jsonl").read_bytes()
        damage = [b"\x00\xff", b'{"step": 3, "lo', b"[1]", b"7", b'{"loss": 1.0}', b'{"facts": 3}', b"[" * 100_000]
        (self.folder / "out/metrics.jsonl").write_bytes(b"\n".join([*damage[:3], good.rstrip(b"\n"), *damage[3:], b""]))
        file = _metrics.MetricsFile(self.folder / "out")
        with self.assertWarnsRegex(UserWarning, "metrics.jsonl: damaged lines left out: 7"):
            lines = file.read()
        self.assertEqual([line["step"] for line in lines], [1, 2, 3, 4, 5])
        self.assertEqual((file.facts["max_steps"], file.read()), (5, []))
        self.assertEqual(run.returncode, 0)

    def test_a_loss_that_is_not_finite_has_a_picture(self):
        run = self.start().wait()
        for step in run.metrics:
            step["loss"] = None
        self.assertIn("loss not finite", run._repr_html_())
        run.metrics[0]["loss"], run.metrics[1]["loss"] = 2.0, 1.0
        self.assertIn("<polyline", run._repr_html_())

    def test_a_lock_on_another_device_is_another_lock(self):
        run = self.endless()
        listed = _metrics.LOCKS.read_text()
        inode = (run.output_dir / ".lock").stat().st_ino
        place = next(word for line in listed.splitlines() if "FLOCK" in line for word in line.split() if word.endswith(f":{inode}"))
        locks = self.folder / "locks"
        for device, expected in [(place, True), (f"00:00:{inode}", False)]:
            locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 {device} 0 EOF\n")
            self.assertEqual(_metrics.is_running(run.output_dir, locks), expected, device)
        self.assertTrue(_metrics.is_running(run.output_dir))
        run.stop()
        self.assertFalse(_metrics.is_running(run.output_dir))

    def test_ctrl_c_ends_the_run_after_a_checkpoint(self):
        run = self.endless()
        with mock.patch.object(run._process, "wait", side_effect=[KeyboardInterrupt, 75, 75]), self.assertRaises(KeyboardInterrupt):
            run.wait()
        run._process.wait()
        self.assertEqual((run.returncode, run.checkpoint is not None), (75, True))

    def test_a_run_that_takes_too_long_goes_on(self):
        run = self.endless()
        with self.assertRaises(TimeoutError):
            run.wait(timeout=0.01)
        self.assertIsNone(run.returncode)
        run.stop()

    def start_after(self, *commands):
        """Start a run of the program from a shell that runs these commands first."""
        script = self.folder / "prepared"
        script.write_text("\n".join(["#!/usr/bin/env bash", "set -e", *commands, f'exec "{_program.program()}" "$@"']))
        script.chmod(0o755)
        with mock.patch.dict(os.environ, {"SUPEROFFLOAD_PROGRAM": str(script)}):
            return self.start(max_steps=3)

    def test_a_limit_on_files_is_the_programs_error(self):
        run = self.start_after("ulimit -f 16")
        with self.assertRaisesRegex(superoffload.TrainError, "write .*checkpoint.*large") as raised:
            run.wait()
        self.assertEqual(raised.exception.returncode, 1)

    @unittest.skipUnless(subprocess.run([*MOUNTING, "true"], capture_output=True, check=False).returncode == 0, "nobody may mount here")
    def test_a_full_disk_is_the_programs_error(self):
        out = self.folder / "out"
        out.mkdir()
        # Only the program sees the mounted disk, which has room for metrics but not for a checkpoint.
        inner = f'mount -t tmpfs -o size=64k tmpfs "{out}" && exec "$0" "$@"'
        run = self.start_after(f"""[ -n "$IS_MOUNTED" ] || IS_MOUNTED=1 exec {" ".join(MOUNTING)} bash -c '{inner}' "$0" "$@\"""")
        with self.assertRaisesRegex(superoffload.TrainError, "find room for a checkpoint.* are free; make room") as raised:
            run.wait()
        self.assertEqual((raised.exception.returncode, run.checkpoint), (1, None))

    def test_a_notebook_draws_loss_and_progress(self):
        run = self.start()
        run.wait()
        page = run._repr_html_()
        for part in ['<progress value="5" max="5"', "<polyline points=", "done, step 5 of 5, loss "]:
            self.assertIn(part, page)
        failed = self.start(out="bad", learning_rate=-1)
        with self.assertRaises(superoffload.UsageError):
            failed.wait()
        self.assertIn("<pre>", failed._repr_html_())

    def test_train_draws_the_run_in_a_notebook_while_it_trains(self):
        pages = []
        handle = types.SimpleNamespace(update=lambda run: pages.append(run._repr_html_()))
        kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
        display = types.SimpleNamespace(display=lambda run, display_id: pages.append(run._repr_html_()) or handle)
        notebook = {"IPython": types.SimpleNamespace(get_ipython=lambda: kernel), "IPython.display": display}
        with mock.patch.dict(sys.modules, notebook), mock.patch.object(_run, "DRAW_S", 0.02):
            run = self.start(max_steps=300)._show()
        self.assertEqual((run.returncode, len(run.metrics)), (0, 300))
        self.assertIn("running, step 0 of ?", pages[0])
        self.assertIn("done, step 300 of 300, loss ", pages[-1])
        self.assertTrue(any("running, step" in page and "<polyline" in page for page in pages), "never drawn while it trained")

    def test_train_shows_the_run(self):
        script = "import superoffload, sys; superoffload.train(device='cpu', threads=1, max_steps=1, seq_length=8, report_to='none', "
        script += f"per_device_train_batch_size=1, output_dir={str(self.folder / 'demo')!r})"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        self.assertIn("finished 1 of 1 steps", done.stdout)

    def test_records_and_data_sets_become_files_that_a_resumed_run_finds(self):
        first, second = (_data.as_paths([{"text": "a"}, {"text": "ä"}]) for _ in range(2))
        self.assertEqual((first, first.read_text()), (second, '{"text": "a"}\n{"text": "ä"}\n'))
        table = types.SimpleNamespace(to_parquet=lambda path: Path(path).write_bytes(b"PAR1"))
        self.assertEqual(_data.as_paths(table).suffix, ".parquet")
        self.assertEqual(_data.as_paths("org/data"), "org/data")
        self.assertEqual(_data.as_paths(["a.txt", "b.txt"]), ["a.txt", "b.txt"])
        for nonsense in ([], [1, 2]):
            with self.assertRaises(TypeError):
                _data.as_paths(nonsense)
        self.assertFalse([path for path in first.parent.iterdir() if path.name.startswith(".")])

    def test_the_machine_and_plans_are_dicts(self):
        self.assertIn("advice", superoffload.doctor())
        chosen = superoffload.plan(self.folder / "model", hardware="h200-pcie5", seq_length=16, per_device_train_batch_size=1)
        self.assertGreater(chosen["best"]["tokens_per_second"], 0)

    def test_the_program_is_found_beside_the_package_or_missed_in_words(self):
        with mock.patch.dict(os.environ, {"PATH": ""}):
            os.environ.pop("SUPEROFFLOAD_PROGRAM", None)
            with mock.patch.object(_program, "NAME", "no-such-program"), self.assertRaisesRegex(FileNotFoundError, "no-such-program"):
                _program.program()

    def test_half_a_line_is_not_a_step(self):
        path = self.folder / _metrics.FILE
        path.write_text('{"facts":{"started":10,"max_steps":2}}\n{"step":1,"lo')
        file = _metrics.MetricsFile(self.folder)
        self.assertEqual(file.read(), [])
        path.write_text('{"facts":{"started":10,"max_steps":2}}\n{"step":1,"loss":2}\n')
        self.assertEqual(file.read(), [{"step": 1, "loss": 2}])
        os.replace(_write(self.folder / "new", '{"facts":{"started":11,"max_steps":2}}\n{"step":7}\n'), path)
        self.assertEqual(file.read(), [{"step": 7}])
        self.assertEqual(_metrics.MetricsFile(self.folder, is_new=True).read(), [], "an earlier run's")

    def test_a_run_is_followed_to_its_end(self):
        for name in follow.TRACKERS:
            tracker = Tracker()
            with mock.patch.dict(sys.modules, {name: tracker}):
                run = self.start(out=name, max_steps=30)
                next(run.steps())
                logged = follow.follow(run.output_dir, name, poll_s=0.05)
                run.wait()
            self.assertEqual((logged, tracker.steps), (30, list(range(1, 31))), name)
            self.assertTrue(tracker.is_finished and "train/loss" in tracker.values and tracker.facts["max_steps"] == 30, name)
        self.assertEqual(follow.numbers({"step": 1, "eval_loss": 2.0, "verdict": "clip", "x": None}), {"eval/loss": 2.0})

    def test_what_cannot_be_followed_is_said(self):
        self.assertEqual(follow.main([str(self.folder / "nowhere"), "--to", "wandb"]), 2)
        with mock.patch.dict(sys.modules, {"trackio": None}), self.assertRaisesRegex(SystemExit, "pip install trackio"):
            follow.main([str(self.folder), "--to", "trackio"])
        with mock.patch.dict(sys.modules, {"wandb": Tracker()}):
            self.assertEqual(follow.main([str(self.folder), "--to", "wandb"]), 1, "no step")


class Tracker(types.ModuleType):
    """Stubs of the functions of W&B, trackio and MLflow that `follow` calls."""

    def __init__(self):
        super().__init__("tracker")
        self.steps, self.values, self.facts, self.is_finished = [], {}, {}, False

    def init(self, project, name, config):
        self.facts = config

    def log(self, values, step):
        self.steps.append(step)
        self.values = values

    def finish(self):
        self.is_finished = True

    def set_experiment(self, name):
        pass

    def start_run(self, run_name):
        pass

    def log_dict(self, facts, file):
        self.facts = facts

    log_metrics, end_run = log, finish


def _write(path, text):
    path.write_text(text)
    return path


if __name__ == "__main__":
    unittest.main()

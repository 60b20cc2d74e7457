"""`SuperOffloadTrainerMixin` with transformers' Trainer and TRL's SFTTrainer, on tiny models with random weights. Skipped with a message if these
packages are not installed."""

import contextlib
import importlib.util
import io
import json
import math
import os
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

try:
    import torch
    import transformers
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: SuperOffloadTrainerMixin is not tested, because of transformers ({error})") from error

try:
    import trl
except ImportError:
    trl = None

from superoffload._link import PlainLink
from superoffload.torch import OffloadAdamW, SuperOffloadTrainerMixin, register_optim

# The models are too small for several threads.
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma3Text": {"sliding_window": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
ROWS = [{"input_ids": [(7 * row + 3 * at) % 120 + 3 for at in range(16)]} for row in range(24)]
ROWS = [{**row, "labels": row["input_ids"]} for row in ROWS]


class OffloadTrainer(SuperOffloadTrainerMixin, Trainer):
    pass


QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def model(name="Qwen3", **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**{**SIZES, **MODELS[name], **sizes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def arguments(output, **settings):
    base = {
        "output_dir": output, "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "weight_decay": 0.1, "max_grad_norm": 1.0, "logging_steps": 1, "report_to": [], "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no", "lr_scheduler_type": "cosine", "warmup_steps": 2, "disable_tqdm": True,
    }  # fmt: skip
    return {**base, **settings}


def logs(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    # Releases before 5 report no norm without clipping.
    return [row["loss"] for row in rows], [float(row["grad_norm"]) for row in rows if "grad_norm" in row]


def train(cls, output, name="Qwen3", resume=None, optimizer=None, **settings):
    args = TrainingArguments(**arguments(output, **settings))
    trainer = cls(model=model(name), args=args, train_dataset=ROWS, **({"optimizer_cls_and_kwargs": optimizer} if optimizer else {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def unwrapped(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


class InTrainer(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.output = place.name

    def close(self, ours, theirs):
        (losses, norms), (other_losses, other_norms) = ours, theirs
        self.assertEqual((len(losses), len(norms)), (len(other_losses), len(other_norms)))
        for one, other in zip(losses + norms, other_losses + other_norms):
            self.assertAlmostEqual(one, other, delta=2e-3 * max(1, abs(other)))

    def test_losses_and_norms_are_those_of_torchs_adamw(self):
        for name in MODELS:
            if not hasattr(transformers, name + "Config"):
                print(f"LEFT OUT: transformers {transformers.__version__} has no {name}")
                continue
            for limit in (1.0, 0.0):
                ours, theirs = (train(cls, self.output, name, max_grad_norm=limit) for cls in (OffloadTrainer, Trainer))
                self.assertIsInstance(unwrapped(ours), OffloadAdamW)
                self.close(logs(ours), logs(theirs))
                self.assertLess(logs(ours)[0][-1], logs(ours)[0][0])

    def test_a_run_goes_on_from_its_checkpoint(self):
        whole = train(OffloadTrainer, self.output, save_strategy="steps", save_steps=4)
        resumed = train(OffloadTrainer, self.output, resume=f"{self.output}/checkpoint-4")
        self.assertEqual(logs(resumed)[0], logs(whole)[0])
        for one, other in zip(resumed.model.parameters(), whole.model.parameters()):
            self.assertTrue(torch.equal(one, other))

    def test_settings_of_the_optimizer_are_taken(self):
        small = {"bucket_mib": 1 / 64, "speculate": False}
        trainer = train(OffloadTrainer, self.output, optimizer=(OffloadAdamW, small))
        optimizer = unwrapped(trainer)
        self.assertEqual((optimizer.speculate, optimizer._bucket_bytes, optimizer.accumulation_steps), (False, 2**14, 2))
        self.assertEqual([group["weight_decay"] for group in optimizer.param_groups], [0.1, 0.0])
        # The mixin has found the model's layers.
        self.assertTrue(optimizer._held_by_forward)
        self.assertEqual(logs(trainer), logs(train(OffloadTrainer, self.output)))

    def test_a_trainer_trains_twice(self):
        """The second training uses the optimizer that accelerate has wrapped, and the third one resumes from a checkpoint."""
        trainers = [
            cls(model=model(), args=TrainingArguments(**arguments(f"{self.output}/{cls.__name__}", save_strategy="steps", save_steps=4)), train_dataset=ROWS)
            for cls in (OffloadTrainer, Trainer)
        ]
        for trainer in trainers:
            for resume in (None, None, True):
                trainer.train(resume_from_checkpoint=resume)
        self.close(*map(logs, trainers))

    def test_a_checkpoint_before_the_step_goes_on_as_the_run_did(self):
        """As transformers' enable_jit_checkpoint after SIGTERM: a checkpoint is saved in on_pre_optimizer_step."""

        class Cut(transformers.TrainerCallback):
            trainer = None

            def on_pre_optimizer_step(self, args, state, control, **_):
                if state.global_step == 4:
                    for bucket in unwrapped(self.trainer)._buckets:
                        bucket.wait()
                    self.trainer._save_checkpoint(self.trainer.model, trial=None)
                    control.should_training_stop = True

        whole = train(OffloadTrainer, self.output, max_grad_norm=100.0)
        cut = Cut()
        args = TrainingArguments(**arguments(self.output, max_grad_norm=100.0))
        cut.trainer = OffloadTrainer(model=model(), args=args, train_dataset=ROWS, callbacks=[cut])
        cut.trainer.train()
        self.assertGreater(unwrapped(cut.trainer).last.speculated, 0)
        resumed = train(OffloadTrainer, self.output, resume=f"{self.output}/checkpoint-4", max_grad_norm=100.0)
        for trainer in (whole, resumed):
            unwrapped(trainer).synchronize()
        for one, other in zip(resumed.model.parameters(), whole.model.parameters()):
            self.assertTrue(torch.equal(one, other))

    def test_optim_args_are_read(self):
        trainer = train(OffloadTrainer, self.output, max_steps=1, optim_args="bucket_mib=0.5, speculate=false,threads=3")
        optimizer = unwrapped(trainer)
        self.assertEqual((optimizer._bucket_bytes, optimizer.speculate, optimizer.threads), (2**19, False, 3))
        for text, why in (("bucket=1", "'bucket' is no setting of OffloadAdamW; its settings are bucket_mib"), ("speculate=perhaps", "'perhaps' is neither"), ("threads=two", "threads=two")):
            with self.assertRaisesRegex(ValueError, f"optim_args: .*{why}"):
                train(OffloadTrainer, self.output, optim_args=text)

    def test_a_callback_finds_the_weights_of_the_step(self):
        class Average(transformers.TrainerCallback):
            seen = []

            def on_step_end(self, args, state, control, model=None, **_):
                self.seen.append([param.detach().clone() for param in model.parameters()])

        class Late(PlainLink):
            def send(self, pairs, after):
                time.sleep(0.002)
                return super().send(pairs, after)

        with mock.patch("superoffload._offload.link_to", lambda device: Late()):
            args = TrainingArguments(**arguments(self.output, max_steps=3, optim_args="bucket_mib=0.02"))
            trainer = OffloadTrainer(model=model(), args=args, train_dataset=ROWS, callbacks=[Average()])
            trainer.train()
        want = [param.detach() for param in trainer.model.parameters()]
        self.assertTrue(all(torch.equal(one, other) for one, other in zip(Average.seen[-1], want)))

    def test_a_smaller_batch_is_tried_after_out_of_memory(self):
        def small(cls):
            class Small(cls):
                """Has no memory for batches of two, in the backward pass of the second step."""

                def training_step(self, net, inputs, *rest):
                    loss = super().training_step(net, inputs, *rest)
                    if len(inputs["input_ids"]) > 1 and self.state.global_step > 0:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
                    return loss

            return train(Small, self.output, auto_find_batch_size=True)

        ours, theirs = small(OffloadTrainer), small(Trainer)
        self.assertEqual(len(logs(ours)[0]), len(logs(theirs)[0]))
        self.close(*(tuple(part[-8:] for part in logs(trainer)) for trainer in (ours, theirs)))

    @unittest.skipUnless(importlib.util.find_spec("peft"), "LEFT OUT: LoRA is not tested, because peft is not installed")
    def test_lora_steps_its_adapters_alone(self):
        import peft

        def lora(cls):
            net = peft.get_peft_model(model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
            trainer = cls(model=net, args=TrainingArguments(**arguments(self.output)), train_dataset=ROWS)
            trainer.train()
            return trainer

        ours, theirs = lora(OffloadTrainer), lora(Trainer)
        self.close(logs(ours), logs(theirs))
        adapters = [param for param in ours.model.parameters() if param.requires_grad]
        self.assertEqual({part.member.param for bucket in unwrapped(ours)._buckets for part in bucket.parts}, set(adapters))
        self.assertEqual(sum(bucket.size for bucket in unwrapped(ours)._buckets), sum(-(-param.nbytes // 64) * 64 for param in adapters))

    def test_several_gpus_are_refused_when_the_trainer_is_made(self):
        args = TrainingArguments(**arguments(self.output))
        for name, why in (("n_gpu", "nn.DataParallel.*CUDA_VISIBLE_DEVICES=0"), ("world_size", "steps the gradients of one process, and there are 2")):
            with mock.patch.object(TrainingArguments, name, 2), self.assertRaisesRegex(ValueError, why):
                OffloadTrainer(model=model(), args=args, train_dataset=ROWS)

    def test_transformers_own_trainer_steps_by_name(self):
        try:
            register_optim()
        except ImportError as error:
            self.skipTest(f"LEFT OUT: {error}")
        register_optim()
        for limit in (1.0, 0.0):
            ours = train(Trainer, self.output, optim="adamw_superoffload", optim_args="bucket_mib=0.5", max_grad_norm=limit)
            self.assertIsInstance(unwrapped(ours), OffloadAdamW)
            self.assertEqual(unwrapped(ours)._bucket_bytes, 2**19)
            self.close(logs(ours), logs(train(Trainer, self.output, max_grad_norm=limit)))

    def test_what_does_not_fit_is_refused(self):
        names = [{"optim": name} for name in ("adafactor", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit")]
        refused = [(name, f"optim='{name['optim']}' is not AdamW with states in 32 bits") for name in names]
        for settings, why in (*refused, ({"optimizer": (torch.optim.SGD, {"lr": 1.0})}, "uses OffloadAdamW, not SGD")):
            with self.assertRaisesRegex(ValueError, why):
                train(OffloadTrainer, self.output, **settings)
        with self.assertRaisesRegex(TypeError, r"must come before the Trainer: class Late\(SuperOffloadTrainerMixin, Trainer\)"):
            type("Late", (Trainer, SuperOffloadTrainerMixin), {})

    @unittest.skipUnless(trl, "LEFT OUT: TRL's DPOTrainer is not tested, because trl is not installed")
    def test_trls_dpo_follows_torchs_adamw(self):
        """DPOTrainer does not accept optimizer_cls_and_kwargs, so settings go through optim_args."""
        from datasets import Dataset

        rows = Dataset.from_list([{"prompt": "w3 w4", "chosen": f"w{5 + row} w6", "rejected": f"w{30 + row} w7"} for row in range(16)])

        def dpo(cls):
            args = trl.DPOConfig(**arguments(self.output, bf16=False, optim_args="bucket_mib=0.5" if cls is not trl.DPOTrainer else None))
            net = model()
            net.name_or_path = net.config.name_or_path = "tiny"
            reference = model().eval()
            trainer = cls(model=net, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer())
            trainer.train()
            return trainer

        class OffloadDpo(SuperOffloadTrainerMixin, trl.DPOTrainer):
            pass

        ours = dpo(OffloadDpo)
        self.assertEqual(unwrapped(ours)._bucket_bytes, 2**19)
        self.close(logs(ours), logs(dpo(trl.DPOTrainer)))

    @unittest.skipUnless(trl, "LEFT OUT: TRL's SFTTrainer is not tested, because trl is not installed")
    def test_trls_trainer_follows_torchs_adamw(self):
        self.follow()

    @unittest.skipUnless(
        trl and os.environ.get("SUPEROFFLOAD_REAL_SHAPE"), "LEFT OUT: SUPEROFFLOAD_REAL_SHAPE=1 trains Qwen3-0.6B's shape, in minutes and 16 GB"
    )
    def test_qwen3_06b_follows_torchs_adamw(self):
        self.follow(sizes=QWEN3_06B, max_steps=4, learning_rate=1e-4)

    def follow(self, sizes={}, **settings):
        from datasets import Dataset

        class OffloadSft(SuperOffloadTrainerMixin, trl.SFTTrainer):
            pass

        def sft(cls):
            base = {"max_length": 16, "packing": False, "bf16": False, "gradient_checkpointing": True}
            args = trl.SFTConfig(**arguments(self.output, **base, **settings))
            rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in ROWS])
            trainer = cls(model=model(**sizes), args=args, train_dataset=rows, processing_class=tokenizer())
            trainer.train()
            return logs(trainer)

        ours, theirs = sft(OffloadSft), sft(trl.SFTTrainer)
        self.close(ours, theirs)
        self.assertTrue(all(math.isfinite(norm) for norm in ours[1]))
        if sizes:
            print(json.dumps({"losses": ours[0], "torchs": theirs[0], "norms": ours[1], "torchs_norms": theirs[1]}))


class Notebook(unittest.TestCase):
    def test_the_notebook_runs_from_top_to_bottom(self):
        book = Path(__file__).parents[3] / "examples/pytorch/offload.ipynb"
        cells = [cell for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]
        names, said = {}, io.StringIO()
        with contextlib.redirect_stdout(said):
            for cell in cells:
                exec("".join(cell["source"]), names)
        self.assertIn("the same weights; ", said.getvalue())
        self.assertIn("clip", names["verdicts"])
        self.assertIn("commit", names["verdicts"])


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


if __name__ == "__main__":
    unittest.main()

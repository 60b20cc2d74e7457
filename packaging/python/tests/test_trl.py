"""`SuperOffloadTrainerMixin` in TRL's trainers of rewards and preferences, and `register_optim` in the same trainers, on a tiny model. test_trainer.py
has SFTTrainer and DPOTrainer. Skipped with a message if a package is missing."""

import os
import tempfile
import unittest

try:
    import torch

    # Read when the hub's package is imported. The models are folders on this machine.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    import trl
    from datasets import Dataset
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: SuperOffloadTrainerMixin is not tested with TRL, because of a missing package ({error})") from error

from superoffload.torch import OffloadAdamW, SuperOffloadTrainerMixin, register_optim
from test_trainer import MODELS, SIZES, arguments, logs, model, tokenizer, unwrapped

TEXTS = [f"w{5 + row} w{6 + row}" for row in range(16)]
REPLY = {"max_completion_length": 4, "num_generations": 2, "temperature": 1.0}


def named(net, output):
    """Save the model and name its folder, from which a trainer makes reference models."""
    folder = f"{output}/model"
    if not os.path.isdir(folder):
        net.save_pretrained(folder)
    net.name_or_path = net.config._name_or_path = folder
    return net


def reward(completions, **_):
    """Reward long words."""
    return [float(sum(map(len, each.split()))) for each in completions]


def kto(cls, output, **settings):
    rows = [{"prompt": "w3 w4", "completion": text, "label": row % 3 > 0} for row, text in enumerate(TEXTS)]
    args = trl.KTOConfig(**arguments(output, bf16=False, **settings))
    return cls(model=named(model(), output), ref_model=named(model().eval(), output), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())


def with_rewards(config):
    def make(cls, output, **settings):
        args = config(**arguments(output, bf16=False, max_steps=4, **REPLY, **settings))
        rows = Dataset.from_list([{"prompt": text} for text in TEXTS])
        return cls(model=named(model(), output), reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer())

    return make


def rewards(cls, output, **settings):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, **MODELS["Qwen3"]}, num_labels=1)
    net = named(transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager"), output)
    rows = Dataset.from_list([{"chosen": f"w3 {text}", "rejected": f"{text} w9"} for text in TEXTS])
    return cls(model=net, args=trl.RewardConfig(**arguments(output, bf16=False, **settings)), train_dataset=rows, processing_class=tokenizer())


TRAINERS = {
    "KTOTrainer": kto,
    "GRPOTrainer": with_rewards(getattr(trl, "GRPOConfig", None)),
    "RLOOTrainer": with_rewards(getattr(trl, "RLOOConfig", None)),
    "RewardTrainer": rewards,
}


class InTrl(unittest.TestCase):
    def trained(self, make, cls, **settings):
        with tempfile.TemporaryDirectory() as output:
            trainer = make(cls, output, **settings)
            # Generation samples tokens.
            transformers.set_seed(0)
            trainer.train()
            return trainer

    def follow(self, name, **settings):
        """Compare with torch's AdamW: the mixin, and the trainer itself with the optimizer's name."""
        base = getattr(trl, name, None)
        if base is None:
            self.skipTest(f"LEFT OUT: TRL {trl.__version__} has no {name}")
        make = TRAINERS[name]
        want = logs(self.trained(make, base, **settings))
        mixed = type("Offload" + name, (SuperOffloadTrainerMixin, base), {})
        ways = [(mixed, {"optim_args": "bucket_mib=0.5"})]
        try:
            register_optim()
            ways.append((base, {"optim": "adamw_superoffload", "optim_args": "bucket_mib=0.5"}))
        except ImportError as error:
            print(f"LEFT OUT: {error}")
        for cls, more in ways:
            trainer = self.trained(make, cls, **settings, **more)
            self.assertIsInstance(unwrapped(trainer), OffloadAdamW)
            self.assertEqual(unwrapped(trainer)._bucket_bytes, 2**19)
            for ours, theirs in zip(logs(trainer), want, strict=True):
                self.assertEqual(len(ours), len(theirs))
                for one, other in zip(ours, theirs):
                    self.assertAlmostEqual(one, other, delta=2e-3 * max(1, abs(other)))

    def test_kto(self):
        self.follow("KTOTrainer")

    def test_grpo(self):
        self.follow("GRPOTrainer")

    def test_grpo_with_two_steps_a_generation(self):
        """Two steps with the same completions, so that the ratio to the old policy counts."""
        self.follow("GRPOTrainer", num_iterations=2, beta=0.1)

    def test_rloo(self):
        self.follow("RLOOTrainer")

    def test_reward(self):
        self.follow("RewardTrainer")


if __name__ == "__main__":
    unittest.main()

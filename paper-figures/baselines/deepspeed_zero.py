"""The three DeepSpeed baselines: ZeRO-2 and ZeRO-3 with the optimizer on the CPU, and ZeRO-3 with `super_offload`."""

import os
import socket

import workload as w


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def measure(system, name, args, zero):
    """Times DeepSpeed with `zero` as its `zero_optimization`."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())

    def prepare(_torch, model, batch):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": args.max_grad_norm,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": w.LEARNING_RATE, "betas": list(w.BETAS), "eps": w.EPSILON,
                                                      "weight_decay": w.WEIGHT_DECAY}},
            "zero_optimization": zero,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        forward = lambda ids: engine(input_ids=ids, labels=ids, use_cache=False).loss
        settings = {"pin_memory": zero["offload_optimizer"]["pin_memory"], "config": config,
                    "versions": {"deepspeed": deepspeed.__version__}}
        return forward, engine.backward, engine.step, settings

    w.measure(system, name, args, prepare)

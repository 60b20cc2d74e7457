"""PyTorch's `fully_shard` with CPU offload: fp32 parameters and states on the CPU, bf16 compute, fused AdamW on the CPU."""

import os

import deepspeed_zero
import workload as w

args = w.arguments(pin_memory=True)


def prepare(torch, model, _batch):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=deepspeed_zero.free_port())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    how = {"mesh": init_device_mesh(device, (1,)), "reshard_after_forward": True,
           "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
           "offload_policy": CPUOffloadPolicy(pin_memory=args.pin_memory and device == "cuda")}
    for layer in w.layers_of(model):
        fully_shard(layer, **how)
    fully_shard(model, **how)
    adam = torch.optim.AdamW(model.parameters(), lr=w.LEARNING_RATE, betas=w.BETAS, eps=w.EPSILON, weight_decay=w.WEIGHT_DECAY, fused=True)

    def update():
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)

    forward = lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    return forward, lambda loss: loss.backward(), update, {"pin_memory": args.pin_memory, "float32": True}


w.measure("fsdp2", "FSDP2 CPU offload", args, prepare, dtype="float32")

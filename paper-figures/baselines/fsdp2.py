"""PyTorch's `fully_shard`: fp32 parameters and states, bf16 compute, fused AdamW; with CPU offload, or over several GPUs without.

    python fsdp2.py --workload W1
    torchrun --nproc-per-node=2 fsdp2.py --workload W2 --no-offload --compile
"""

import os

import deepspeed_zero
import workload as w

args = w.arguments(pin_memory=True, offload=True, compile=False)


def prepare(torch, model, _batch):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if w.RANKS == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=deepspeed_zero.free_port())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    how = {"mesh": init_device_mesh(device, (w.RANKS,)), "reshard_after_forward": True,
           "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    if args.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=args.pin_memory and device == "cuda")
    for layer in w.layers_of(model):
        if args.compile:
            layer.compile()
        fully_shard(layer, **how)
    fully_shard(model, **how)
    adam = torch.optim.AdamW(model.parameters(), lr=w.LEARNING_RATE, betas=w.BETAS, eps=w.EPSILON, weight_decay=w.WEIGHT_DECAY, fused=True)

    def update():
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)

    forward = lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    how = {"pin_memory": args.pin_memory, "float32": True, "offload": args.offload, "compile": args.compile}
    return forward, lambda loss: loss.backward(), update, how


w.measure("fsdp2", "FSDP2 CPU offload" if args.offload else "FSDP2", args, prepare, dtype="float32")

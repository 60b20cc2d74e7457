"""PyTorch's context parallelism: ranks share one long sequence by ring attention; FSDP2 shards fp32 parameters and states over them.

    torchrun --nproc-per-node=2 context_parallel.py --workload L128k

Positions are dealt so that causal attention is as much work on each rank. Logits are computed in tiles and again in the backward pass, as no
rank has room for those of 65,536 tokens.
"""

import contextlib

import workload as w

args = w.arguments(compile=False, tile=8192)


def without_masks(torch, model):
    """Has the model's layers leave causality to attention: a mask of all tokens by all would not fit, and ring attention takes none."""
    import sys

    sys.modules[type(model).__module__].create_causal_mask = lambda **_: None


def tiled(torch, model):
    """The model with its loss, `tile` tokens of logits at a time."""
    from torch.utils.checkpoint import checkpoint

    class Tiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids, labels, positions):
            hidden = self.inner.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            tiles = zip(hidden.split(args.tile, 1), labels.split(args.tile, 1))
            return sum(checkpoint(self.of_tile, *tile, use_reentrant=False) for tile in tiles)

        def of_tile(self, hidden, labels):
            logits = self.inner.lm_head(hidden).float().flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")

    return Tiled()


def prepare(torch, model, batch):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (w.RANKS,))
    without_masks(torch, model)
    how = {"mesh": mesh, "reshard_after_forward": True,
           "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for layer in w.layers_of(model):
        if args.compile:
            layer.compile()
        fully_shard(layer, **how)
    whole = tiled(torch, model)
    fully_shard(whole, **how | {"reshard_after_forward": False})
    adam = torch.optim.AdamW(whole.parameters(), lr=w.LEARNING_RATE, betas=w.BETAS, eps=w.EPSILON, weight_decay=w.WEIGHT_DECAY, fused=True)
    ring = contextlib.ExitStack()

    def forward(ids):
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        buffers = [ids.clone(), labels, positions]
        ring.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)))
        # Gradients are averaged over ranks, of which each has the sum of its own tokens: of all, that is the mean over them.
        return whole(*buffers) * (w.RANKS / (ids.shape[1] - 1))

    def backward(loss):
        loss.backward()
        ring.close()

    def update():
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), args.max_grad_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)

    return forward, backward, update, {"float32": True, "offload": False, "compile": args.compile, "tile": args.tile}


w.measure("context-parallel", "FSDP2 and context parallelism", args, prepare, dtype="float32", shares_sequences=True)

"""torchao's CPUOffloadOptimizer, which cannot clip; `--float32` keeps weights and states in fp32 and computes under autocast."""

import contextlib

import workload as w

args = w.arguments(float32=False)
args.max_grad_norm = 0.0


def prepare(torch, model, _batch):
    import torchao
    from torchao.optim import CPUOffloadOptimizer

    adam = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, lr=w.LEARNING_RATE,
                               betas=w.BETAS, eps=w.EPSILON, weight_decay=w.WEIGHT_DECAY, fused=True)

    def forward(ids):
        with torch.autocast("cuda", dtype=torch.bfloat16) if args.float32 else contextlib.nullcontext():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    def update():
        adam.step()
        adam.zero_grad()

    settings = {"float32": args.float32, "offload_gradients": False, "versions": {"torchao": torchao.__version__}}
    return forward, lambda loss: loss.backward(), update, settings


w.measure("torchao", "torchao CPU offload", args, prepare, dtype="float32" if args.float32 else "bfloat16")

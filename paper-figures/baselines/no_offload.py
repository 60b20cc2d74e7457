"""Everything on the GPU: bf16 weights and gradients, fp32 master weights and moments, fused AdamW."""

import workload as w

args = w.arguments(compile=False)


def prepare(torch, model, _batch):
    if args.compile:
        for layer in w.layers_of(model):
            layer.compile()
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    adam = torch.optim.AdamW(masters, lr=w.LEARNING_RATE, betas=w.BETAS, eps=w.EPSILON, weight_decay=w.WEIGHT_DECAY, fused=True)

    def update():
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        for weight, master in zip(weights, masters):
            master.grad, weight.grad = weight.grad.float(), None
        adam.step()
        adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    forward = lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    return forward, lambda loss: loss.backward(), update, {"compile": args.compile}


w.measure("gpu", "no offload, torch", args, prepare)

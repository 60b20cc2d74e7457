"""Everything on the GPU: bf16 weights and gradients, fp32 master weights and moments, fused AdamW."""

import workload as w

args = w.arguments(compile=False, float8="")


def in_float8(model):
    """The layers' products as torchao's recipe says: `tensorwise` or `rowwise`. The output matrix stays in bf16."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(args.float8)
    for layer in w.layers_of(model):
        convert_to_float8_training(layer, config=config)


def prepare(torch, model, _batch):
    if args.float8:
        in_float8(model)
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
    return forward, lambda loss: loss.backward(), update, {"compile": args.compile, "float8": args.float8 or None}


w.measure("gpu", "no offload, torch", args, prepare)

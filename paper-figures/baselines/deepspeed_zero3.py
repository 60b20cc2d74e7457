"""DeepSpeed ZeRO-3 with the optimizer on the CPU."""

import deepspeed_zero
import workload as w

args = w.arguments(bucket=500_000_000, sub_group=1_000_000_000, pin_memory=True)
deepspeed_zero.measure("z3", "DeepSpeed ZeRO-3 offload", args, {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": args.pin_memory},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": args.bucket,
    "sub_group_size": args.sub_group,
})

"""DeepSpeed ZeRO-2 with the optimizer on the CPU: ZeRO-Offload as it is today."""

import deepspeed_zero
import workload as w

args = w.arguments(bucket=500_000_000, pin_memory=True)
deepspeed_zero.measure("z2", "DeepSpeed ZeRO-2 offload", args, {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": args.pin_memory},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": args.bucket,
    "allgather_bucket_size": args.bucket,
})

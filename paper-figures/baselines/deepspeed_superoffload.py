"""DeepSpeed's own SuperOffload: 0.18.9 or newer, since older releases do not return the updated weights to the GPU."""

import deepspeed_zero
import workload as w

# Its optimizer's process imports this file again.
if __name__ == "__main__":
    args = w.arguments(bucket=400_000_000, ratio=0.9, cores_perc=0.9, pin_memory=True)
    deepspeed_zero.measure("super", "DeepSpeed SuperOffload", args, {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": args.pin_memory, "super_offload": True, "ratio": args.ratio,
                              "cpuadam_cores_perc": args.cores_perc},
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": args.bucket,
        "sub_group_size": args.bucket,
    })

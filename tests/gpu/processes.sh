#!/usr/bin/env bash
# Compares the digests of two processes, over TCP and NCCL, with the digest of one process with all GPUs. Needs a machine with two GPUs.
# Does not need cargo.
#
#   [EACH=N] tests/gpu/processes.sh DIR [TRANSPORT...]
#
# DIR has the program `superoffload`. TRANSPORT is tcp or nccl; both by default. EACH is the number of GPUs per process; 1 by default. From
# 2 on, the script also tests groups of EACH gradient shares, and weights sharded over each process's GPUs. Weights sharded over all GPUs
# are tested, too. Prints a line for each run. Exits with 1 if a digest differs or a run fails.
set -euo pipefail

program=$(cd "${1:?usage: tests/gpu/processes.sh DIR [TRANSPORT...]}" && pwd)/superoffload
transports=("${@:2}")
[ ${#transports[@]} -gt 0 ] || transports=(tcp nccl)
work=$(mktemp -d)
SUPEROFFLOAD_RUN_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export SUPEROFFLOAD_RUN_TOKEN
each=${EACH:-1}
all=$((2 * each))
failed=0 port=$((20000 + RANDOM % 10000))

# A model with layers of several GPU memory pages, so that sharding the weights can save pages.
mkdir "$work/wide"
cat >"$work/wide/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 2816,
 "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END

cat "$(dirname "$0")"/*.rs >"$work/text.txt"
wide=(--model "$work/wide" --init random --data "$work/text.txt" --max-grad-norm 8.5)

# train NAME LOG FLAG...: a run in which about half of the steps are clipped.
train() {
  timeout 120 "$program" train --device cuda --gradient-shares $all --max-steps 12 --per-device-train-batch-size 2 --seq-length 256 \
    --learning-rate 0.01 --bucket-mib 0.25 --save-steps 6 --digest --output-dir "$work/$1" "${@:3}" >"$2" 2>&1
}
digest() { sed -n 's/^digest: //p' "$1"; }

# Strategy, gradients (sent one by one, or in groups), and placement of the weights.
for kind in {superoffload,zero-offload,no-offload}:{each,group}:replicated superoffload:group:sharded {superoffload,no-offload}:each:fully-sharded; do
  IFS=: read -r strategy sums weights <<<"$kind"
  case $each:$sums:$weights in 1:group:* | 1:*:sharded) continue ;; esac
  [ $sums = group ] && group=$each || group=1
  flags=(--strategy "$strategy" --gradient-accumulation-steps 1 --gradient-group "$group")
  if [ "$weights" = replicated ]; then flags+=(--max-grad-norm 2.5); else flags+=("${wide[@]}"); fi
  train "one-$strategy-$group-$weights" "$work/one.log" --gpus $all "${flags[@]}" || { tail -n 5 "$work/one.log"; exit 1; }
  want=$(digest "$work/one.log")
  flags+=(--weights "$weights")
  for transport in "${transports[@]}"; do
    name=$strategy-$group-$weights-$transport port=$((port + 1)) began=$SECONDS
    pids=()
    for process in 0 1; do
      train "$name" "$work/$process.log" --processes 2 --process $process --gpus "$each" --rendezvous "127.0.0.1:$port" --transport "$transport" "${flags[@]}" &
      pids+=($!)
    done
    code=0
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    have=$(digest "$work/0.log")
    clips=$(grep -c '"verdict":"clip"' "$work/$name/metrics.jsonl" 2>/dev/null || true)
    if [ $code = 0 ] && [ -n "$want" ] && [ "$have" = "$want" ] && [ "$clips" -gt 0 ] && [ "$clips" -lt 12 ]; then
      echo "ok      $name ($((SECONDS - began)) s): $have, $clips of 12 steps clipped"
    else
      failed=1
      echo "FAILED  $name (exit $code): ${have:-no digest} after $clips clips of 12, and $want of one process"
      tail -n 5 "$work/0.log" "$work/1.log"
    fi
  done
done
exit $failed

#!/usr/bin/env bash
# Two processes with a GPU each have the digest of one process with both, over TCP and by NCCL: on a machine with two GPUs, without cargo.
#
#   [EACH=N] tests/gpu/processes.sh DIR [TRANSPORT...]
#
# DIR holds the program `superoffload`; what else is installed is found as ever. TRANSPORT: tcp, nccl (both). EACH: GPUs of each process (1); from
# 2 on also with groups of so many gradient shares, and weights shared by each process's GPUs. Weights shared by all GPUs are tried, too. Prints a line
# for each run; exits 1 if one had another digest or failed.
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

# Layers that a GPU's pages can be saved of, where the weights are shared.
mkdir "$work/wide"
cat >"$work/wide/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 2816,
 "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END

cat "$(dirname "$0")"/*.rs >"$work/text.txt"
wide=(--model "$work/wide" --init random --data "$work/text.txt" --max-grad-norm 8.5)

# train NAME LOG FLAG...: a run whose clips are about half of its steps.
train() {
  timeout 120 "$program" train --device cuda --gradient-shares $all --max-steps 12 --per-device-train-batch-size 2 --seq-length 256 \
    --learning-rate 0.01 --bucket-mib 0.25 --save-steps 6 --digest --output-dir "$work/$1" "${@:3}" >"$2" 2>&1
}
digest() { sed -n 's/^digest: //p' "$1"; }

# Strategy, gradients (each by itself, or in groups) and where weights lie.
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

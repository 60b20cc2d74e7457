#!/usr/bin/env bash
# Rows of models at full size whose figures wait for a GPU: predicts each with `simulate`, then measures it with `bench step`.
#
#   tests/gpu/rows.sh PROGRAM OUT [ROW...]
#
# Writes OUT/ROW.json for each measured row and prints a table: the prediction and the measurement, in ms a step, and the expectation. Without a
# GPU it prints predictions alone. PROFILE names the machine of the predictions (h200-pcie5). SECONDS_EACH is the time limit of a
# measurement (300). Remove a row once its line is among paper-figures/results.
set -euof pipefail

program=$(realpath "${1:?usage: tests/gpu/rows.sh PROGRAM OUT [ROW...]}")
out=${2:?usage: tests/gpu/rows.sh PROGRAM OUT [ROW...]}
wanted=("${@:3}")
mkdir -p "$out"

# Name, GPUs, expectation, flags. Host memory is that of the machine unless a row limits it.
rows() {
  cat <<'ROWS'
gemma-4-31b|2|450 TFLOP/s, goal 460|--model gemma-4-31b --gpus 2 --moments int8 --seq-length 4096 --per-device-train-batch-size 4
qwen3.5-27b|2|450 TFLOP/s, goal 470|--model qwen3.5-27b --gpus 2 --moments int8 --seq-length 4096 --per-device-train-batch-size 4
qwen3.5-35b-a3b|2|11 k tokens/s each, goal 12 k|--model qwen3.5-35b-a3b --gpus 2 --moments bfloat16 --seq-length 4096 --per-device-train-batch-size 8
moonlight-16b-a3b|1|runs|--model moonlight-16b-a3b --moments int8 --masters split --seq-length 4096 --per-device-train-batch-size 4
ROWS
}

# The number behind `"KEY":`, or behind `"KEY":{"median":`, in a line of JSON.
number() {
  { grep -oE "\"$1\":(\{\"median\":)?[0-9.]+" || echo :-; } | head -n 1 | sed 's/.*://'
}

gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
printf '%-24s %12s %12s  %s\n' row predicted measured expected
while IFS='|' read -r name needs expected flags; do
  [[ ${#wanted[@]} = 0 || " ${wanted[*]} " == *" $name "* ]] || continue
  profile=${PROFILE:-h200-pcie5}
  [ "$needs" = 1 ] || profile=${PROFILE:-h200-x$needs}
  # shellcheck disable=SC2086
  predicted=$({ "$program" simulate --json --warmup 1 --steps 1 --hardware "$profile" $flags 2>"$out/$name.simulated.log" || true; } | number step_ms)
  measured=-
  if [ "$gpus" -ge "$needs" ]; then
    # shellcheck disable=SC2086
    timeout "${SECONDS_EACH:-300}" "$program" bench step --warmup 1 --steps 3 --out "$out/$name.json" $flags >"$out/$name.log" 2>&1 ||
      measured="exit $?"
    [ ! -s "$out/$name.json" ] || measured=$(tail -n 1 "$out/$name.json" | number step_ms)
  fi
  printf '%-24s %12s %12s  %s\n' "$name" "$predicted" "$measured" "$expected"
done < <(rows)

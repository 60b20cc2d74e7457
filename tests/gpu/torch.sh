#!/usr/bin/env bash
# Tests of superoffload.torch that need a GPU, and speed rows of OffloadAdamW, without cargo, pip and network:
#
#   tests/gpu/torch.sh DIR [CHECK...]
#
# DIR has the extension module `_cpu_adam.abi3.so`, from a wheel of this commit. The Python package is that of this clone. Python with torch
# is python3, or SUPEROFFLOAD_TORCH_PYTHON. Prints a line for each check, and the rows of torch_rows.py. Exits with 1 if a check fails.
#
# CHECK selects from gpu, copies, reads, rows, trainer. What needs a package that is missing is named after LEFT OUT. SECONDS_ALL=N is the
# time for everything (360). MODEL=NAME is the model of the rows (qwen3-4b; smaller ones are qwen3-1.7b and qwen3-0.6b).
set -euo pipefail

dir=$(cd "${1:?usage: tests/gpu/torch.sh DIR [CHECK...]}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
all=(gpu copies reads rows trainer)
wanted=("${@:2}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all[@]}")
for name in "${wanted[@]}"; do
  [[ " ${all[*]} " == *" $name "* ]] || { echo "no check is called $name; there are ${all[*]}"; exit 2; }
done
module=$dir/_cpu_adam.abi3.so
[ -s "$module" ] || { echo "torch: $module is missing"; exit 2; }
python=${SUPEROFFLOAD_TORCH_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/site"
cp -r "$root/packaging/python/superoffload" "$work/site/"
cp "$module" "$work/site/superoffload/"
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
cd "$work"
"$python" - <<'END' || exit 1
import importlib.metadata, torch
names = ("transformers", "trl", "accelerate", "lightning", "deepspeed", "torchao")
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("torch", torch.__version__, "gpus", gpus, *(f"{name} {version(name)}" for name in names))
END

ends=$((SECONDS + ${SECONDS_ALL:-360}))
failed=0
# check NAME COMMAND...: runs the command, prints the outcome, and prints the end of its log after a failure.
check() {
  local name=$1 began=$SECONDS code=0
  shift
  [[ " ${wanted[*]} " == *" $name "* ]] || return 0
  [ $((ends - SECONDS)) -gt 10 ] || { echo "LEFT OUT $name: no time is left"; return 0; }
  timeout $((ends - SECONDS)) "$@" >"$work/$name.log" 2>&1 || code=$?
  grep -hE "TFLOP/s|ratio" "$work/$name.log" || true
  grep -hoE "LEFT OUT[^']*" "$work/$name.log" | sort -u || true
  if [ $code = 0 ]; then
    echo "ok      $name ($((SECONDS - began)) s): $(grep -E '^(Ran|OK)' "$work/$name.log" | tail -n 2 | tr '\n' ' ')"
  else
    failed=1
    echo "FAILED  $name (exit $code, $((SECONDS - began)) s)"
    tail -n 25 "$work/$name.log"
  fi
}
# tests FILE [OPTION...]: a test file of the package.
tests() { "$python" -W ignore -m unittest discover -v -s "$root/packaging/python/tests" -p "test_$1.py" "${@:2}"; }
export -f tests
export python root

check gpu bash -c 'tests gpu'
check copies bash -c 'tests offload -k Copies -k Speculation'
check reads bash -c 'tests reads'
check rows "$python" -W ignore "$root/tests/gpu/torch_rows.py" --model "${MODEL:-qwen3-4b}" --seconds $((ends - SECONDS - 20))
check trainer bash -c 'tests trainer -k torchs_adamw -k goes_on -k twice'
exit $failed

#!/usr/bin/env bash
# Installs a wheel of build.sh into a new environment ENV without activating it, and trains the demo for one step. Prints the time of the
# installation and of the program's first start. Run it on an idle machine.
#
#   packaging/first-start.sh WHEEL ENV [RECORD]
#
# RECORD: a file to which a JSON line is appended.
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { echo "usage: packaging/first-start.sh WHEEL ENV [RECORD]" >&2; exit 2; }
wheel=$(realpath "$1") bare=$(realpath "$2") record=${3:+$(realpath "$3")}
program=$bare/bin/superoffload
cd "$(dirname "$0")/.."
give_up() { echo "first start: $*" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The oldest supported Python that is installed.
runs() { "$1" -c '' 2>/dev/null; }
for python in python3.1{0,1,2,3} python3; do ! runs $python || break; done
$python -m venv "$bare"
began=$(date +%s.%N)
"$bare/bin/pip" install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"
installed=$(date +%s.%N)
# Like a service: no environment is active, and the program is not on PATH.
said=$(env -i HOME="$work" PATH=/usr/bin:/bin "$program" train --device cpu --max-steps 1 --output-dir "$work/run" --digest) \
  || give_up "the demo does not train"
ended=$(date +%s.%N)
grep -q '^digest: ' <<<"$said" || give_up "the demo says no digest: $said"

since() { "$bare/bin/python" -c "print($2 - $1)"; }
times=(install_s="$(since "$began" "$installed")" first_step_s="$(since "$installed" "$ended")")
echo "${times[@]}"
[ -z "$record" ] || "$bare/bin/python" packaging/record.py packaging/first-start.sh "$(uname -m)" "$wheel" "$program" "${times[@]}" >>"$record"

#!/usr/bin/env bash
# Installs the pinned CUDA compiler, the assembler and the compressor for generated PTX from Python wheels below target/, and prints the
# folder with compiler and assembler. Needs python3 with venv, and a package index on the first run. Needs no GPU, driver or CUDA toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."

# The committed kernels were compiled with CUDA 13.0. The wheels of one CUDA release have different patch versions.
wheels=(
  nvidia-cuda-nvcc==13.0.88
  nvidia-nvvm==13.0.88
  nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85
  zstandard==0.25.0
)
venv=$PWD/target/cuda-tools

command -v python3 >/dev/null || { echo "no python3: it installs the CUDA compiler that checks ptx/" >&2; exit 1; }
if [ "$(cat "$venv/installed" 2>/dev/null)" != "${wheels[*]}" ]; then
  rm -rf "$venv"
  mkdir -p target
  python3 -m venv "$venv" >&2 || { echo "python3 has no venv: install it (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${wheels[@]}" >&2
  echo "${wheels[*]}" >"$venv/installed"
fi
bin=$(dirname "$(ls "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/ptxas)")
echo "$bin"

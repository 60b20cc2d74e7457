#!/usr/bin/env bash
# Runs cargo for aarch64: `tests/aarch64/cargo.sh test --package superoffload`.
set -euo pipefail
environment=$("$(dirname "$0")/install-tools.sh")
eval "$environment"
export CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu
exec cargo "$@"

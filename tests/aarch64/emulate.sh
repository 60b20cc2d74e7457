#!/bin/sh
# Runs an aarch64 program. SUPEROFFLOAD_QEMU_CPU is qemu's CPU model; the default has SVE2 with 128-bit vectors, like Grace. Tests that
# start the program run it with this script, whose path is in SUPEROFFLOAD_EMULATOR.
export SUPEROFFLOAD_QEMU_CPU="${SUPEROFFLOAD_QEMU_CPU:-max,sve-default-vector-length=16}"
SUPEROFFLOAD_EMULATOR=$(realpath "$0")
export SUPEROFFLOAD_EMULATOR
emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64)
exec "$emulator" -L /usr/aarch64-linux-gnu -cpu "$SUPEROFFLOAD_QEMU_CPU" "$@"

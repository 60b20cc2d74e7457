#!/bin/sh
# Runs an aarch64 program. SUPEROFFLOAD_QEMU_CPU is qemu's model; the default has SVE2 with vectors of 128 bits, as Grace has.
# Tests that start the program find this script as SUPEROFFLOAD_EMULATOR.
export SUPEROFFLOAD_QEMU_CPU="${SUPEROFFLOAD_QEMU_CPU:-max,sve-default-vector-length=16}"
SUPEROFFLOAD_EMULATOR=$(realpath "$0")
export SUPEROFFLOAD_EMULATOR
emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64)
exec "$emulator" -L /usr/aarch64-linux-gnu -cpu "$SUPEROFFLOAD_QEMU_CPU" "$@"

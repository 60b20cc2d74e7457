#!/usr/bin/env bash
# Runs the tests of this folder in a virtual machine with a real resctrl: run.sh [KERNEL]
#
# KERNEL is any x86-64 bzImage with CONFIG_X86_CPU_RESCTRL, such as Debian's; by default, the running kernel. Needs cargo, a C compiler,
# QEMU 11 or newer with its firmware, and a static busybox; on Debian 13:
#   apt install gcc busybox-static linux-image-cloud-amd64 && apt install -t trixie-backports qemu-system-x86
# QEMU and BUSYBOX override the paths of these programs. KVM is not used: the plugin that emulates RDT needs QEMU's translator.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernel=${1:-/boot/vmlinuz-$(uname -r)}
qemu=${QEMU:-qemu-system-x86_64}
busybox=${BUSYBOX:-$(command -v busybox)}
target=x86_64-unknown-linux-gnu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Statically linked, so that they run without shared libraries.
build() { (cd "$here/../.." && RUSTFLAGS="-C target-feature=+crt-static" cargo "$@" --package superoffload-resctrl --target $target --message-format=json); }
executable() { sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | tail -n 1; }
program=$(build build --bin superoffload-resctrl | executable superoffload-resctrl)
cases=$(build test --no-run --test guest | executable guest)
cc -O2 -shared -fPIC -o "$work/librdt.so" "$here/rdt.c"

mkdir -p "$work/root"/{bin,proc,sys,dev,tmp,run}
cp "$busybox" "$work/root/bin/busybox"
cp "$program" "$work/root/superoffload-resctrl"
cp "$cases" "$work/root/guest"
strip "$work/root/superoffload-resctrl" "$work/root/guest"
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
echo "kernel $(uname -r)"
SUPEROFFLOAD_GUEST=1 RUST_BACKTRACE=0 /guest
echo "guest ended with $?"
poweroff -f
INIT
chmod +x "$work/root/init"
(cd "$work/root" && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initrd.gz"

timeout 580 "$qemu" -M q35 -accel tcg,thread=multi -cpu max,vendor=GenuineIntel,level=0x20 -smp 4,sockets=2,cores=2 -m 1024 \
  -plugin "$work/librdt.so" -display none -monitor none -serial stdio -no-reboot -nic none \
  -kernel "$kernel" -initrd "$work/initrd.gz" -append "console=ttyS0 quiet panic=-1 no_timer_check" </dev/null |
  tr -d '\r' | sed -n '/^kernel /,/^guest ended/p' | tee "$work/said"
grep -q '^guest ended with 0$' "$work/said"

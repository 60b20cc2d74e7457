#!/usr/bin/env bash
# Runs tests/memory.rs in an arm64 virtual machine with two NUMA nodes, the second without CPUs: run.sh KERNEL
#
# KERNEL is an arm64 Image with CONFIG_NUMA and CONFIG_HUGETLBFS, such as Debian's vmlinuz of linux-image-cloud-arm64. Needs the tools of
# tests/aarch64/install-tools.sh, QEMU's arm64 machine, a busybox for cpio, and a static arm64 busybox:
#   apt install qemu-system-arm busybox && dpkg --add-architecture arm64 && apt download busybox-static:arm64 && dpkg -x ...
# QEMU, BUSYBOX and GUEST_BUSYBOX override the paths of these programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
kernel=${1:?usage: run.sh KERNEL}
qemu=${QEMU:-qemu-system-aarch64}
busybox=${BUSYBOX:-$(command -v busybox)}
guest_busybox=${GUEST_BUSYBOX:?a static busybox of arm64}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

built=$(tests/aarch64/cargo.sh test --no-run --package superoffload --test main --message-format=json)
executable() { sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" <<<"$built" | tail -n 1; }
program=$(executable superoffload)
tests=$(executable main)

mkdir -p "$work/root"/{bin,lib,proc,sys,dev,tmp} "$work/root/$(dirname "$program")"
cp "$guest_busybox" "$work/root/bin/busybox"
# The tests look for the program at the path where it was built.
cp "$program" "$work/root/$program"
cp "$tests" "$work/root/tests"
aarch64-linux-gnu-strip "$work/root/$program" "$work/root/tests"
cp /usr/aarch64-linux-gnu/lib/{ld-linux-aarch64.so.1,libc.so.6,libm.so.6,libgcc_s.so.1} "$work/root/lib"
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
echo "kernel $(uname -r)"
RUST_BACKTRACE=0 /tests --test-threads=1 --nocapture --ignored memory::
echo "guest ended with $?"
poweroff -f
INIT
chmod +x "$work/root/init"
(cd "$work/root" && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initrd.gz"

timeout 580 "$qemu" -M virt,gic-version=3 -cpu neoverse-n2 -accel tcg,thread=multi -smp 2 -m 1536 \
  -object memory-backend-ram,id=near,size=768M -object memory-backend-ram,id=far,size=768M \
  -numa node,nodeid=0,memdev=near,cpus=0-1 -numa node,nodeid=1,memdev=far -numa dist,src=0,dst=1,val=80 \
  -display none -monitor none -serial stdio -no-reboot -nic none \
  -kernel "$kernel" -initrd "$work/initrd.gz" -append "console=ttyAMA0 quiet panic=-1" </dev/null |
  tr -d '\r' | sed -n '/^kernel /,/^guest ended/p' | tee "$work/said"
grep -q '^guest ended with 0$' "$work/said"

#!/usr/bin/env bash
# Installs the tools to build and run aarch64 programs on this x86-64 machine: a cross linker, qemu's user-mode emulator, and the standard
# library for the current rustc. Prints the exports that cargo needs: eval "$(tests/aarch64/install-tools.sh)".
#
# Needs rustup, and apt-get as root unless linker and emulator are installed. If rustup cannot download the library, it is built from
# Debian's package of rustc's sources, or from SUPEROFFLOAD_RUST_LIBRARY, the `library` folder of exactly this release.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=aarch64-unknown-linux-gnu
tools=$PWD/target/aarch64-tools
say() { echo "aarch64: $*" >&2; }
give_up() { say "$*"; exit 1; }

emulator() { command -v qemu-aarch64-static || command -v qemu-aarch64; }

install_packages() {
  command -v apt-get >/dev/null || give_up "no $1, and no apt-get: install aarch64-linux-gnu-gcc and qemu-aarch64"
  apt-get -qq update >&2 || say "apt-get update failed; trying with the lists there are"
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install \
    gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >&2 || give_up "apt-get could not install $1"
}

has_std() { compgen -G "$1/lib/rustlib/$target/lib/libstd-*.rlib" >/dev/null; }

# download_sources VERSION FOLDER: downloads Debian's rust-src of this release from any suite. Uses a separate apt configuration with the
# package lists of other suites, and installs nothing.
download_sources() {
  local version=$1 folder=$2 mirror suite package
  mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null ||
    awk '$1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) {print $i; exit}}' /etc/apt/sources.list)
  [ -n "$mirror" ] || return 1
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  : >"$folder/status"
  for suite in trixie-backports testing sid; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$folder/sources.list"
    printf '%s;\n' "Dir::State \"$folder\"" "Dir::State::status \"$folder/status\"" "Dir::State::lists \"$folder/lists\"" \
      "Dir::Cache \"$folder/cache\"" "Dir::Etc::sourcelist \"$folder/sources.list\"" 'Dir::Etc::sourceparts "/dev/null"' \
      'Dir::Etc::preferencesparts "/dev/null"' 'APT::Sandbox::User "root"' 'Acquire::Languages "none"' >"$folder/apt.conf"
    APT_CONFIG=$folder/apt.conf apt-get -qq update >&2 || continue
    package=$(APT_CONFIG=$folder/apt.conf apt-cache madison rust-src | awk '{print $3}' | grep -F "$version+" | head -n 1) || continue
    (cd "$folder" && APT_CONFIG=$folder/apt.conf apt-get -qq download "rust-src=$package" >&2) || continue
    dpkg --fsys-tarfile "$folder"/rust-src_*.deb | tar -x -C "$folder" --strip-components=4 "./usr/src/rustc-$version/library"
    return
  done
  return 1
}

# build_std VERSION FOLDER: creates a sysroot with only the target's library. The compiler's own sysroot is not changed.
build_std() {
  local version=$1 sysroot=$2 work library
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  library=${SUPEROFFLOAD_RUST_LIBRARY:-$work/library}
  [ -d "$library" ] || download_sources "$version" "$work" ||
    give_up "no aarch64 library for rustc $version: rustup cannot download it, and apt has no rust-src of it. Set SUPEROFFLOAD_RUST_LIBRARY"
  say "building the standard library $version"
  mkdir -p "$work/empty/src"
  : >"$work/empty/src/lib.rs"
  printf '[package]\nname = "empty"\nedition = "2024"\n[workspace]\n' >"$work/empty/Cargo.toml"
  # A compiler may build its own library with unstable features. The project itself is built as on stable.
  (cd "$work/empty" && env -u RUSTFLAGS -u CARGO_TARGET_DIR RUSTC_BOOTSTRAP=1 __CARGO_TESTS_ONLY_SRC_ROOT="$library" \
    cargo build --quiet --release --target $target -Zbuild-std=std,panic_abort,panic_unwind,proc_macro,test) >&2
  mkdir -p "$sysroot/lib/rustlib/$target/lib"
  cp "$work/empty/target/$target/release/deps/"*.rlib "$sysroot/lib/rustlib/$target/lib/"
}

command -v aarch64-linux-gnu-gcc >/dev/null || install_packages "cross linker"
emulator >/dev/null || install_packages "emulator"

sysroot=$(rustc --print sysroot)
if ! has_std "$sysroot" && ! { command -v rustup >/dev/null && timeout 120 rustup target add $target >&2; }; then
  version=$(rustc -vV | awk '/^release:/ {print $2}')
  sysroot=$tools/$(rustc -vV | awk '/^commit-hash:/ {print $2}')
  has_std "$sysroot" || build_std "$version" "$sysroot"
  echo "export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS='--sysroot $sysroot'"
  echo "export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTDOCFLAGS='--sysroot $sysroot'"
fi
echo "export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc"
echo "export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc"
echo "export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/aarch64/emulate.sh"

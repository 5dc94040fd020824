#!/bin/sh
# Makes an aarch64 Python with what edgeq needs, and the qemu that runs it, under build/arm64.  Needs no root: apt works on
# folders of its own here, packages are unpacked and never installed.  Run again, it does nothing until this file changes.
set -eu
cd "$(dirname "$0")/../.."
here=$PWD/build/arm64
stamp=$here/stamp
script=$PWD/tests/arm/setup.sh
if cmp -s "$script" "$stamp"; then
    echo "build/arm64 is ready"
    exit 0
fi
python=${PYTHON:-python3}
root=$here/root apt=$here/apt
rm -rf "$here"
mkdir -p "$root" "$apt/lists/partial" "$apt/archives/partial" "$apt/parts"
: >"$apt/status"

# Debian 12: the release that Raspberry Pi OS "bookworm" is built from.
key=/usr/share/keyrings/debian-archive-keyring.gpg
if [ ! -e "$key" ]; then
    echo "setup-arm64: $key is missing; run: apt-get install debian-archive-keyring" >&2
    exit 1
fi
echo "deb [signed-by=$key] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} bookworm main" >"$apt/sources.list"
host=$(dpkg --print-architecture)
apt_get() {
    architecture=$1
    shift
    apt-get -q -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::State::lists="$apt/lists" \
        -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o Dir::Etc::sourcelist="$apt/sources.list" \
        -o Dir::Etc::sourceparts="$apt/parts" -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" \
        -o APT::Install-Recommends=false -o Debug::NoLocking=true -o APT::Sandbox::User= -o Dir::Log::Terminal= "$@"
}
apt_get arm64 update
apt_get arm64 install --yes --download-only python3.11 libgomp1 libstdc++6 zlib1g
for package in "$apt"/archives/*_arm64.deb "$apt"/archives/*_all.deb; do
    dpkg -x "$package" "$root"
done
apt_get "$host" update
(cd "$apt/archives" && apt_get "$host" download qemu-user-static)
dpkg -x "$apt"/archives/qemu-user-static_*.deb "$apt/qemu"
mv "$apt/qemu/usr/bin/qemu-aarch64-static" "$here/"

# Wheels come as what they are: pip may not run code of a package for another processor.
"$python" -m pip download --quiet --dest "$apt/wheels" --only-binary=:all: --implementation cp --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --platform linux_aarch64 \
    -c constraints.txt numpy numba llvmlite flatbuffers click rich tokenizers xxhash jinja2 pytest
packages=$root/usr/lib/python3/dist-packages
mkdir -p "$packages"
for wheel in "$apt"/wheels/*.whl; do
    "$python" -m zipfile -e "$wheel" "$packages"
done
rm -rf "$apt"
cp "$script" "$stamp"
echo "build/arm64 is ready: make test-arm64"

#!/bin/bash
# The node's kernel, from the newest Debian source package of the suites named in `suites`: prints its progress, leaves
# `bzImage` in $OUT.
#
# The source comes through an apt of its own (sources, lists and cache in the work directory), so that the host's
# release does not matter and its apt is not touched.
set -euo pipefail

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

mkdir -p apt/etc/apt/{apt.conf.d,preferences.d} apt/var/lib/{dpkg,apt/lists/partial} apt/var/cache/apt/archives/partial
cat >apt.conf <<EOF
Dir "$PWD/apt";
Dir::State::status "/dev/null";
Dir::Etc::SourceList "$PWD/apt/sources.list";
APT::Sandbox::User "root";
Acquire::Languages "none";
EOF
for suite in $(<suites); do
  echo "deb [signed-by=$keyring] http://deb.debian.org/debian $suite main"
done >apt/sources.list
export APT_CONFIG=$PWD/apt.conf

apt-get -qq update
version=$(apt-cache search --names-only '^linux-source-[0-9.]+$' | sed -E 's/^linux-source-([0-9.]+) .*/\1/' | sort -V | tail -n 1)
echo "downloading linux-source-$version"
apt-get -qq download "linux-source-$version"
echo "unpacking $(ls linux-source-*.deb)"
dpkg-deb --fsys-tarfile linux-source-*.deb | tar -x --to-stdout "./usr/src/linux-source-$version.tar.xz" |
  tar -xJ --exclude='*/Documentation/devicetree' --exclude='*/tools/testing'
cd "linux-source-$version"

make -s tinyconfig
scripts/kconfig/merge_config.sh -m .config ../kernel.config >/dev/null
make -s olddefconfig
# kconfig drops what has an unmet dependency without a word; what this version does not know at all is left out
grep -E '^(CONFIG_[A-Z0-9_]+=|# CONFIG_[A-Z0-9_]+ is not set)' ../kernel.config | while IFS= read -r line; do
  grep -qxF -- "$line" .config && continue
  if [[ $line == *' is not set' ]] && ! grep -q "${line:2:-11}=" .config; then continue; fi
  name=${line#'# '} name=${name%%[= ]*}
  if ! grep -rqE --include='Kconfig*' "^(menu)?config ${name#CONFIG_}\$" .; then
    echo "linux $version has no $name"
    continue
  fi
  echo "kernel.config: '$line' does not hold in $version" >&2
  exit 1
done

nice -n 10 make -j"$(nproc)" KBUILD_BUILD_USER=node KBUILD_BUILD_HOST=node bzImage
cp arch/x86/boot/bzImage "$OUT"

#!/bin/bash
# The node's root file system: Debian trixie with the programs under test's reach, and the locked Python dependencies
# of the project for its Python. The project's own code is shared at run time, so that editing it rebuilds nothing.
#
# Leaves an erofs image in $OUT; `requirements.txt` (hashes included) is exported from uv.lock.
set -euo pipefail

packages=(python3 qemu-system-x86 qemu-utils virtiofsd dnsmasq-base crun runc iproute2 iputils-ping busybox-static
  numactl procps strace mount util-linux util-linux-extra kmod systemd dbus
  ovmf passt fio iperf3 e2fsprogs qemu-guest-agent pciutils containerd containernetworking-plugins iptables
  cloud-init openssh-server openssh-client netplan.io hwloc-nox)

echo "installing the project's locked dependencies for Python 3.13"
uv pip install -q --target site --python-version 3.13 --python-platform x86_64-unknown-linux-gnu \
  --only-binary :all: --require-hashes -r requirements.txt

# shellcheck disable=SC2016 # $1 is the root that mmdebstrap hands to its hooks
mmdebstrap --variant=essential --include="$(IFS=,; echo "${packages[*]}")" \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --customize-hook='mkdir -p "$1/usr/local/lib/python3.13/dist-packages" "$1/project" "$1/results"' \
  --customize-hook='tar -C site -c . | tar -C "$1/usr/local/lib/python3.13/dist-packages" -x --no-same-owner' \
  --customize-hook='chroot "$1" python3 -m compileall -q -j0 /usr/local/lib/python3.13/dist-packages' \
  --customize-hook='rm -rf "$1/usr/share/qemu/"*aarch64* "$1/usr/share/qemu/"*arm* "$1/var/lib/apt/lists"' \
  trixie root.tar http://deb.debian.org/debian

echo "packing the erofs image"
mkdir root
# device nodes belong to devtmpfs, and only root could unpack them
tar -C root -xf root.tar --exclude='./dev/*' --no-same-owner
mkfs.erofs --all-root --quiet "$OUT" root

#!/bin/bash
# containerd 2, runc and the CNI plugins of Debian forky, in $OUT: an erofs image, a disk of the emulated node, whose root file
# system is of Debian trixie and has the libraries that these programs need.
set -euo pipefail
# a mirror may be behind: what it has is signed all the same
mmdebstrap --variant=extract --aptopt='Acquire::Check-Valid-Until "false"' \
  --include=containerd,runc,containernetworking-plugins \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  forky root http://deb.debian.org/debian
mkdir -p kept/cni
cp root/usr/bin/{containerd,containerd-shim-runc-v2,ctr} root/usr/sbin/runc kept/
cp root/usr/lib/cni/* kept/cni/
mkfs.erofs --all-root --quiet "$OUT" kept

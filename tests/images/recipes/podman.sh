#!/bin/bash
# Podman of Debian trixie (Debian bookworm's has no quadlets) with all that it needs, unpacked and not installed. Leaves an
# erofs image in $OUT: a disk of the emulated node, whose root file system is of the same release.
set -euo pipefail
mmdebstrap --variant=extract --include=podman \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  trixie root http://deb.debian.org/debian
mkfs.erofs --quiet "$OUT" root

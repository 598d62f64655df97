#!/bin/bash
# Podman's generator of units, quadlet, of Debian trixie (Debian bookworm's podman has none), unpacked and not installed; it
# needs no more than the C library. Leaves it in $OUT.
set -euo pipefail
mmdebstrap --variant=extract --include=podman trixie root http://deb.debian.org/debian
cp root/usr/libexec/podman/quadlet "$OUT"

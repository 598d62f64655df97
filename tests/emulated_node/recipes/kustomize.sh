#!/bin/bash
# The program kustomize from Debian trixie, unpacked and not installed; it needs no more than the C library. Leaves it in $OUT.
set -euo pipefail
mmdebstrap --variant=extract --include=kustomize trixie root http://deb.debian.org/debian
cp root/usr/bin/kustomize "$OUT"

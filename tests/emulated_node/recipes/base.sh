#!/bin/bash
# Debian trixie as its slim container image has it: no manuals, no translations. Leaves a tar archive in $OUT.
set -euo pipefail
mmdebstrap --variant=minbase \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  trixie base.tar http://deb.debian.org/debian
mv base.tar "$OUT"

#!/bin/bash
# A clean Debian of the release in the file `release`, with Python and certificates, as an administrator finds it before
# instance-runner is installed. Leaves a tar archive in $OUT.
set -euo pipefail
mmdebstrap --variant=minbase --include=python3,ca-certificates "$(cat release)" clean.tar http://deb.debian.org/debian
mv clean.tar "$OUT"

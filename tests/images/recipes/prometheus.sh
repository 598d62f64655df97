#!/bin/bash
# Prometheus and promtool of Debian bookworm, unpacked and not installed: no daemon is started, no user made, and the C
# library of Debian 12 or later suffices. Leaves both in a tar archive, $OUT.
set -euo pipefail
mmdebstrap --variant=extract --include=prometheus bookworm root http://deb.debian.org/debian
tar -C root/usr/bin -cf "$OUT" prometheus promtool

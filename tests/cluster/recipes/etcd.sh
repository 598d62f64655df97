#!/bin/bash
# etcd of Debian forky, the program alone, in $OUT: it needs no library but the C library of Debian 12 or later.
set -euo pipefail
# a mirror may be behind: what it has is signed all the same
mmdebstrap --variant=extract --aptopt='Acquire::Check-Valid-Until "false"' \
  --include=etcd-server forky root http://deb.debian.org/debian
install -m 755 root/usr/bin/etcd "$OUT"

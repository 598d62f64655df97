#!/bin/bash
# QEMU of Debian trixie's backports and virtiofsd of trixie with the libraries that they need, unpacked and not installed, and
# the programs `qemu-system-x86_64` and `virtiofsd`, which run them on a host of any release. Leaves an erofs image in $OUT.
set -euo pipefail
mirror=http://deb.debian.org/debian
mmdebstrap --variant=extract --include=qemu-system-x86,virtiofsd \
  --aptopt='APT::Install-Recommends "false"' --aptopt='APT::Default-Release "trixie-backports"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  trixie root "deb $mirror trixie main" "deb $mirror trixie-backports main"
# the loader has the name of the program, which the kernel gives the process
install -D root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 root/loader/qemu-system-x86_64
cat >root/qemu-system-x86_64 <<'EOF'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
export QEMU_MODULE_DIR="$root/usr/lib/x86_64-linux-gnu/qemu"
exec "$root/loader/qemu-system-x86_64" --library-path "$root/usr/lib/x86_64-linux-gnu" \
  "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@"
EOF
install -D root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 root/loader/virtiofsd
cat >root/virtiofsd <<'EOF'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
exec "$root/loader/virtiofsd" --library-path "$root/usr/lib/x86_64-linux-gnu" "$root/usr/libexec/virtiofsd" "$@"
EOF
chmod 755 root root/qemu-system-x86_64 root/virtiofsd
rm -rf root/dev
mkfs.erofs --all-root --quiet "$OUT" root

#!/bin/bash
# A small cloud image as a distribution publishes them: Debian with its own kernel, GRUB for UEFI, cloud-init and sshd, on two
# partitions of a GPT. It speaks on its serial line, and nobody can log in before cloud-init has made a user.
#
# Leaves a qcow2 image, compressed, in $OUT.
set -euo pipefail

packages=(linux-image-cloud-amd64 initramfs-tools systemd-sysv udev dbus e2fsprogs kmod iproute2 login sudo
  grub-efi-amd64-bin grub-common cloud-init netplan.io openssh-server)
boot='insmod part_gpt
insmod ext2
search --label --set=root root
linux /vmlinuz root=LABEL=root ro console=ttyS0 quiet no_timer_check
initrd /initrd.img
boot'

# An emulated guest on a busy machine has its devices after more than a minute and a half.
patient='[Manager]\nDefaultDeviceTimeoutSec=15min\nDefaultTimeoutStartSec=15min\n'

# shellcheck disable=SC2016 # $1 is the root that mmdebstrap hands to its hooks
mmdebstrap --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --customize-hook='echo "LABEL=root / ext4 errors=remount-ro 0 1" >"$1/etc/fstab"' \
  --customize-hook='ln -sf /usr/lib/systemd/system/systemd-networkd.service "$1/etc/systemd/system/multi-user.target.wants/"' \
  --customize-hook="mkdir \"\$1/etc/systemd/system.conf.d\"; printf '$patient' >\"\$1/etc/systemd/system.conf.d/patient.conf\"" \
  --customize-hook="echo '$boot' >\"\$1/tmp/grub.cfg\"" \
  --customize-hook='chroot "$1" grub-mkstandalone -O x86_64-efi -o /tmp/BOOTX64.EFI --locales= --themes= --fonts= \
    boot/grub/grub.cfg=/tmp/grub.cfg' \
  --customize-hook='cp "$1/tmp/BOOTX64.EFI" .; rm -rf "$1/tmp/"* "$1/var/lib/apt/lists"' \
  --customize-hook='rm -f "$1/etc/machine-id" "$1/etc/ssh/"ssh_host_* "$1/etc/hostname"; touch "$1/etc/machine-id"' \
  trixie root.tar http://deb.debian.org/debian

mkdir root
tar -C root -xf root.tar --exclude='./dev/*'
truncate -s 2G disk
sfdisk -q disk <<'PARTITIONS'
label: gpt
start=2048, size=32M, type=U
type=L
PARTITIONS
truncate -s 32M esp
mkfs.vfat -n ESP esp >/dev/null
mmd -i esp ::/EFI ::/EFI/BOOT
mcopy -i esp BOOTX64.EFI ::/EFI/BOOT/BOOTX64.EFI
dd if=esp of=disk bs=1M seek=1 conv=notrunc,sparse status=none
mkfs.ext4 -q -L root -d root -E offset=$((33 << 20)) disk $(((2048 - 34) << 10))
qemu-img convert -c -O qcow2 disk "$OUT"

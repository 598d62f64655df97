#!/bin/bash
# A server's disk as Debian's cloud images are, in $OUT: Debian trixie with its cloud kernel, cloud-init and an SSH server, on a
# disk with an EFI system partition that UEFI boots from. What such an image does at its first boot is cloud-init's to say.
set -euo pipefail

packages=(linux-image-cloud-amd64 initramfs-tools zstd systemd-sysv dbus libpam-systemd udev netplan.io iproute2 cloud-init
  openssh-server sudo qemu-guest-agent systemd-boot-efi e2fsprogs cloud-guest-utils fdisk)
boot=efi-system-partition

# An initramfs with what finds the disk, and nothing else: each byte of it is read by the firmware.
mkdir -p initramfs/conf.d
printf 'MODULES=list\nCOMPRESS=zstd\n' >initramfs/conf.d/server
printf '%s\n' virtio_pci virtio_blk ext4 >initramfs/modules

# shellcheck disable=SC2016 # $1 is the root that mmdebstrap hands to its hooks
mmdebstrap --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
  --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" && cp initramfs/modules "$1/etc/initramfs-tools/" &&
    cp initramfs/conf.d/server "$1/etc/initramfs-tools/conf.d/"' \
  --customize-hook='echo "LABEL=root / ext4 defaults 0 1" >"$1/etc/fstab"' \
  --customize-hook='rm -f "$1"/etc/ssh/ssh_host_* && rm -rf "$1/var/lib/apt/lists" && : >"$1/etc/machine-id"' \
  trixie root.tar http://deb.debian.org/debian
mkdir root
tar -C root -xf root.tar --exclude='./dev/*' --numeric-owner

echo "making the EFI system partition"
mkdir -p "$boot/EFI/BOOT" "$boot/loader/entries"
cp root/usr/lib/systemd/boot/efi/systemd-bootx64.efi "$boot/EFI/BOOT/BOOTX64.EFI"
cp root/boot/vmlinuz-* "$boot/vmlinuz"
cp root/boot/initrd.img-* "$boot/initrd"
printf 'timeout 0\n' >"$boot/loader/loader.conf"
printf '%s\n' 'title Debian' 'linux /vmlinuz' 'initrd /initrd' \
  'options root=LABEL=root ro console=tty0 console=ttyS0,115200 no_timer_check' >"$boot/loader/entries/debian.conf"
rm -f root/boot/vmlinuz-* root/boot/initrd.img-*
truncate -s 96M boot.img
mkfs.vfat -n EFI boot.img >/dev/null
mcopy -s -i boot.img "$boot"/* ::

echo "making the root file system"
used=$(du -sm --apparent-size root | cut -f1)
truncate -s $((used + used / 2 + 128))M root.img
mkfs.ext4 -q -L root -d root root.img

# Partitions begin and end at whole MiB; one more at the end is for GPT's second table.
size=$(($(stat -c %s root.img) >> 20))
truncate -s $((1 + 96 + size + 1))M disk.img
printf 'label: gpt\nstart=1MiB, size=96MiB, type=uefi\nstart=97MiB, size=%sMiB, type=linux\n' "$size" | sfdisk -q disk.img
dd if=boot.img of=disk.img bs=1M seek=1 conv=notrunc,sparse status=none
dd if=root.img of=disk.img bs=1M seek=97 conv=notrunc,sparse status=none
mv disk.img "$OUT"

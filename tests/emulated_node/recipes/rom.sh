#!/bin/bash
# The ROM guest: assembles `rom.S` into a 64 KiB firmware image in $OUT.
set -euo pipefail

as --32 -o rom.o rom.S
ld -m elf_i386 --oformat=binary -Ttext=0 --entry=start -o "$OUT" rom.o
size=$(stat -c %s "$OUT")
[ "$size" = 65536 ] || { echo "the image has $size bytes instead of 65536" >&2; exit 1; }

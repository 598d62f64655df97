# A guest of 64 KiB without firmware or operating system that measures how long it was not run: it reads the time stamp
# counter in a loop for 2^DURATION ticks, counts the gaps between two readings, and prints them on the serial port.
#
#   as --32 [--defsym DURATION=35] -o jitter.o jitter.S && ld -m elf_i386 -Ttext 0 --oformat binary -o jitter.rom jitter.o
#
#   jitter begin
#   jitter 0000002a 00000003   three gaps of bucket 0x2a: an eighth of a power of two, see `bucket`
#   jitter longest 00012345    the longest gap, in ticks
#   jitter end
#
# It holds the interrupts off all the time, so that each gap is its host's.

.set COM1, 0x3f8
.set COUNTERS, 0x8000        # one of 32 bits for each bucket
.set BUCKETS, 256
.set END, 0x7800             # the time at which to stop: low, high
.ifndef DURATION
.set DURATION, 35            # some 12 s where the counter runs at 3 GHz
.endif

.code16
.globl _start
_start:
  cli
  cld
  ljmp $0xf000, $main

main:
  xor %ax, %ax
  mov %ax, %ss
  mov %ax, %ds
  mov %ax, %es
  mov $0x7000, %sp
  mov $COUNTERS, %di
  mov $BUCKETS, %cx
  xor %eax, %eax
  rep stosl
  mov $begin, %si
  call say

  rdtsc
  mov %eax, %esi             # edi:esi is the last reading
  mov %edx, %edi
  add $((1 << DURATION) & 0xffffffff), %eax
  adc $((1 << DURATION) >> 32), %edx
  mov %eax, END
  mov %edx, END + 4
  xor %ebp, %ebp             # the longest gap

read:
  rdtsc
  mov %eax, %ebx
  mov %edx, %ecx
  sub %esi, %eax
  sbb %edi, %edx
  mov %ebx, %esi
  mov %ecx, %edi
  jz 1f                      # a gap of more than 32 bits counts as 2^32 - 1
  mov $0xffffffff, %eax
1:
  cmp %ebp, %eax
  jbe bucket
  mov %eax, %ebp
bucket:                      # 8 * n + m: from (8 + m) << (n - 3) on, where n is the highest bit
  or $8, %eax
  bsr %eax, %ecx
  mov %ecx, %ebx
  sub $3, %cl
  shr %cl, %eax
  and $7, %eax
  lea (%eax, %ebx, 8), %ebx
  shl $2, %ebx
  incl COUNTERS(%bx)
  cmp END + 4, %edi
  jb read
  ja done
  cmp END, %esi
  jb read

done:
  xor %bx, %bx
print:
  mov %bx, %di
  shl $2, %di
  mov COUNTERS(%di), %edx
  test %edx, %edx
  jz 1f
  push %edx
  mov $line, %si
  call say
  movzx %bx, %edx
  call say_number
  mov $' ', %al
  call say_letter
  pop %edx
  call say_number
  mov $'\n', %al
  call say_letter
1:
  inc %bx
  cmp $BUCKETS, %bx
  jb print
  mov $longest, %si
  call say
  mov %ebp, %edx
  call say_number
  mov $end, %si
  call say
2:
  hlt
  jmp 2b

say_number:                  # edx in hexadecimal digits; changes eax, cx
  mov $8, %cx
1:
  rol $4, %edx
  mov %dl, %al
  and $15, %al
  cmp $10, %al
  sbb $0x69, %al             # the digit's letter, without a branch (with das)
  das
  call say_letter
  loop 1b
  ret

say_letter:                  # al, once the port takes it: the reader of the console may be slow
  push %dx
  push %ax
  mov $(COM1 + 5), %dx       # the line status register; bit 5: empty
1:
  in %dx, %al
  test $0x20, %al
  jz 1b
  pop %ax
  mov $COM1, %dx
  out %al, %dx
  pop %dx
  ret

say:                         # the text at cs:si
  lodsb %cs:(%si), %al
  test %al, %al
  jz 1f
  call say_letter
  jmp say
1:
  ret

begin: .asciz "jitter begin\n"
line: .asciz "jitter "
longest: .asciz "jitter longest "
end: .asciz "\njitter end\n"

.org 0xfff0
  .byte 0xe9
  .word _start - (. + 2)
.org 0xffff
  .byte 0

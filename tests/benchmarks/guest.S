# A guest of 64 KiB without firmware or operating system, mapped as flash below 4 GiB: prints "guest up" on the serial port
# at its first instructions, sleeps, and powers off when the ACPI power button is pressed. With NO_BUTTON it
# ignores the button. It polls the button 18 times a second.
#
#   as --32 [--defsym NO_BUTTON=1] -o guest.o guest.S && ld -m elf_i386 -Ttext 0 --oformat binary -o guest.rom guest.o

.set COM1, 0x3f8
.set PM_BASE, 0x600          # where the power management registers of the ICH9 are put
.set PM1_STATUS, PM_BASE
.set PM1_ENABLE, PM_BASE + 2
.set PM1_CONTROL, PM_BASE + 4
.set POWER_BUTTON, 1 << 8
.set SLEEP_ENABLE, 1 << 13   # with sleep type 0: S5 on this machine
.set LAPIC, 0xfee00000

.code16
.globl _start
_start:
  cli
  cld
  ljmp $0xf000, $main

main:
  xor %ax, %ax
  mov %ax, %ss
  mov $0x7000, %sp
  mov $up, %si
  call say

  # A data segment of 4 GiB, kept when protected mode is left again, to reach the local APIC.
  lgdtl %cs:table
  mov %cr0, %eax
  or $1, %al
  mov %eax, %cr0
  mov $8, %bx
  mov %bx, %ds
  and $0xfe, %al
  mov %eax, %cr0
  ljmp $0xf000, $real
real:
  # Local APIC: on, and the old interrupt controller's requests pass through it (LINT0 = ExtINT).
  mov $(LAPIC + 0xf0), %ebx
  movl $0x1ff, %ds:(%ebx)
  mov $(LAPIC + 0x350), %ebx
  movl $0x700, %ds:(%ebx)
  xor %ax, %ax
  mov %ax, %ds

  # ICH9 (00:1f.0): PM base, ACPI registers on; then the button.
  mov $0x8000f840, %eax
  mov $(PM_BASE + 1), %ebx
  call write_pci
  mov $0x8000f844, %eax
  mov $0x80, %ebx
  call write_pci
.ifndef NO_BUTTON
  mov $PM1_ENABLE, %dx
  mov $POWER_BUTTON, %ax
  out %ax, %dx
.endif

  # Timer, 18.2 Hz, interrupt 8; every other interrupt is masked.
  movw $tick, 8 * 4
  movw $0xf000, 8 * 4 + 2
  mov $0x11, %al
  out %al, $0x20
  mov $8, %al
  out %al, $0x21
  mov $4, %al
  out %al, $0x21
  mov $1, %al
  out %al, $0x21
  mov $0xfe, %al
  out %al, $0x21
  mov $0xff, %al
  out %al, $0xa1
  mov $0x34, %al
  out %al, $0x43
  xor %al, %al
  out %al, $0x40
  out %al, $0x40
  sti

sleep:
  hlt
.ifndef NO_BUTTON
  mov $PM1_STATUS, %dx
  in %dx, %ax
  test $POWER_BUTTON, %ax
  jz sleep
  mov $PM1_CONTROL, %dx
  mov $SLEEP_ENABLE, %ax
  out %ax, %dx
  cli
.endif
  jmp sleep

tick:
  push %ax
  mov $0x20, %al
  out %al, $0x20
  pop %ax
  iret

write_pci:
  mov $0xcf8, %dx
  out %eax, %dx
  mov $0xcfc, %dx
  mov %ebx, %eax
  out %eax, %dx
  ret

say:
  mov $COM1, %dx
1:
  lodsb %cs:(%si), %al
  test %al, %al
  jz 2f
  out %al, %dx
  jmp 1b
2:
  ret

up: .asciz "guest up\n"

.balign 8
segments:
  .quad 0
  .quad 0x00cf92000000ffff
table:
  .word . - segments - 1
  .long 0xf0000 + segments

.org 0xfff0
  .byte 0xe9
  .word _start - (. + 2)
.org 0xffff
  .byte 0

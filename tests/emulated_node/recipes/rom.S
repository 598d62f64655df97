# The ROM guest: a machine for tests, complete in 64 KiB and up within milliseconds even where the CPU is emulated.
#
# Run it as `qemu-system-x86_64 -M q35 -bios rom.bin`. It says ROM-GUEST-UP on COM1, then halts until an interrupt:
#
#   ACPI power button       says ROM-GUEST-POWER-BUTTON and powers off (S5)
#   `q` received on COM1    powers off by itself
#   `r`                     resets the machine
#   `p`                     panics: raises the event of a `pvpanic-pci` device
#   `d`                     says ROM-GUEST-DEAF and ignores the power button from then on
#
# It stays in 16-bit real mode on the boot CPU; the other CPUs wait for a start-up IPI that never comes.
# References: Intel ICH9 datasheet 13.1 (LPC bridge, PMBASE, ACPI_CNTL), 13.8.3 (PM1 registers), 13.7.4 (reset control);
# 8259A and 16550 datasheets; Intel SDM volume 3, 11.5.1 (local vector table); QEMU docs/specs/pvpanic.rst.

.set COM1,       0x3f8
.set PIC1,       0x20
.set PIC2,       0xa0
.set PMBASE,     0x600
.set PM1_STS,    PMBASE + 0
.set PM1_EN,     PMBASE + 2
.set PM1_CNT,    PMBASE + 4
.set POWER_BUTTON, 0x100
.set SLEEP_S5,   0x2000               # SLP_EN, SLP_TYP 0
.set LPC,        0x8000f800           # configuration address of 00:1f.0
.set LOCAL_APIC, 0xfee00000
.set PVPANIC_ID, 0x00111b36
.set WINDOW,     0xd000               # segment of an address range that the chipset hands to PCI after reset
.set deaf,       0x500                # one byte of RAM

.code16
.globl start
start:
    cli
    xorw %ax, %ax
    movw %ax, %ss
    movw $0x7000, %sp
    movw %ax, %ds
    movb $0, deaf
    ljmp $0xf000, $begin              # leaves the reset vector's hidden code segment base

begin:
    # let the 8259 reach the CPU, as firmware does: local APIC on, its LINT0 in ExtINT mode; its registers lie at
    # 4 GiB - 18 MiB, so the data segment is given a 4 GiB limit by a short visit to protected mode
    lgdtl %cs:gdt_pointer
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    movw $8, %bx
    movw %bx, %ds
    andb $~1, %al
    movl %eax, %cr0
    addr32 movl $0x1ff, LOCAL_APIC + 0xf0
    addr32 movl $0x700, LOCAL_APIC + 0x350
    xorw %ax, %ax
    movw %ax, %ds

    # power management registers at PMBASE, then let the power button raise the SCI (IRQ 9)
    movl $LPC + 0x40, %eax
    movl $PMBASE + 1, %ebx
    call pci_write
    movl $LPC + 0x44, %eax
    movl $0x80, %ebx                  # ACPI_EN, SCI on IRQ 9
    call pci_write
    movw $PM1_EN, %dx
    movw $POWER_BUTTON, %ax
    outw %ax, %dx

    # interrupt vectors 0x24 (IRQ 4, COM1) and 0x29 (IRQ 9, SCI)
    movw $on_serial, 0x24 * 4
    movw $0xf000, 0x24 * 4 + 2
    movw $on_sci, 0x29 * 4
    movw $0xf000, 0x29 * 4 + 2
    movw $0x4d0 + 1, %dx              # the SCI is level triggered
    movb $0x02, %al
    outb %al, %dx
    movb $0x11, %al
    outb %al, $PIC1
    outb %al, $PIC2
    movb $0x20, %al
    outb %al, $PIC1 + 1
    movb $0x28, %al
    outb %al, $PIC2 + 1
    movb $0x04, %al
    outb %al, $PIC1 + 1
    movb $0x02, %al
    outb %al, $PIC2 + 1
    movb $0x01, %al
    outb %al, $PIC1 + 1
    outb %al, $PIC2 + 1
    movb $~0x14, %al                  # IRQ 4 and the cascade
    outb %al, $PIC1 + 1
    movb $~0x02, %al                  # IRQ 9
    outb %al, $PIC2 + 1

    movw $COM1 + 1, %dx               # interrupt on received data
    movb $0x01, %al
    outb %al, %dx
    movw $COM1 + 4, %dx               # DTR, RTS, and OUT2, which lets the interrupt out of the chip
    movb $0x0b, %al
    outb %al, %dx

    movw $up, %si
    call print
    sti
idle:
    hlt
    jmp idle

on_sci:
    movw $PM1_STS, %dx
    movw $POWER_BUTTON, %ax           # writing a one acknowledges
    outw %ax, %dx
    movb $0x20, %al
    outb %al, $PIC2
    outb %al, $PIC1
    testb $1, deaf
    jnz 1f
    movw $power_button, %si
    call print
power_off:
    movw $PM1_CNT, %dx
    movw $SLEEP_S5, %ax
    outw %ax, %dx
    cli
    hlt
1:  iret

on_serial:
    movb $0x20, %al
    outb %al, $PIC1
    movw $COM1 + 5, %dx               # anything received?
    inb %dx, %al
    testb $1, %al
    jz 1f
    movw $COM1, %dx
    inb %dx, %al
    cmpb $'q', %al
    je power_off
    cmpb $'r', %al
    je reset
    cmpb $'p', %al
    je panic
    cmpb $'d', %al
    jne on_serial
    movb $1, deaf
    movw $says_deaf, %si
    call print
    jmp on_serial
1:  iret

reset:
    movw $0xcf9, %dx
    movb $0x06, %al
    outb %al, %dx
    cli
    hlt

panic:                                # find the device, put its register into the window, set bit 0 (panicked)
    movl $0x80000000, %eax
1:  call pci_read
    cmpl $PVPANIC_ID, %ebx
    je 2f
    addl $0x800, %eax
    cmpl $0x80010000, %eax
    jb 1b
    jmp 3f
2:  addl $0x10, %eax
    movl $WINDOW << 4, %ebx
    call pci_write
    subl $0x0c, %eax
    movl $2, %ebx                     # memory space on
    call pci_write
    movw $WINDOW, %ax
    movw %ax, %es
    movb $1, %es:0
3:  cli
    hlt
    jmp 3b

pci_write:                            # configuration address in eax, value in ebx
    movw $0xcf8, %dx
    outl %eax, %dx
    pushl %eax
    movl %ebx, %eax
    movw $0xcfc, %dx
    outl %eax, %dx
    popl %eax
    ret

pci_read:                             # configuration address in eax, answer in ebx
    movw $0xcf8, %dx
    outl %eax, %dx
    pushl %eax
    movw $0xcfc, %dx
    inl %dx, %eax
    movl %eax, %ebx
    popl %eax
    ret

print:                                # zero-terminated text at cs:si
    movw $COM1, %dx
1:  lodsb %cs:(%si), %al
    testb %al, %al
    jz 2f
    outb %al, %dx
    jmp 1b
2:  ret

.align 8
gdt:
    .quad 0
    .quad 0x00cf92000000ffff          # flat 4 GiB data
gdt_pointer:
    .word . - gdt - 1
    .long 0xf0000 + gdt

up:           .asciz "ROM-GUEST-UP\n"
power_button: .asciz "ROM-GUEST-POWER-BUTTON\n"
says_deaf:    .asciz "ROM-GUEST-DEAF\n"

.org 0xfff0                           # where the CPU starts
    .byte 0xe9
    .word start - (. + 2)
.org 0xffff
    .byte 0

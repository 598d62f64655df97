# The trial guest: QEMU's `-kernel` starts it after the firmware (Multiboot 0.6.96, 3.1), as 32-bit code without paging. It
# enters 64-bit mode, exchanges 16 bytes of a page table, runs a loop, and ends QEMU through the device `isa-debug-exit`, whose exit status
# (value << 1 | 1) says that all of this worked. `TRIAL_GUEST` in trial_guest.py is this file, assembled:
#
#   as --32 -o trial_guest.o trial_guest.S && ld -m elf_i386 -Ttext 0x100000 --oformat binary -o trial_guest trial_guest.o
#
# Intel SDM volume 3, 9.8.5: "Initializing IA-32e Mode".

.set LOADED, 0x100000
.set TABLES, LOADED + 0x1000         # a page each: PML4, PDPT, page directory
.set DEBUG_EXIT, 0xf4
.set VALUE, 42                       # status 85
.set PAE, 1 << 5                     # CR4
.set PAGING, 1 << 31                 # CR0
.set EFER, 0xc0000080
.set LONG_MODE, 1 << 8
.set PRESENT, 3                      # and writable
.set LARGE_PAGE, 0x80                # 2 MiB
.set UNUSED, TABLES + 0x800          # zeros in a page table, so that KVM without nested paging emulates what writes there
.set CX16, 13                        # bit of CPUID.1:ECX

.code32
header:
  .long 0x1badb002, 1 << 16, -(0x1badb002 + (1 << 16))
  .long header, LOADED, end, TABLES + 0x3000, start

.globl _start
_start:
start:
  cld
  mov $TABLES, %edi
  xor %eax, %eax
  mov $0xc00, %ecx
  rep stosl
  movl $(TABLES + 0x1000 + PRESENT), TABLES
  movl $(TABLES + 0x2000 + PRESENT), TABLES + 0x1000
  movl $(LARGE_PAGE + PRESENT), TABLES + 0x2000
  mov %cr4, %eax
  or $PAE, %eax
  mov %eax, %cr4
  mov $TABLES, %eax
  mov %eax, %cr3
  mov $EFER, %ecx
  rdmsr
  or $LONG_MODE, %eax
  wrmsr
  mov %cr0, %eax
  or $PAGING, %eax
  mov %eax, %cr0
  lgdt table
  ljmp $8, $long

.code64
long:
  mov $1, %eax
  cpuid
  bt $CX16, %ecx
  jnc 3f
  mov $UNUSED, %edi
  xor %eax, %eax
  xor %edx, %edx
  xor %ebx, %ebx
  xor %ecx, %ecx
  lock cmpxchg16b (%rdi)             # Linux does so early, and a KVM that emulates it wrongly runs no Linux
3:
  mov $1000000, %ecx
1:
  dec %ecx
  jnz 1b
  mov $VALUE, %al
  out %al, $DEBUG_EXIT
2:
  hlt
  jmp 2b

.balign 8, 0 # not the assembler's own filling, which its versions choose differently
segments:
  .quad 0
  .quad 0x00209a0000000000           # 64-bit code
table:
  .word . - segments - 1
  .long segments
end:

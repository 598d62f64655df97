"""The bytes by which a kernel and a firmware are known, where none is booted."""

from __future__ import annotations

FAKE_KERNEL = bytes(0x202) + b"HdrS"
"""What makes a file a bzImage (``Documentation/arch/x86/boot.rst``)."""

FAKE_FIRMWARE = bytes(4080) + b"\xfa\xf4\xeb\xfd" * 4
"""One sector of flash, with code where a CPU starts: ``cli``, ``hlt``, and back."""

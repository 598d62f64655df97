"""The beginning of a kernel, where none is booted."""

from __future__ import annotations

FAKE_KERNEL = bytes(0x202) + b"HdrS"
"""What makes a file a bzImage (``Documentation/arch/x86/boot.rst``)."""

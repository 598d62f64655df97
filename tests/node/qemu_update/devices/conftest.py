"""The node's spare devices."""

from tests.node.devices.conftest import disks

__all__ = ["disks"]

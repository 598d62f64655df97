"""The descriptors of a network on the command line of QEMU."""

from __future__ import annotations

from runner.base.values import Fd, frozen


@frozen
class WireNumbers:
    """The descriptors of one network as QEMU inherits them: a tap (and a vhost-net) for each queue, or a stream socket."""

    taps: tuple[Fd, ...] = ()
    vhosts: tuple[Fd, ...] = ()
    stream: Fd | None = None

    def numbers(self) -> tuple[int, ...]:
        """Return every descriptor."""
        return (*self.taps, *self.vhosts, *(() if self.stream is None else (self.stream,)))

    def netdev(self) -> str:
        """Return the kind and properties of QEMU's ``-netdev``, without its id."""
        if self.stream is not None:
            return f"stream,server=off,addr.type=fd,addr.str={self.stream}"
        several = "s" if len(self.taps) > 1 else ""
        carried = f",vhost=on,vhostfd{several}={_colons(self.vhosts)}" if self.vhosts else ""
        return f"tap,fd{several}={_colons(self.taps)}{carried}"


def _colons(numbers: tuple[int, ...]) -> str:
    return ":".join(map(str, numbers))

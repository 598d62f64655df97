"""``instance-runner``, which prints on standard error when Python was up and when everything was imported."""

from __future__ import annotations

import sys
import time


def mark(name: str) -> None:
    print(f"mark {name} {time.time():.6f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    mark("interpreter")
    import runner.cli.run_instance  # noqa: F401 - what the program imports once it has read `run`
    from runner.__main__ import entry

    mark("imports")
    entry()

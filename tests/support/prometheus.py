"""A real Prometheus (Debian's), which tests start and ask."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs
import yaml

ADDRESS = "127.0.0.1:9090"
CLIENT = """
import json, sys, urllib.error, urllib.request
for line in sys.stdin:
    try:
        answer = urllib.request.urlopen("http://" + sys.argv[1] + json.loads(line), timeout=20)
    except urllib.error.URLError as error:
        if getattr(error, "code", 503) == 503:  # it does not listen yet, or has not opened its data base
            print(json.dumps({"status": "error", "error": str(error)}), flush=True)
            continue
        answer = error
    print(answer.read().decode().strip(), flush=True)
"""
"""Asks Prometheus for the path in each line, a JSON string, and prints each answer as a line."""


def unpacked(archive: str, directory: Path) -> Path:
    """Return *directory* with ``prometheus`` and ``promtool``, the content of the emulated node's artefact."""
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return directory


def promtool(programs: Path, *arguments: str | Path) -> str:
    """Return what ``promtool`` prints; it must succeed."""
    done = subprocess.run([programs / "promtool", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@attrs.frozen
class Prometheus:
    """One that runs."""

    client: subprocess.Popen[str]
    log: Path

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of its answer; all of the answer if that is an error."""
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        print(json.dumps(f"/api/v1/{path}?{urlencode(parameters)}"), file=self.client.stdin, flush=True)
        answer = json.loads(self.client.stdout.readline())
        return answer["data"] if answer["status"] == "success" else answer

    def result(self, expression: str) -> list[Any]:
        """Return the series that *expression* selects now; it must be one that Prometheus evaluates without error."""
        answer = self.ask("query", query=expression)
        assert answer.get("resultType") == "vector", (expression, answer)
        return list(answer["result"])

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        """Wait until *condition* is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.2)


@contextmanager
def prometheus(
    programs: Path, configuration: dict[str, Any], directory: Path, inside: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Hold a Prometheus with its files in *directory*; *inside* is the command that enters its network namespace, if not ours."""
    file, log = directory / "prometheus.yaml", directory / "prometheus.log"
    file.write_text(yaml.safe_dump(configuration))
    promtool(programs, "check", "config", file)
    argv = [*inside, str(programs / "prometheus"), f"--config.file={file}"]
    argv += [f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address={ADDRESS}"]
    client = [*inside, sys.executable, "-c", CLIENT, ADDRESS]
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, stdout=output, stderr=output) as process,
        subprocess.Popen(client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asked,
    ):
        try:
            yield Prometheus(asked, log)
        finally:
            asked.kill()
            process.terminate()

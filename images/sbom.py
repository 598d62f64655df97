#!/opt/instance-runner/bin/python -I
"""Write what an image contains as one CycloneDX 1.5 document: Python's packages as uv.lock has them, Debian's as dpkg does.

Usage: sbom.py PYTHON    a document of `uv export --format cyclonedx1.5`; prints it with the packages of this root file system
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

FIELDS = r"${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\n"


def component(name: str, version: str, architecture: str, source: str, source_version: str) -> dict[str, object]:
    """Return the component of a package; its URL names the source package, because flaws are filed under that."""
    called = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
    if (source, source_version) != (name, version):
        called += f"&upstream={quote(f'{source}@{source_version}', safe='')}"
    return {"type": "library", "bom-ref": called, "name": name, "version": version, "purl": called}


document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
listed = subprocess.run(["dpkg-query", "-W", "-f", FIELDS], check=True, capture_output=True, text=True).stdout
rows = [line.split("\t") for line in listed.splitlines()]
installed = {each.name.lower().replace("_", "-").replace(".", "-") for each in metadata.distributions()}
document["components"] = [
    each for each in document["components"] if each["name"] in installed
]  # not what Windows takes
document["components"] += [component(*fields) for status, *fields in rows if status.strip() == "ii"]
json.dump(document, sys.stdout)

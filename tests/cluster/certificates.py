"""The certificates of a cluster and the kubeconfig of each of its clients, made by the openssl of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import attrs

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")
DAYS = ("-days", "2")
CA_USAGE = ("basicConstraints=critical,CA:true", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
LEAF_USAGE = ("basicConstraints=critical,CA:false", "keyUsage=critical,digitalSignature")


@attrs.frozen
class Certificates:
    """A directory with ``<name>.crt`` and ``<name>.key`` for each name, and ``<name>.conf`` for each client."""

    directory: Path

    def __getitem__(self, file: str) -> str:
        """Return the path of a file."""
        return str(self.directory / file)

    def authority(self, name: str) -> None:
        """Make a certificate authority."""
        self._request(name, f"/CN={name}", *CA_USAGE)

    def issue(self, name: str, authority: str, subject: str, usage: str, names: str = "") -> None:
        """Make a certificate with extended key *usage* for *subject*; *names* are its alternative names (``IP:…,DNS:…``)."""
        extensions = [*LEAF_USAGE, f"extendedKeyUsage={usage}"]
        if names:
            extensions.append(f"subjectAltName={names}")
        self._request(
            name, subject, *extensions, signed=("-CA", self[f"{authority}.crt"], "-CAkey", self[f"{authority}.key"])
        )

    def _request(self, name: str, subject: str, *extensions: str, signed: tuple[str, ...] = ()) -> None:
        added = [word for each in extensions for word in ("-addext", each)]
        files = ("-keyout", self[f"{name}.key"], "-out", self[f"{name}.crt"])
        self._openssl("req", "-x509", *EC, *DAYS, "-subj", subject, *files, *added, *signed)

    def signing_key(self, name: str) -> None:
        """Make the key that signs the tokens of service accounts, ``<name>.key``, and its public half, ``<name>.pub``."""
        self._openssl("genrsa", "-out", self[f"{name}.key"], "2048")
        self._openssl("rsa", "-in", self[f"{name}.key"], "-pubout", "-out", self[f"{name}.pub"])

    def client(self, name: str, subject: str, server: str, directory: Path | None = None) -> None:
        """Make a client's certificate and kubeconfig; *directory* is where it finds its files, if not here."""
        self.issue(name, "ca", subject, "clientAuth")
        place = directory or self.directory
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": server, "certificate-authority": str(place / "ca.crt")}}],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(place / f"{name}.crt"),
                        "client-key": str(place / f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": name}}],
            "current-context": "it",
        }
        (self.directory / f"{name}.conf").write_text(json.dumps(configuration))

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

"""User-data of many forms, and whether cloud-init handles each: said here, and by the real cloud-init in `tests/node`."""

from __future__ import annotations

import base64
import bz2
import gzip

CONFIG = b"#cloud-config\nhostname: web\n"


def message(head: bytes, kind: bytes = b"text/cloud-config", body: bytes = CONFIG) -> bytes:
    """Return a MIME message of one part."""
    return (
        head
        + b'Content-Type: multipart/mixed; boundary="=="\n\n--==\nContent-Type: '
        + kind
        + b"\n\n"
        + body
        + b"\n--==--\n"
    )


VERSION = b"MIME-Version: 1.0\n"
HANDLED = {
    "cloud-config": CONFIG,
    "line ends of Windows": b"#cloud-config\r\nhostname: web\r\n",
    "capitals": b"#Cloud-Config\nhostname: web\n",
    "an empty line before it": b"\n\n" + CONFIG,
    "spaces before it": b"   " + CONFIG,
    "not YAML": b"#cloud-config\n: [\n",
    "cloud-config-archive": b"#cloud-config-archive\n- type: text/cloud-config\n  content: 'hostname: web'\n",
    "cloud-config-jsonp": b'#cloud-config-jsonp\n[{"op": "add", "path": "/hostname", "value": "web"}]\n',
    "not UTF-8": b"#cloud-config\nname: J\xf6rg\n",
    "script": b"#!/bin/sh\ntrue\n",
    "a script that is not UTF-8": b"#!/bin/sh\necho J\xf6rg\n",
    "boothook": b"#cloud-boothook\ntrue\n",
    "part-handler": b"#part-handler\ndef list_types(): return []\n",
    "jinja": b"## template: jinja\n" + CONFIG,
    "jinja with a capital": b"## Template: Jinja\n" + CONFIG,
    "gzip": gzip.compress(CONFIG),
    "gzip in two members": gzip.compress(CONFIG[:9]) + gzip.compress(CONFIG[9:]),
    "gzip of MIME": gzip.compress(message(VERSION)),
    "MIME": message(VERSION),
    "MIME, its version in lower case": message(VERSION.lower()),
    "MIME, another header first": message(b"X-Made-By: a program\n" + VERSION),
    "MIME, as a mailbox has it": message(b"From somebody Wed Nov 25 02:00:00 2026\n" + VERSION),
    "MIME, a plain part that begins as a script": message(VERSION, b"text/plain", b"#!/bin/sh\ntrue\n"),
    "MIME, a part in base64": message(
        VERSION, b"text/plain\nContent-Transfer-Encoding: base64", base64.encodebytes(CONFIG)
    ),
    "MIME, a compressed part": message(
        VERSION, b"application/gzip\nContent-Transfer-Encoding: base64", base64.encodebytes(gzip.compress(CONFIG))
    ),
    "MIME, a part of a kind of its own": message(VERSION, b"text/x-ours", b"hello"),
}
IGNORED = {
    "nothing": b"",
    "YAML without the header": b"hostname: web\n",
    "a comment before the header": b"# ours\n" + CONFIG,
    "a space in the header": b"# cloud-config\nhostname: web\n",
    "a byte order mark": b"\xef\xbb\xbf" + CONFIG,
    "two bytes a letter": CONFIG.decode().encode("utf-16"),
    "a URL's form": b"%23cloud-config%0Ahostname%3A%20web%0A",
    "base64": base64.b64encode(CONFIG),
    "base64 of gzip": base64.encodebytes(gzip.compress(CONFIG)),
    "another packer": bz2.compress(CONFIG),
    "a network's configuration": b"# ours\nnetwork:\n  version: 2\n",
    "Butane": b"variant: fcos\nversion: 1.5.0\n",
    "the marker of a YAML document": b"---\n" + CONFIG,
    "JSON of another program": b'{"ignition": {"version": "3.4.0"}}\n',
    "gzip of something else": gzip.compress(b"hostname: web\n"),
    "gzip, cut off": gzip.compress(CONFIG)[:-12],
    "gzip and more": gzip.compress(CONFIG) + b"more",
    "MIME without a version": message(b""),
    "a mailbox without MIME": b"From somebody Wed Nov 25 02:00:00 2026\nhostname: web\n",
    "MIME of plain text": message(VERSION, b"text/plain", b"hello"),
    "MIME, its version too far behind": message(b"X-Long: " + b"x" * 5000 + b"\n" + VERSION),
}
OTHER_READERS = {
    "PowerShell": b"#ps1_sysnative\nSet-TimeZone -Id UTC\n",
    "PowerShell, 32 bits": b"#ps1_x86\nSet-TimeZone -Id UTC\n",
    "PowerShell in a tag": b"<powershell>\nSet-TimeZone -Id UTC\n</powershell>\n",
    "cmd": b"rem cmd\necho hello\n",
    "Talos": b"version: v1alpha1\nmachine: {}\n",
    "Talos, a comment first": b"# ours\n---\nversion: v1alpha1\nmachine: {}\n",
}
"""Ignored by cloud-init, and taken by another reader of the seed."""

YAML_READ = {
    "a list of parts": b"#cloud-config-archive\n- type: text/cloud-config\n  content: 'hostname: web'\n- '#!/bin/sh'\n",
    "a repeated key": b"#cloud-config\nruncmd: [a]\nruncmd: [b]\n",
    "a repeated key in JSON": b'#cloud-config\n{"hostname": "a", "hostname": "b"}\n',
    "JSON after the header": b'#cloud-config\n{"hostname": "web"}\n',
    "a merge": b"#cloud-config\nx: &a {b: 1}\ny: {<<: *a, c: 2}\n",
    "bytes": b"#cloud-config\nwrite_files:\n- {path: /x, content: !!binary aGk=}\n",
}
YAML_NOT_READ = {
    "a tabulator": b"#cloud-config\nruncmd:\n\t- a\n",
    "two documents": b"#cloud-config\na: 1\n---\nb: 2\n",
    "a list": b"#cloud-config\n- a\n",
    "a list after an empty line and capitals": b"\n#Cloud-Config\n- a\n",
    "a mapping where parts are listed": b"#cloud-config-archive\ntype: text/cloud-config\n",
    "not UTF-8": b"#cloud-config\nname: J\xf6rg\n",
    "a tag of another program": b"#cloud-config\npassword: !vault x\n",
}
"""User-data in YAML by what it holds, which cloud-init reads, or gives up with an error in its log."""

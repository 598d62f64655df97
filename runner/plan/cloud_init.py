"""The NoCloud seed that cloud-init in the guest reads: a small CD image labelled CIDATA.

cloud-init's ``doc/rtd/reference/datasources/nocloud.rst`` lists its files, ``cloudinit/handlers/__init__.py`` the kinds of
user-data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from runner.base.values import frozen
from runner.facts.disk import DocumentFact
from runner.plan.problems import Problems
from runner.spec.instance import CloudInitSpec

LABEL = "CIDATA"

KINDS = (
    "#cloud-config",  # also #cloud-config-archive and #cloud-config-jsonp
    "#!",
    "#include",  # also #include-once
    "#cloud-boothook",
    "#part-handler",
    "## template: jinja",
    "text/x-shellscript-per-",
)
"""The first bytes, in lower case, of parts that cloud-init handles (``INCLUSION_TYPES_MAP`` of its ``handlers/__init__.py``).

tests/node/test_cloud_init.py compares this and the functions below with the real cloud-init.
"""
UNTYPED = frozenset({"text/plain", "text/x-not-multipart"})
"""Types of parts whose kind is determined by their first bytes, and that are ignored if those are unknown (``TYPE_NEEDED`` of
``user_data.py``)."""
COMPRESSED = frozenset(
    {"application/gzip", "application/gzip-compressed", "application/gzipped", "application/x-compress"}
    | {"application/x-compressed", "application/x-gunzip", "application/x-gzip", "application/x-gzip-compressed"}
)
"""Types of parts that are decompressed first (``DECOMP_TYPES``)."""
MIME_WITHIN = 4096
"""Bytes within which ``MIME-Version:`` makes user-data a MIME message (``convert_string``)."""
LARGEST_UNPACKED = 16 << 20
"""Bytes of decompressed user-data that are examined."""
LARGEST_MESSAGE = 256 << 10
"""Bytes of the largest MIME message that is examined; few clouds accept as much."""
MOST_NESTED, MOST_COMPARED, MOST_COUNTED = 200, 500_000, 1 << 29
"""Bounds of the MIME messages that are examined: nested parts; lines times boundaries; bytes times semicolons. The parser compares each
line with the boundaries of all enclosing parts, recurses with their nesting, and may count the quotation marks before each semicolon of a
header (``_parseparam`` of ``email/message.py``); 0.7 s at most (measured)."""

OTHER_READERS = {
    "cloudbase-init (Windows)": ("#ps1", "rem cmd", "<powershell>", "<script>"),
    "Talos": ("version: v1alpha1", "apiversion: v1alpha1"),
}
"""Other programs that read the seed → beginnings of user-data, in lower case, that they accept and cloud-init ignores."""
_LEADING = re.compile(r"(?:(?:#(?!ps1).*|---.*|[ \t]*)\n)++")
"""Lines that may precede the first words of a YAML document: comments, its marker, empty lines."""
_IGNITION = re.compile(r'\{\s*"ignition"|(?:#.*\n|---\n|\s)*+variant:')
"""The beginning of an Ignition configuration, and of one that Butane converts to it."""
_NETWORK = re.compile(r"(?:#.*\n|---\n|\s)*+network:")
_KEY = re.compile(r"(?:.+[ \t])?(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+[ \t]+AAAA[A-Za-z0-9+/]+={0,3}(?:[ \t].*)?")


class Secret:
    """Bytes that may contain a secret; a plan shows only their number."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"{len(self.content)} bytes, not shown"


@frozen
class SeedPlan:
    """The documents of the seed."""

    instance_id: str
    """A new one makes cloud-init run as on a first boot; empty if the user's meta-data contains it."""
    user_data: Secret
    meta_data: Secret
    network_config: Secret | None
    vendor_data: Secret | None = None
    """This program's own data for the guest; user-data takes precedence."""


def plan_seed(
    cloud_init: CloudInitSpec,
    identity: str,
    name: str,
    macs: Sequence[tuple[str, bool]],
    documents: Mapping[PurePosixPath, DocumentFact],
    problems: Problems,
) -> SeedPlan:
    """Plan the documents of the seed; *identity* is the instance id.

    *macs* are the MAC addresses of the networks, in their order, each with a flag for an IPv6 address.

    Without a network-config each network is configured by DHCP. It is matched by its MAC address, because the name of the
    interface depends on the guest's distribution.
    """

    def read(where: str, value: str | PurePosixPath | None) -> bytes | None:
        if not isinstance(value, PurePosixPath):
            return None if value is None else value.encode()
        fact = documents.get(value, DocumentFact(error="it was not read"))
        if fact.error is not None:
            problems.refuse(f"cloud_init.{where}", f"cannot read {str(value)!r}: {fact.error}")
            return None
        return fact.content

    user_data = read("user_data", cloud_init.user_data)
    if user_data is not None:
        check_user_data(user_data, problems)
    keys = [
        key
        for index, value in enumerate(cloud_init.ssh_keys)
        for key in read_keys(f"ssh_keys[{index}]", value, read(f"ssh_keys[{index}]", value), problems)
    ]
    meta_data = read("meta_data", cloud_init.meta_data)
    network_config = read("network_config", cloud_init.network_config)
    if network_config is None and macs:
        network_config = _plain(_by_dhcp(macs))
    if meta_data is not None:
        identity = ""
    else:
        hostname = cloud_init.hostname or name.replace("_", "-")
        known: dict[str, object] = {"instance-id": identity, "local-hostname": hostname}
        meta_data = _plain({**known, "public-keys": keys} if keys else known)
    return SeedPlan(
        identity,
        Secret(user_data if user_data is not None else b"#cloud-config\n"),
        Secret(meta_data),
        None if network_config is None else Secret(network_config),
    )


def _plain(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"  # JSON is YAML


def _by_dhcp(macs: Sequence[tuple[str, bool]]) -> dict[str, object]:
    # dnsmasq identifies the lease by the MAC address, so it has to be DHCP's client identifier.
    known = {"dhcp4": True, "dhcp-identifier": "mac"}
    six = {"dhcp6": True, "accept-ra": True}
    ethernets = {
        f"net{index}": {"match": {"macaddress": mac}, **known, **(six if ipv6 else {})}
        for index, (mac, ipv6) in enumerate(macs)
    }
    return {"version": 2, "ethernets": ethernets}


def check_user_data(content: bytes, problems: Problems) -> None:
    """Refuse user-data that cloud-init would ignore; user-data for another reader of the seed causes only a remark."""
    if handled(content):
        return
    first = content.partition(b"\n")[0][:40].decode(errors="replace")
    text = _text(content)
    begin = text if (leading := _LEADING.match(text)) is None else text[leading.end() :]
    reader = next((name for name, begins in OTHER_READERS.items() if begin.startswith(begins)), None)
    if reader is not None:
        problems.remark(
            "cloud_init.user_data",
            f"a guest with cloud-init ignores the user-data: it begins with {first!r}, which {reader} takes",
        )
        return
    problems.refuse(
        "cloud_init.user_data", f"begins with {first!r}, which cloud-init would ignore", next(_remedies(content))
    )


def _remedies(content: bytes) -> Iterator[str]:
    """Yield the changes that would make cloud-init accept *content*, the most likely one first."""
    from runner.facts.file_formats import identify  # here, because only a refusal needs it

    text, packed = _text(_unpacked(content)), identify(content)
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        yield "save it as UTF-8 without a byte order mark"
    if _is_base64(content):
        yield "it is base64, as a Secret or KubeVirt's userDataBase64 has it: give what `base64 -d` makes of it"
    if packed is not None and packed.kind == "packed" and packed.name != "gzip":
        yield f"it is packed by {packed.name}; cloud-init unpacks gzip alone"
    if _IGNITION.match(text):
        yield (
            "Ignition, of Fedora CoreOS and Flatcar, reads no such seed: write its configuration into the disk, with "
            "`coreos-installer install --ignition-file`"
        )
    if _NETWORK.match(text):
        yield "a configuration of the network is for cloud_init.network_config"
    if content.lstrip(b" \t\r\n#")[:12].lower() == b"cloud-config":
        yield "its first line must be '#cloud-config', without anything before it"
    if b"\n#cloud-config" in content or b"\n#!" in content:
        yield "the line '#cloud-config' or '#!…' must be its first"
    yield "begin it with '#cloud-config' or '#!/bin/sh'; a MIME message takes the header 'MIME-Version: 1.0'"


def _is_base64(content: bytes) -> bool:
    """Tell whether *content* is base64 of user-data that cloud-init handles."""
    import binascii  # here, because only a refusal needs it

    try:
        return re.fullmatch(rb"[A-Za-z0-9+/=\s]+", content) is not None and handled(binascii.a2b_base64(content))
    except ValueError:
        return False


def handled(content: bytes) -> bool:
    """Tell whether cloud-init handles a part of *content*, as its ``UserDataProcessor`` decides: gzip, MIME, then the first bytes.

    A MIME message that would take long to parse, or at which Python's parser fails, is assumed to be handled.
    """
    content = _unpacked(content)
    if b"mime-version:" not in content[:MIME_WITHIN].lower():
        return _text(content).startswith(KINDS)
    if _is_costly(content):
        return True
    from email import message_from_bytes  # here, because little user-data is MIME

    try:
        parts = (part for part in message_from_bytes(content).walk() if part.get_content_maintype() != "multipart")
        return any(_handled_part(part.get_content_type(), part.get_payload(decode=True)) for part in parts)
    except ValueError:  # a number of thousands of digits, or a NUL in the name of a character set
        return True


def _is_costly(message: bytes) -> bool:
    lower = message.lower()
    nested = lower.count(b"boundary") + lower.count(b"message/")
    lines = message.count(b"\n") + message.count(b"\r")
    compared, counted = (nested + 1) * lines, len(message) * message.count(b";")
    return len(message) > LARGEST_MESSAGE or nested > MOST_NESTED or compared > MOST_COMPARED or counted > MOST_COUNTED


def yaml_kind(content: bytes) -> type[object] | None:
    """Return the type of the single YAML document in user-data *content*; ``None`` if it is no such document to cloud-init.

    JSON patches (``#cloud-config-jsonp``) are applied to the other parts, and a template becomes YAML in the guest.
    """
    words = _text(content).split(maxsplit=1)
    return {"#cloud-config": dict, "#cloud-config-archive": list}.get(words[0]) if words else None


def _handled_part(kind: str, payload: object) -> bool:
    """Tell whether a part is handled; a part-handler among them may take any other kind."""
    content = payload if isinstance(payload, bytes) else b""
    if kind in COMPRESSED:
        return _text(_unpacked(content)).startswith(KINDS)
    return kind not in UNTYPED or _text(content).startswith(KINDS)


def _text(content: bytes) -> str:
    """Return *content* as the text whose beginning determines its kind; bytes that are not UTF-8 are kept."""
    return content.decode(errors="surrogateescape").lower().lstrip()


def _unpacked(content: bytes) -> bytes:
    """Return the decompressed *content*, or *content* itself if it is not compressed by gzip."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    import zlib  # here, because little user-data is compressed

    unpacked, rest = b"", content
    try:
        while rest and len(unpacked) < LARGEST_UNPACKED:
            member = zlib.decompressobj(wbits=31)  # a header of gzip (zlib's inflateInit2)
            unpacked += member.decompress(rest, LARGEST_UNPACKED - len(unpacked))
            rest = member.unused_data.lstrip(b"\0")
            if not member.eof and len(unpacked) < LARGEST_UNPACKED:
                return content  # it is truncated
    except zlib.error:
        return content
    return unpacked


def read_keys(where: str, value: str | PurePosixPath, content: bytes | None, problems: Problems) -> list[str]:
    """Return the public keys in *content*, the *value* of the spec's key *where*; refuse anything else."""
    if content is None:
        return []
    named = f"{str(value)!r} has " if isinstance(value, PurePosixPath) else "is "
    if b"PRIVATE KEY" in content:
        problems.refuse(
            f"cloud_init.{where}", f"{named}a private key, which must stay secret", "use the public one (….pub)"
        )
        return []
    text = content.decode(errors="replace")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    wrong = next((line for line in keys if _KEY.fullmatch(line) is None), None)
    if wrong is not None or not keys:
        what = "no public key" if wrong is None else f"{wrong[:40]!r}, which is no public key"
        problems.refuse(f"cloud_init.{where}", f"{named}{what}", "one looks like 'ssh-ed25519 AAAAC3… name'")
    return keys

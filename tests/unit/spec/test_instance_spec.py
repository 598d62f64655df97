from __future__ import annotations

import contextlib
import json
import time
import tomllib
import tracemalloc
from ipaddress import IPv4Network
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.spec.document_parser import parse_document
from runner.spec.instance import parse_elsewhere, parse_instance, private_subnet
from runner.spec.reference import reference
from runner.spec.rules import format_size

KERNEL = '[boot]\nkernel = "/k"\n'
FULL = """
[instance]
name = "web-1"
uuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
user = "nobody"
[cpu]
count = 4
cpus = "1-2,65-66"
placement = "affinity"
controller = "/run/controller.sock"
exclusive = "enforced"
sweep = false
pinning = "linear"
topology = "flat"
accel = "tcg"
model = "EPYC,-svm"
idle = "guest"
latency = "low"
cache_ways = 4
memory_bandwidth = 50
[memory]
size = "4GiB"
bind = false
hugepages = "2MiB"
prealloc = true
lock = true
shared = true
[boot]
kernel = "/boot/vmlinuz"
initrd = "/boot/initrd"
cmdline = "console=ttyS0"
firmware = "/usr/share/OVMF/OVMF_CODE.fd"
firmware_vars = "/var/lib/vars.fd"
[[disk]]
path = "/dev/vdb"
read_only = true
serial = "root"
[[disk]]
path = "/data.qcow2"
format = "qcow2"
backing = ["/images", "/more"]
cache = "none"
aio = "native"
discard = true
detect_zeroes = "unmap"
iothread = true
[[disk]]
path = "/golden"
ephemeral = true
ephemeral_size = "2GiB"
[[disk]]
fd = "disk0"
[hotplug]
disks = 2
cpus = 8
qemu = true
[[network]]
mode = "bridge"
interface = "net1"
mac = "52:54:00:00:00:01"
mtu = 1400
[[network]]
subnet = "10.1.2.0/30"
address = "10.1.2.2"
ipv6 = true
subnet6 = "fd00:77::/64"
queues = 2
[[network]]
mode = "descriptor"
fd = "net0,net1"
vhost_fd = "vhost0,vhost1"
[[network]]
mode = "passt"
ports = ["2222:22", "127.0.0.1/8080:80"]
[descriptors]
socket = "/run/agent.sock"
[[share]]
tag = "home"
path = "/home"
[[device]]
resource = "nvidia.com/GH100"
count = 2
iommu = "legacy"
properties = { x-nv-gpudirect-clique = 0, x-msix-relocation = "bar2" }
[[device]]
address = "0000:41:00.0"
rom = true
topology = "numa"
[[device]]
claim = "gpus"
request = "gpu"
[[device]]
variable = "SRIOVNETWORK_PCI_ADDRESSES"
[console]
stdout = false
log = "/var/log/console"
log_size = "1MiB"
[display]
vnc = true
[guest]
agent = false
clock = "localtime"
vsock = 3
watchdog = "nmi"
ready = "console:^debian login: $"
[cloud_init]
user_data = "#cloud-config"
network_config = "/etc/network"
meta_data = "instance-id: a"
[shutdown]
grace = 12.5
on_reboot = "exit"
poweroff_status = 0
[environment]
allow = []
"""


def problems(text: str, source: str = "spec.toml") -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_instance(source, text.encode())
    return [str(problem) for problem in caught.value.problems]


def test_two_lines_are_a_spec() -> None:
    spec = parse_instance("spec.toml", KERNEL.encode())
    assert (spec.cpu.count, spec.memory.size, spec.shutdown.grace, spec.disk) == (1, 512 << 20, 30.0, ())


def test_every_key_can_be_given() -> None:
    spec = parse_instance("spec.toml", FULL.encode())
    assert spec.instance.name == "web-1"
    assert spec.cpu.cpus == CpuSet([1, 2, 65, 66])
    assert (spec.cpu.pinning, spec.cpu.topology) == ("linear", "flat")
    assert (spec.cpu.latency, spec.cpu.cache_ways, spec.cpu.memory_bandwidth) == ("low", 4, 50)
    assert (spec.memory.size, spec.memory.bind) == (4 << 30, False)
    assert (spec.memory.page_size, spec.memory.prealloc, spec.memory.lock) == (2 << 20, True, True)
    assert spec.boot.initrd == PurePosixPath("/boot/initrd")
    assert [disk.format for disk in spec.disk] == ["raw", "qcow2", "raw", "raw"]
    assert spec.disk[1].backing == (PurePosixPath("/images"), PurePosixPath("/more"))
    assert (spec.disk[2].ephemeral_size, spec.hotplug.disks, spec.hotplug.qemu) == (2 << 30, 2, True)
    assert spec.hotplug.cpus == 8
    assert spec.network[1].subnet == IPv4Network("10.1.2.0/30")
    assert [str(each) for each in spec.network[3].forwards] == ["2222:22", "127.0.0.1/8080:80"]
    assert spec.device[0].properties == (("x-nv-gpudirect-clique", 0), ("x-msix-relocation", "bar2"))
    assert (spec.device[1].address, spec.device[1].rom) == ("0000:41:00.0", True)
    assert (spec.device[2].claim, spec.device[2].request) == ("gpus", "gpu")
    assert (spec.shutdown.grace, spec.shutdown.poweroff_status) == (12.5, 0)


def test_full_example_names_every_key_of_the_schema() -> None:
    """So that a key added to the schema is added to the example, and its parsing shown."""
    document = tomllib.loads(FULL)
    # keys that exclude others of the example
    elsewhere = {"share[].read_only", "cloud_init.ssh_keys", "cloud_init.hostname"}
    for name, *_ in reference():
        table_name, _, key = name.replace("[]", "").partition(".")
        tables = document[table_name] if isinstance(document[table_name], list) else [document[table_name]]
        assert any(key in table for table in tables) or name in elsewhere, name


def test_json_and_toml_give_the_same_spec() -> None:
    as_json = json.dumps(tomllib.loads(FULL))
    expected = parse_instance("spec.toml", FULL.encode())
    assert parse_instance("spec.json", as_json.encode()) == expected
    assert parse_instance("-", as_json.encode()) == expected


MISTAKES = [
    ("", "boot: there is nothing to boot; set boot.kernel or boot.firmware, or add a [[disk]]"),
    (
        KERNEL + "[guest]\nready = 'console:(a'\n",
        'guest.ready: found the string "(a", which is no regular expression: missing ), unterminated subpattern at position 0; it',
    ),
    (
        KERNEL + f"[guest]\nready = 'console:{'x' * 1001}'\n",
        "guest.ready: found a regular expression of 1001 characters, and 1000 are allowed; it takes",
    ),
    (KERNEL + '[guest]\nready = "console:"\n', 'guest.ready: found the string "console:"; it takes "agent"'),
    (KERNEL + '[guest]\nready = "port:65536"\n', "guest.ready: found the port 65536; it takes"),
    (KERNEL + '[guest]\nready = "boot"\n', 'guest.ready: found the string "boot"; it takes'),
    (
        KERNEL + '[guest]\nready = "agent"\nagent = false\n',
        'guest.ready: is "agent", but guest.agent = false; leave one of them out',
    ),
    (
        KERNEL + '[guest]\nready = "port:22"\n[[network]]\nmode = "bridge"\n',
        'guest.ready: names a port, and the runner can connect to the guest only in a network with mode = "private"; add such a',
    ),
    (KERNEL + '[guest]\nready = "port:22"\n', "guest.ready: names a port,"),
    (KERNEL + "[cpus]\n", "cpus: unknown key; did you mean 'cpu'?"),
    (
        '[[disk]]\npath = "/a"\nephemeral = true\nread_only = true\n',
        "disk[0].read_only: contradicts ephemeral = true, which never writes to path",
    ),
    ('[[disk]]\npath = "/a"\nephemeral = true\ncache = "none"\n', "disk[0].cache: contradicts ephemeral = true:"),
    ('[[disk]]\npath = "/a"\nephemeral_size = "1GiB"\n', "disk[0].ephemeral_size: needs ephemeral = true"),
    ('[[disk]]\npath = "/a"\nbacking = ["/b"]\n', 'disk[0].backing: needs format = "qcow2":'),
    ('[[disk]]\npath = "/a"\nbacking = "/b"\n', 'disk[0].backing: found the string "/b"; it takes an array of'),
    ('[[disk]]\npath = "/a"\nbacking = ["b"]\n', 'disk[0].backing: found the string "b"; it takes an array of'),
    (
        '[[disk]]\npath = "/a"\naio = "native"\ncache = "writeback"\n',
        'disk[0].aio: "native" needs cache = "none", not "writeback"',
    ),
    (
        '[[disk]]\npath = "/a"\ndetect_zeroes = "unmap"\ndiscard = false\n',
        'disk[0].detect_zeroes: "unmap" needs discard = true',
    ),
    (KERNEL + "[cpu]\ncounts = 2\n", "cpu.counts: unknown key; did you mean 'count'?"),
    (
        KERNEL + "[cpu]\nxyzzy = 2\n",
        (
            "cpu.xyzzy: unknown key; known here: count, cpus, placement, controller, exclusive, sweep, pinning, topology, accel, "
            "model, idle, latency, cache_ways, memory_bandwidth"
        ),
    ),
    (
        KERNEL + '[cpu]\ncount = "all"\ncpus = "1-2"\n',
        'cpu.count: "all" and cpu.cpus contradict each other; set it to 2',
    ),
    (
        KERNEL + '[cpu]\ncount = "2"\n',
        'cpu.count: found the string "2"; did you mean 2? It takes an integer from 1 to 1024',
    ),
    (KERNEL + '[cpu]\ncount = "2.5"\n', 'cpu.count: found the string "2.5"; it takes an integer from 1 to 1024'),
    (KERNEL + '[cpu]\ncount = "4096"\n', 'cpu.count: found the string "4096"; it takes an integer from 1 to 1024'),
    *(
        (f"{KERNEL}[cpu]\n{word} = 2\n", f"cpu.{word}: unknown key; did you mean 'count'?")
        for word in ("vcpus", "cores")
    ),
    *(
        (f"{KERNEL}{written}\n", f"{written.strip('[]')}: unknown key; did you mean {meant!r}?")
        for written, meant in (
            ("[ram]", "memory"),
            ("[[nic]]", "network"),
            ("[[gpu]]", "device"),
            ("[[drive]]", "disk"),
        )
    ),
    *(
        (
            f'{KERNEL}[shutdown]\ngrace = "{written}"\n',
            f'shutdown.grace: found the string "{written}"; {question} a number of seconds from 1 to 3600',
        )
        for written, question in (
            ("30s", "did you mean 30? It takes"),
            ("5 min", "did you mean 300? It takes"),
            ("2h", "it takes"),
            ("soon", "it takes"),
        )
    ),
    *(
        (
            f'{KERNEL}[[network]]\nmode = "{written}"\n',
            f'network[0].mode: found the string "{written}"; did you mean "passt"? It takes',
        )
        for written in ("user", "nat", "NAT")
    ),
    (
        KERNEL + '[memory]\nlock = "yes"\n',
        'memory.lock: found the string "yes"; did you mean true? It takes true or false',
    ),
    (KERNEL + "[cpu]\ncount = true\n", "cpu.count: found the boolean true; it takes an integer from 1 to 1024"),
    (KERNEL + "[cpu]\ncount = 0\n", "cpu.count: found the integer 0; it takes an integer from 1 to 1024"),
    (KERNEL + "[cpu]\ncount = 1.5\n", "cpu.count: found the number 1.5; it takes an integer from 1 to 1024"),
    (
        KERNEL + '[cpu]\naccel = "kwm"\n',
        'cpu.accel: found the string "kwm"; did you mean "kvm"? It takes one of "auto", "kvm", "tcg", "tried"',
    ),
    (KERNEL + '[cpu]\ncpus = "3-1"\n', "cpu.cpus: range '3-1' in '3-1' runs backwards; it takes CPUs"),
    (KERNEL + '[cpu]\ncount = 3\ncpus = "1-2"\n', "cpu.cpus: '1-2' are 2 CPUs, but cpu.count asks for 3 vCPUs"),
    *(
        (
            f"{KERNEL}[memory]\nsize = {written}\n",
            f'memory.size: found the {kind} {written}; did you mean "{meant}"? It takes a size in whole MiB, at least 32MiB',
        )
        for written, kind, meant in (
            ('"512M"', "string", "512MiB"),
            ('"2G"', "string", "2GiB"),
            ('"2GB"', "string", "2GiB"),
            ('"2 gib"', "string", "2GiB"),
            ('"1.5GiB"', "string", "1536MiB"),
            ('"8MiB"', "string", "32MiB"),
            ('"33000KiB"', "string", "32MiB"),
            ('"2048"', "string", "2GiB"),
            ("536870912", "integer", "512MiB"),
            ("4096", "integer", "4GiB"),
            ("4", "integer", "4GiB"),
            ('"limit"', "string", "limits"),
        )
    ),
    (KERNEL + '[memory]\nsize = "much"\n', 'memory.size: found the string "much"; it takes a size'),
    (KERNEL + "[memory]\nsize = true\n", "memory.size: found the boolean true; it takes a size"),
    *(
        (
            f'{KERNEL}[memory]\nhugepages = "{written}"\n',
            f'memory.hugepages: found the string "{written}"; {question} one of "2MiB", "1GiB"',
        )
        for written, question in (
            ("512KiB", "it takes"),
            ("2M", 'did you mean "2MiB"? It takes'),
            ("1GB", 'did you mean "1GiB"? It takes'),
        )
    ),
    (
        '[boot]\nfirmware = "uefy"\n',
        'boot.firmware: found the string "uefy"; did you mean "uefi"? It takes an absolute',
    ),
    (
        '[boot]\nfirmware = "OVMF"\n',
        'boot.firmware: found the string "OVMF"; did you mean "uefi"? It takes an absolute',
    ),
    (
        '[[disk]]\npath = "/a"\nfd = "a"\n',
        "disk[0].fd: path and fd are both given; leave one of them out",
    ),
    ("[[disk]]\n", "disk[0].path: is missing; a disk needs a path, or the fd that it is inherited as"),
    (
        KERNEL + '[[share]]\ntag = "t"\npath = "/a\\u001b[31m"\n',
        "share[0].path: found the string \"/a\\u001b[31m\" with the character '\\x1b'; it takes an absolute path",
    ),
    (KERNEL + '"\\u202eb\\n" = 1\n', "boot.\\u202eb\\n: unknown key"),
    (
        KERNEL.replace("/k", "${HOME}/k"),
        'boot.kernel: found the string "${HOME}/k"; add [environment] allow = ["HOME"], without',
    ),
    ('[boot]\ninitrd = "/i"\n[[disk]]\npath = "/d"\n', "boot.initrd: needs boot.kernel"),
    ('[boot]\ncmdline = "x"\n[[disk]]\npath = "/d"\n', "boot.cmdline: needs boot.kernel"),
    ('[boot]\nkernel = "k"\n', 'boot.kernel: found the string "k"; it takes an absolute path'),
    (
        '[boot]\nkernel = "/k"\ncmdline = "a\\nb"\n',
        "boot.cmdline: found the string \"a\\nb\" with the character '\\n'; it takes a string of one line",
    ),
    (KERNEL + '[[share]]\npath = "/a"\n', "share[0].tag: is missing; it takes up to 35 letters"),
    (KERNEL + '[[share]]\npath = "/a"\ntag = "a,b"\n', 'share[0].tag: found the string "a,b"'),
    (
        KERNEL + '[[share]]\npath="/a"\ntag="t"\n[[share]]\npath="/b"\ntag="t"\n',
        "share[1].tag: 't' is taken by share[0] already",
    ),
    (KERNEL + '[share]\npath = "/a"\n', "share: must be an array of tables ([[share]]), found a table"),
    ("boot = 3\n", "boot: must be a table, found the integer 3"),
    (
        KERNEL + '[[disk]]\npath="/d"\n[[disk]]\npath="/d"\n',
        "disk[1].path: '/d' is given twice and one of them is writable",
    ),
    (KERNEL + '[[network]]\nmac = "01:00:00:00:00:00"\n', "network[0].mac: found"),
    (KERNEL + '[[network]]\nmac = "00:00:00:00:00:00"\n', "network[0].mac: found"),
    *(
        (
            KERNEL + f'[[network]]\nsubnet="{each}"\n',
            f'network[0].subnet: found the string "{each}", whose addresses are no host',
        )
        for each in ("127.0.1.0/24", "0.0.0.0/0", "224.0.0.0/24", "240.0.0.0/8")
    ),
    *(
        (
            KERNEL + f'[[network]]\nipv6=true\nsubnet6="{each}"\n',
            f'network[0].subnet6: found the string "{each}", whose addresses are no host',
        )
        for each in ("fe80::/64", "ff02::/64", "::/64")
    ),
    (
        KERNEL + '[[network]]\nmode="passt"\nports=["22:22"]\n' * 2,
        "network[1].ports: gives 22 to two ports of the guest, with network[0]; leave one",
    ),
    (
        KERNEL + '[[network]]\nmode="passt"\nports=["127.0.0.1/22:22", "127.0.0.2/22:23", "22:24"]\n',
        "network[0].ports: gives 22 to two ports of the guest; leave one",
    ),
    (
        KERNEL + '[[network]]\nmode="passt"\nports=["20-25", "53/udp", 53, "23-30:123-130"]\n',
        "network[0].ports: gives 23 to two ports of the guest; leave one",
    ),
    (
        KERNEL + '[[network]]\nmode="passt"\nports=[22]\n[[network]]\nmode="passt"\nports="all"\n',
        "network[1].ports: gives 22 to two ports of the guest, with network[0]; leave one",
    ),
    (
        KERNEL + '[[network]]\nmode="bridge"\nsubnet="10.0.0.0/24"\n',
        'network[0].subnet: needs mode = "private"',
    ),
    (KERNEL + '[[network]]\ninterface="eth1"\n', 'network[0].interface: needs mode = "bridge"'),
    (
        KERNEL + '[[network]]\nsubnet="10.0.0.0/31"\n',
        'network[0].subnet: found the string "10.0.0.0/31", which has no room',
    ),
    (
        KERNEL + '[[network]]\nsubnet="10.0.0.1/24"\n',
        'network[0].subnet: found the string "10.0.0.1/24" (10.0.0.1/24 has host bits set)',
    ),
    (
        KERNEL + '[[network]]\nmode="bridge"\n[[network]]\nmode="bridge"\n',
        "network[1].interface: 'eth0' is taken by network[0] already",
    ),
    (
        KERNEL + '[[network]]\nsubnet="192.168.78.0/25"\n[[network]]\n',
        "network[1].subnet: 192.168.78.0/24 overlaps 192.168.78.0/25 of network[0]",
    ),
    (
        KERNEL + "[shutdown]\ngrace = 0\n",
        "shutdown.grace: found the integer 0; it takes a number of seconds from 1 to 3600",
    ),
    ("[boot\n", "cannot parse the document as TOML"),
    (
        KERNEL + "[cpu]\n[memory]\n[cpu]\n",
        "cannot parse the document as TOML: the table [cpu] is given twice (at line",
    ),
    (KERNEL + "[cpu]\ncount = 1\ncount = 2\n", "cannot parse the document as TOML: a key is given twice (at line"),
    ("\x00", "cannot parse the document as TOML"),
    (
        "# four vCPUs\ncpu:\n  count: 4\n",
        "cannot parse the document as TOML: 'cpu:' is YAML; write TOML, such as [cpu] and below it count = 4, or JSON",
    ),
    ("---\ncpu: {}\n", "cannot parse the document as TOML: '---' is YAML"),
    (
        "kind: Pod\napiVersion: v1\n",
        "cannot parse the document as TOML: it is a manifest of Kubernetes; name a spec, or",
    ),
    ("a = " + "[" * 20 + "]" * 20, "cannot parse the document: it has more than 16 levels of tables and arrays"),
    ("a = " + "[" * 5000, "cannot parse the document: it has more than 16 levels of tables and arrays"),
    (".".join("a" * 2000) + " = 1", "cannot parse the document: it has more than 16 levels of tables and arrays"),
    (".".join("a" * 500_000) + " = 1", "cannot parse the document: it has more than 16 levels of tables and arrays"),
    (
        "[" + " . ".join(["'a'", '"b\\""', "c"] * 6) + "]",
        "cannot parse the document: it has more than 16 levels of tables and arrays",
    ),
    ("[[disk]]\n" * 1025, "cannot parse the document: a table or an array in it has more than 1024 entries"),
    (f"a = {[1] * 1025}", "cannot parse the document: a table or an array in it has more than 1024 entries"),
    (
        "".join(f"k{number} = 1\n" for number in range(1025)),
        "cannot parse the document: a table or an array in it has more than 1024 entries",
    ),
    (
        "".join(f"[t{number}]\n" + "".join(f"k{key} = 1\n" for key in range(1000)) for number in range(17)),
        "cannot parse the document: it has more than 16384 entries in all",
    ),
    ("\ufeff[cpu]\n", "cannot parse the document: it begins with a byte-order mark; save it as UTF-8 without one"),
    ("#" * (1 << 20) + "\n", "cannot parse the document: it has more than 1MiB"),
]
"""Documents with one mistake each, and the beginning of its message."""


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_every_mistake_is_named_with_its_path(text: str, expected: str) -> None:
    assert [problem[: len(expected)] for problem in problems(text)] == [expected]


def test_the_values_of_variables_are_at_most_as_long_as_a_document() -> None:
    for name, value in (("A", "a" * 100_000), ("B", "b")):
        used = f"${{{name}}}" * (1 << 16)
        text = f'[environment]\nallow = ["{name}"]\n{KERNEL}cmdline = "{used}"\n'
        with pytest.raises(SpecError, match="environment: the values of its variables are more than 16384"):
            parse_instance("spec.toml", text.encode(), {name: value})


def test_a_string_is_at_most_as_long_as_an_argument_of_a_program() -> None:
    """The kernel refuses to execute QEMU with a longer one (``E2BIG``)."""
    longest = "x" * ((128 << 10) - 1)
    parse_instance("spec.toml", f'{KERNEL}cmdline = "{longest}"\n'.encode())
    [problem] = problems(f'{KERNEL}cmdline = "{longest}x"\n')
    assert problem.startswith("boot.cmdline: found a string of 131072 bytes, and 131071 are allowed; ")


@pytest.mark.parametrize(
    "text",
    [
        "a" * 300_000,
        '"""' + '\\"' * 100_000,
        '"\\' * 100_000,
        KERNEL
        + "".join(f'[[network]]\nmode="passt"\nports={[*range(at, at + 1000)]}\n' for at in range(1, 10_000, 1000)),
        KERNEL + '[[network]]\nsubnet="10.0.0.0/24"\n' * 600,
        KERNEL + f"[[disk]]\npath='/d'\nbacking={['/b'] * 40}\n" * 300,
    ],
    ids=["word", "string without an end", "strings without an end", "ports", "equal subnets", "many mistakes"],
)
def test_a_document_takes_a_time_in_proportion_to_its_length(text: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(SpecError):
        parse_instance("spec.toml", text.encode())
    assert time.process_time() - begun < 10  # a minute and more, where each part of it is compared with all the others


@pytest.mark.parametrize("before", ['"""a""""', '"""a"""""', "'''a''''"])
def test_a_deep_key_is_refused_before_it_is_parsed_whatever_is_before_it(before: str) -> None:
    tracemalloc.start()
    try:
        found = problems(f"x = {{a = {before}, {'.'.join('b' * 4000)} = 1, c = {before[0] * 2}}}")
        assert (tracemalloc.get_traced_memory()[1] < 8 << 20, found[0].partition(": ")[2][:19]) == (
            True,
            "it has more than 16",
        )
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"boot": {"kernel": "/k", "kernel": "/l"}}', 'the key "kernel" is repeated'),
        ('{"cpu": {"count": NaN}}', "NaN is not JSON"),
        ("[1]", "must be a table, found an array"),
        ('{"boot": ', "cannot parse the document as JSON"),
        ("[" * 100_000, "it has more than 16 levels of tables and arrays"),
        ('{"cpu": {"count": null}}', "cpu.count: found null"),
    ],
)
def test_json_has_mistakes_of_its_own(text: str, expected: str) -> None:
    assert any(expected in problem for problem in problems(text, "spec.json"))


def test_all_problems_are_reported_at_once() -> None:
    found = problems('[cpu]\ncount = 0\nfoo = 1\n[memory]\nsize = 3\n[[share]]\npath = "x"\n')
    assert [problem.split(":")[0] for problem in found] == [
        "cpu.foo",
        "cpu.count",
        "memory.size",
        "share[0].tag",
        "share[0].path",
    ]


def test_a_document_that_is_not_text() -> None:
    with pytest.raises(SpecError, match="not UTF-8 at byte 1"):
        parse_instance("spec.toml", b"a\xff")
    with pytest.raises(SpecError, match="it is UTF-16; save it as UTF-8"):
        parse_instance("spec.toml", KERNEL.encode("utf-16"))


def test_a_value_in_its_error_may_not_act_on_a_terminal() -> None:
    with pytest.raises(SpecError) as caught:
        parse_instance("\x1b[2Jspec.toml", b'[boot]\nkernel = "\\u202e\\u0085\\u001b]0;x\\u0007"\n')
    assert str(caught.value) == (
        '\\x1b[2Jspec.toml: boot.kernel: found the string "\\u202e\\x85\\u001b]0;x\\u0007"; it takes an absolute path'
    )


def test_private_networks_get_subnets_of_their_own() -> None:
    spec = parse_instance("spec.toml", (KERNEL + '[[network]]\n[[network]]\nmode="bridge"\n[[network]]\n').encode())
    subnets = [str(private_subnet(index, network)) for index, network in enumerate(spec.network)]
    assert (subnets[0], subnets[2]) == ("192.168.77.0/24", "192.168.79.0/24")


def test_reference_shows_every_default_as_it_is_written() -> None:
    rows = {name: (allowed, default) for name, allowed, default, _ in reference()}
    assert rows["memory.size"][1] == '"512MiB"'
    assert rows["share[].tag"][1] == "required"
    assert rows["boot.kernel"][1] == "-"
    assert rows["console.stdout"][1] == "true"
    assert rows["shutdown.grace"] == ("a number of seconds from 1 to 3600", "30")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cpu", "boot", "count", "path", "tag", "kernel", "x"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["instance", "cpu", "memory", "boot", "disk", "network", "share", "console", "shutdown", "x"]),
        json_values,
    )
)
def test_any_document_is_accepted_or_refused_with_a_message(document: dict[str, object]) -> None:
    try:
        spec = parse_instance("spec.json", json.dumps(document).encode())
    except SpecError as error:
        messages = [str(problem) for problem in error.problems]
    else:
        messages = [] if spec.cpu.count == "all" or spec.cpu.count >= 1 else [""]
    assert all(line and "\n" not in line for line in messages)


@given(st.integers(1, 1 << 20))
def test_sizes_are_printed_as_they_are_read(mebibytes: int) -> None:
    text = format_size(mebibytes << 20)
    if mebibytes >= 32:
        spec = parse_instance("spec.toml", f'{KERNEL}[memory]\nsize = "{text}"\n'.encode())
        assert spec.memory.size == mebibytes << 20


ENVIRONMENT = {"NODE_NAME": "n1", "POD_NAME": "web-1", "EMPTY": "", "OTHER": "secret", "PATH": "/usr/bin"}
DECLARED = '[environment]\nallow = ["POD_NAME", "NODE_NAME", "EMPTY"]\n'


def test_only_declared_variables_are_replaced_and_only_in_strings() -> None:
    text = """
[instance]
name = "${POD_NAME}"
[boot]
kernel = "/k/${NODE_NAME}/${POD_NAME}${EMPTY}"
cmdline = "a=$1 b=$$ c=$${NODE_NAME} d=${NODE_NAME}"
[[disk]]
path = "/disks/${POD_NAME}"
"""
    spec = parse_instance("spec.toml", (text + DECLARED).encode(), ENVIRONMENT)
    assert spec.instance.name == "web-1"
    assert spec.boot.kernel == PurePosixPath("/k/n1/web-1")
    assert spec.boot.cmdline == "a=$1 b=$$ c=${NODE_NAME} d=n1"
    assert spec.disk[0].path == PurePosixPath("/disks/web-1")


def test_without_the_table_a_dollar_means_nothing() -> None:
    spec = parse_instance("spec.toml", (KERNEL + 'cmdline = "${NODE_NAME} $${X}"\n').encode(), ENVIRONMENT)
    assert spec.boot.cmdline == "${NODE_NAME} $${X}"


@pytest.mark.parametrize(
    ("value", "name"),
    [("${OTHER}", "OTHER"), ("${NODE_NAM}", "NODE_NAM"), ("${}", ""), ("${node_name}", "node_name"), ("x${NODE_NAME", "NODE_NAME")],
)  # fmt: skip
def test_a_variable_that_is_not_declared_is_refused(value: str, name: str) -> None:
    text = f"{KERNEL}cmdline = {json.dumps(value)}\n{DECLARED}"
    if value.endswith("}"):
        with pytest.raises(SpecError) as caught:
            parse_instance("spec.toml", text.encode(), ENVIRONMENT)
        assert str(caught.value) == (
            f"spec.toml: boot.cmdline: ${{{name}}} is not declared; name it in environment.allow, or write $${{ for a literal one"
        )
    else:
        with pytest.raises(SpecError, match="is not closed"):
            parse_instance("spec.toml", text.encode(), ENVIRONMENT)


def test_a_declared_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        parse_instance("spec.toml", f'{KERNEL}[instance]\nname = "${{EMPTY}}"\n{DECLARED}'.encode(), {"EMPTY": "x"})
    assert [problem.path for problem in caught.value.problems] == ["environment.allow[0]", "environment.allow[1]"]
    assert "the environment has no POD_NAME; set it in the pod (env:, fieldRef:)" in str(caught.value)


def test_values_from_the_environment_are_checked_like_all_others() -> None:
    with pytest.raises(
        SpecError, match=r"instance.name: found the string \"a b\", which comes from \$\{EMPTY\}; it takes"
    ):
        parse_instance(
            "spec.toml",
            f'{KERNEL}[instance]\nname = "${{EMPTY}}"\n{DECLARED}'.encode(),
            {**ENVIRONMENT, "EMPTY": "a b"},
        )
    with pytest.raises(SpecError, match=r"cpu.count: found the string \"4\", which comes from"):  # in strings only
        parse_instance(
            "spec.toml", f'{KERNEL}[cpu]\ncount = "${{EMPTY}}"\n{DECLARED}'.encode(), {**ENVIRONMENT, "EMPTY": "4"}
        )
    assert problems(f'{KERNEL}[environment]\nallow = ["A-B"]\n')[0].startswith(
        'environment.allow: found the string "A-B"'
    )
    assert "twice" in problems(f'{KERNEL}[environment]\nallow = ["A", "A"]\n')[0]


def test_a_document_is_checked_where_its_variables_are_not_set() -> None:
    text = KERNEL + '[environment]\nallow = ["POD_UID", "POD_NAME"]\n[instance]\nname = "${POD_NAME}"\n'
    spec, unset = parse_elsewhere("spec.toml", text.encode(), {"POD_NAME": "web-1"})
    assert spec is not None
    assert (spec.instance.name, unset) == ("web-1", ("POD_UID",))
    uuid = text + 'uuid = "${POD_UID}"\n'
    assert parse_elsewhere("spec.toml", uuid.encode(), {}) == (None, ("POD_UID", "POD_NAME"))
    with pytest.raises(SpecError) as caught:
        parse_elsewhere("spec.toml", (uuid + "[cpu]\ncount = 0\n").encode(), {})
    assert [problem.path for problem in caught.value.problems] == ["cpu.count"]


def test_dots_in_strings_and_comments_make_no_levels() -> None:
    dots = ".".join("a" * 100)
    content = f'# {dots}\nbasic = "{dots} \\" {dots}"\nliteral = \'{dots}\'\nlong = """\n{dots} = 1 "\n"""\n'
    assert set(parse_document("spec.toml", content.encode())) == {"basic", "literal", "long"}
    assert parse_document("spec.toml", (".".join("a" * 16) + " = 1").encode())

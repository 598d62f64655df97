"""Plans of specs for hosts that are made up, or were recorded (``tests/data/hosts``)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.disk import FileFact, ImageFact
from runner.facts.file_formats import identify
from runner.facts.hardware import Hardware
from runner.facts.host import HostFacts, Kvm, Resolver, User, Virtiofsd
from runner.facts.network import Interface, Route
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import parse_instance
from tests.support.fake_kernel import FAKE_KERNEL

HOSTS = Path(__file__).parents[1] / "data" / "hosts"
GIB = 1 << 30


def recorded(name: str) -> Hardware:
    return Hardware.from_json((HOSTS / f"{name}.json").read_text())


POD = Interface(
    "eth0",
    "0a:58:0a:f4:01:05",
    1450,
    (IPv4Interface("10.244.1.5/32"),),
    (Route(IPv4Network("169.254.1.1/32")), Route(IPv4Network("0.0.0.0/0"), IPv4Address("169.254.1.1"))),
)
BZIMAGE = identify(FAKE_KERNEL)
FACTS = HostFacts(
    allowed_cpus=CpuSet(range(8)),
    hardware=recorded("vm-8"),
    memory_nodes=CpuSet([0]),
    memory=16 * GIB,
    state_directory=PurePosixPath("/run/instance-runner"),
    qemu=PurePosixPath("/usr/bin/qemu-system-x86_64"),
    dnsmasq=PurePosixPath("/usr/sbin/dnsmasq"),
    sleep=PurePosixPath("/usr/bin/sleep"),
    virtiofsd=Virtiofsd(PurePosixPath("/usr/libexec/virtiofsd"), rust=True, version=(1, 13, 2)),
    files={
        PurePosixPath("/boot/vmlinuz"): FileFact("file", 8 << 20, format=BZIMAGE),
        PurePosixPath("/boot/initrd"): FileFact("file", 8 << 20),
        PurePosixPath("/boot/private"): FileFact("file", 8 << 20, everyone_reads=False, format=BZIMAGE),
        PurePosixPath("/boot/unreadable"): FileFact("file", 8 << 20, "Permission denied"),
        PurePosixPath("/closed/kernel"): FileFact("other", error="Permission denied"),
        PurePosixPath("/OVMF.fd"): FileFact("file", 4 << 20),
        PurePosixPath("/vars.fd"): FileFact("file", 4 << 20),
        PurePosixPath("/usr/share/OVMF/OVMF_CODE_4M.secboot.fd"): FileFact("file", 3653632),
        PurePosixPath("/usr/share/OVMF/OVMF_VARS_4M.ms.fd"): FileFact("file", 540672),
        PurePosixPath("/disk"): FileFact("block", GIB, image=ImageFact("raw")),
        PurePosixPath("/d,isk.qcow2"): FileFact("file", GIB, image=ImageFact("qcow2")),
        PurePosixPath("/backed.qcow2"): FileFact(
            "file", GIB, image=ImageFact("qcow2", backing=PurePosixPath("/etc/shadow"))
        ),
        PurePosixPath("/4kn"): FileFact("block", GIB, image=ImageFact("raw", GIB), direct=True, sectors=(4096, 4096)),
        PurePosixPath("/raw"): FileFact("file", GIB, image=ImageFact("raw", GIB), direct=True),
        PurePosixPath("/sparse"): FileFact("file", GIB, image=ImageFact("raw", GIB), direct=True, sparse=True),
        PurePosixPath("/top"): FileFact(
            "file", 1 << 20, image=ImageFact("qcow2", GIB, PurePosixPath("/images/middle"), "qcow2"), direct=True
        ),
        PurePosixPath("/images/middle"): FileFact(
            "file", 1 << 20, image=ImageFact("qcow2", GIB, PurePosixPath("/images/golden/base"), "raw"), direct=True
        ),
        PurePosixPath("/images/golden/base"): FileFact("file", GIB, image=ImageFact("raw", GIB), direct=True),
        PurePosixPath("/images/round"): FileFact(
            "file", 1 << 20, image=ImageFact("qcow2", GIB, PurePosixPath("/images/round"), "qcow2")
        ),
        PurePosixPath("/images/no-backing-format"): FileFact(
            "file", 1 << 20, image=ImageFact("qcow2", GIB, PurePosixPath("/images/golden/base"))
        ),
        PurePosixPath("/images/lost"): FileFact(
            "file", 1 << 20, image=ImageFact("qcow2", GIB, PurePosixPath("/images/gone"), "raw")
        ),
        PurePosixPath("/encrypted"): FileFact("file", GIB, image=ImageFact("qcow2", GIB, error="is encrypted")),
        PurePosixPath("/locked"): FileFact("file", GIB, image=ImageFact("raw", locked=True)),
        PurePosixPath("/short"): FileFact("file", 700, image=ImageFact("raw")),
        PurePosixPath("/readonly"): FileFact("file", GIB, "Read-only file system"),
        PurePosixPath("/secret"): FileFact("file", GIB, "Permission denied", "Permission denied"),
        PurePosixPath("/dev/secret"): FileFact("block", 0, "Operation not permitted", "Operation not permitted"),
        PurePosixPath("/text"): FileFact("file", 100),
        PurePosixPath("/srv"): FileFact("directory"),
        PurePosixPath("/dev/null"): FileFact("character"),
    },
    users={"nobody": User("nobody", 65534, 65534), "dnsmasq": User("dnsmasq", 101, 65534)},
    kvm=Kvm(None, group_id=104, mode=0o660),
    vhost_net=True,
    vhost_vsock=True,
    passt=PurePosixPath("/usr/bin/passt"),
    interfaces={
        "eth0": POD,
        "net1": attrs.evolve(
            POD,
            name="net1",
            mac="0a:58:0a:f4:02:05",
            routes=(Route(IPv4Network("10.7.0.0/16")),),
            addresses6=(IPv6Interface("fd00:10::5/64"),),
            routes6=(Route(IPv6Network("::/0"), IPv6Address("fe80::1")),),
        ),
    },
    resolver=Resolver((IPv4Address("10.96.0.10"),), ("default.svc.cluster.local", "cluster.local")),
)
KERNEL = '[boot]\nkernel = "/boot/vmlinuz"\n'
EPYC = attrs.evolve(
    FACTS,
    allowed_cpus=CpuSet(range(128)),
    hardware=recorded("epyc-7543-2s-nps1"),
    memory_nodes=CpuSet([0, 1]),
    memory=256 * GIB,
    cpu_vendor="AuthenticAMD",
    qemu_version="10.0.2",
    address_bits=52,
)
NODE = attrs.evolve(
    EPYC,
    allowed_cpus=CpuSet.parse("2-3,10-11"),
    container_uid="3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    controller_error=None,
    delegation_error=None,
)


def plan_of(text: str, facts: HostFacts = FACTS) -> InstancePlan:
    return plan_instance("spec.toml", parse_instance("spec.toml", text.encode()), facts)


def problems(text: str, facts: HostFacts = FACTS) -> list[str]:
    with pytest.raises(SpecError) as caught:
        plan_of(text, facts)
    return [str(problem) for problem in caught.value.problems]

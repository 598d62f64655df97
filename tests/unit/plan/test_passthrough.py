"""Passthrough of PCI devices of recorded hosts: their selection, backend, place in the guest, and every refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest

from runner.base.errors import SpecError
from runner.facts.host import HostFacts, User
from runner.facts.memory_limits import MemoryLimits
from runner.facts.pci import Bar, DeviceNode, PciLink, VfioFacts
from runner.facts.roots import Roots
from runner.host.devices import read_claim
from runner.kernel.pci import read_pci_facts
from runner.plan.argv.by_hand import pasteable
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.guest_addresses import guest_address_bits, top_of_addresses
from runner.plan.instance import share_grace
from runner.plan.machine import Accel
from runner.plan.passthrough_planner import asked_devices, listed, resource_variables
from runner.plan.problems import Problems
from runner.plan.render import plan_json, plan_lines
from runner.spec.instance import parse_instance
from tests.support.fake_pci import Record, bar_window, fake_pci_tree, recorded_pci, vfio_facts
from tests.support.json_schemas import fitting
from tests.support.plans import EPYC, KERNEL, plan_of, problems
from tests.unit.plan.test_argv import GOLDEN, lines

GIB, MIB = 1 << 30, 1 << 20
HGX = recorded_pci("hgx-h100")
GPUS = [
    "0000:1b:00.0",
    "0000:43:00.0",
    "0000:52:00.0",
    "0000:61:00.0",
    "0000:9d:00.0",
    "0000:c3:00.0",
    "0000:d1:00.0",
    "0000:df:00.0",
]
GPU = GPUS[0]
GIVEN = {"PCI_RESOURCE_NVIDIA_COM_GH100": ",".join(GPUS)}
ON_BOTH = '[cpu]\ncount = 8\ncpus = "1-2,65-66,33-34,97-98"\n[memory]\nsize = "64GiB"\n'
ONE = f'[[device]]\naddress = "{GPU}"\n'


@pytest.fixture
def hgx(tmp_path: Path) -> HostFacts:
    """Return a host of two NUMA nodes with eight GPUs, for a QEMU that takes descriptors."""
    return host(tmp_path, HGX)


def host(root: Path, records: list[Record]) -> HostFacts:
    return attrs.evolve(EPYC, vfio=vfio_facts(root, records, environment=GIVEN))


def vfio_of(facts: HostFacts) -> VfioFacts:
    assert facts.vfio is not None
    return facts.vfio


def with_vfio(facts: HostFacts, **values: object) -> HostFacts:
    """Return *facts* with other *values* of VFIO's, or of the host's own."""
    own = {name: values.pop(name) for name in values.keys() - attrs.fields_dict(VfioFacts).keys()}
    return attrs.evolve(facts, vfio=attrs.evolve(vfio_of(facts), **values), **own)  # type: ignore[arg-type]


def with_gpu(facts: HostFacts, **values: object) -> HostFacts:
    gpu = attrs.evolve(vfio_of(facts).devices[GPU], **values)  # type: ignore[arg-type]
    return with_vfio(facts, devices={**vfio_of(facts).devices, GPU: gpu})


# -- selection


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PCI_RESOURCE_NVIDIA_COM_GH100": "0000:1b:00.0"}, ("0000:1b:00.0",)),
        ({"PCI_RESOURCE_NVIDIA_COM_GH100": "0000:1B:00.0,0000:43:00.0,"}, ("0000:1b:00.0", "0000:43:00.0")),
        ({"PCIDEVICE_NVIDIA_COM_GH100": "0000:1b:00.0, 0000:1b:00.0,,"}, ("0000:1b:00.0",)),
        (
            {
                "PCI_RESOURCE_NVIDIA_COM_GH100": "0000:1b:00.0",
                "PCIDEVICE_NVIDIA_COM_GH100": "0000:1b:00.0,0000:43:00.0",
            },
            ("0000:1b:00.0", "0000:43:00.0"),
        ),
        ({"PCI_RESOURCE_NVIDIA_COM_GH200": "0000:1b:00.0"}, ()),
    ],
)
def test_addresses_from_device_plugins_are_read(environment: Mapping[str, str], expected: tuple[str, ...]) -> None:
    assert listed(resource_variables("nvidia.com/GH100"), environment) == expected


def test_hyphens_of_a_resource_are_kept() -> None:
    variables = resource_variables("intel.com/sriov-net.a")
    assert listed(variables, {"PCIDEVICE_INTEL_COM_SRIOV-NET_A": "0000:01:10.0"}) == ("0000:01:10.0",)


def asked(
    text: str, environment: Mapping[str, str] = GIVEN, claims: Path = Path("/nowhere")
) -> tuple[list[str], list[str]]:
    spec = parse_instance("spec.toml", f"{KERNEL}{text}".encode())
    files = {each.claim: read_claim(claims, each.claim) for each in spec.device if each.claim is not None}
    problems = Problems()
    devices = asked_devices(spec.device, environment, files, {}, problems)
    return [each.address for each in devices], [str(problem) for problem in problems.found]


def test_a_resource_is_divided_among_the_devices_that_ask_for_it() -> None:
    text = f'[[device]]\nresource = "nvidia.com/GH100"\ncount = 2\n[[device]]\naddress = "{GPUS[1]}"\n'
    assert asked(text) == ([GPUS[0], GPUS[2], GPUS[1]], []), (
        "a device named by its address is not given to another table"
    )
    assert asked(text + '[[device]]\nresource = "nvidia.com/GH100"\n')[0] == [GPUS[0], GPUS[2], GPUS[1], *GPUS[3:]]


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (
            '[[device]]\nresource = "nvidia.com/GH100"\n',
            {},
            "device[0].resource: no device is given for it: neither of PCI_RESOURCE_NVIDIA_COM_GH100 and PCIDEVICE_NVIDIA_COM_GH100",
        ),
        (
            '[[device]]\nresource = "nvidia.com/A16"\n',
            {"MDEV_PCI_RESOURCE_NVIDIA_COM_A16": "b2f0"},
            "device[0].resource: MDEV_PCI_RESOURCE_NVIDIA_COM_A16 names mediated devices, which cannot be passed through; use whole",
        ),
        (
            '[[device]]\nresource = "a/b"\n',
            {"PCIDEVICE_A_B": "0000:1b:00"},
            "device[0].resource: the environment lists '0000:1b:00' for it, which is no PCI address",
        ),
        (
            '[[device]]\nresource = "nvidia.com/GH100"\ncount = 9\n',
            GIVEN,
            f"device[0].resource: asks for 9, but 8 are left of the 8 that were given ({', '.join(GPUS)}); ask for more",
        ),
        (
            '[[device]]\nresource = "nvidia.com/GH100"\n' * 2,
            GIVEN,
            "device[1].resource: asks for some, but 0 are left of the 8 that were given",
        ),
    ],
)
def test_a_resource_that_gives_nothing_is_refused(text: str, environment: Mapping[str, str], expected: str) -> None:
    _, [problem] = asked(text, environment)
    assert problem.startswith(expected)


# -- resource claims

CLAIMS = Path(__file__).parents[2] / "data" / "claims"
V = "metadata.resource.k8s.io/v1beta1"


def claimed(
    root: Path, claim: str, request: str = "gpu", *, kind: str = "resourceclaims", **attributes: object
) -> Path:
    """Write a driver's file about one device with *attributes*, and return the directory of all claims."""
    path = root / kind / claim / request / "gpu.example.com-metadata.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    device = {"driver": "gpu.example.com", "pool": "n", "name": f"{request}-0", "attributes": attributes}
    requests = [{"name": request, "devices": [device]}] if attributes else []
    path.write_text(json.dumps({"apiVersion": V, "kind": "DeviceMetadata", "requests": requests}))
    return root


def pci(address: str, **more: object) -> dict[str, Any]:
    return {"resource.kubernetes.io/pciBusID": {"string": address}, **more}


@pytest.mark.parametrize("claim", ["two-gpus", "gpus"])
def test_a_claim_gives_its_devices_by_request(claim: str) -> None:
    text = f'[[device]]\nclaim = "{claim}"\n'
    assert asked(text, {}, CLAIMS) == (["0000:1b:00.0", "0000:9d:00.0", "0000:43:00.0"], [])
    assert asked(f'{text}request = "spare"\n', {}, CLAIMS) == (["0000:43:00.0"], [])
    one = f'{text}request = "gpu"\ncount = 1\n'
    assert asked(one + text, {}, CLAIMS)[0] == ["0000:1b:00.0", "0000:9d:00.0", "0000:43:00.0"]
    by_address = '[[device]]\naddress = "0000:1b:00.0"\n'
    assert asked(one + by_address, {}, CLAIMS)[0] == ["0000:9d:00.0", "0000:1b:00.0"]


def test_a_device_of_several_requests_is_one_device(tmp_path: Path) -> None:
    claimed(tmp_path, "gpus", "first", **pci("0000:1B:00.0"))
    claimed(tmp_path, "gpus", "second", **pci("0000:1b:00.0"))
    assert asked('[[device]]\nclaim = "gpus"\n', {}, tmp_path) == (["0000:1b:00.0"], [])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            'request = "gpus"\n',
            "the container has no devices of its request 'gpus', but of gpu, spare; list the request",
        ),
        (
            "count = 4\n",
            "asks for 4, but 3 are left of the 3 that were given (0000:1b:00.0, 0000:9d:00.0, 0000:43:00.0); ask",
        ),
        ('[[device]]\nclaim = "gpus"\n', "asks for some, but 0 are left of the 3 that were given"),
    ],
)
def test_a_claim_that_gives_too_little_is_refused(more: str, expected: str) -> None:
    _, [problem] = asked(f'[[device]]\nclaim = "gpus"\n{more}', {}, CLAIMS)
    assert re.match(r"device\[[01]\]\.claim: ", problem)
    assert problem.partition(": ")[2].startswith(expected)


def test_a_claim_without_files_is_refused_with_what_writes_them() -> None:
    _, [problem] = asked('[[device]]\nclaim = "others"\n', {}, CLAIMS)
    assert problem.startswith(
        "device[0].claim: the container has no file about the devices of a claim 'others'; list the claim"
    )
    assert "device metadata (KEP-5304, Kubernetes 1.36)" in problem


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "gpu.example.com-metadata.json names no device; see the log of its driver"),
        (
            {"model": {"string": "H100"}, "resource.kubernetes.io/pcieRoot": {"string": "pci0000:16"}},
            (
                "does not say the PCI address of the device 'gpu-0' of the driver gpu.example.com (resource.kubernetes.io/pciBusID), "
                "and its attributes are model, resource.kubernetes.io/pcieRoot; name the request of the PCI devices in `request`, use"
            ),
        ),
        (
            {"gpu.example.com/mDevUUID": {"string": "b2f0"}},
            "the device 'gpu-0' of the driver gpu.example.com is a mediated device, which cannot be passed through; use whole",
        ),
        (
            pci("1b:00.0"),
            "says '1b:00.0' for the device 'gpu-0' of the driver gpu.example.com, which is no PCI address",
        ),
        (pci("../../0000:1b:00.0"), "says '../../0000:1b:00.0' for the device"),
    ],
)
def test_a_claim_whose_driver_does_not_say_an_address_is_refused(
    tmp_path: Path, attributes: dict[str, Any], expected: str
) -> None:
    claimed(tmp_path, "gpus", **attributes)
    _, [problem] = asked('[[device]]\nclaim = "gpus"\n', {}, tmp_path)
    assert problem.startswith("device[0].claim: ")
    assert expected in problem


def test_a_file_that_cannot_be_read_counts_where_its_request_is_asked_for(tmp_path: Path) -> None:
    claimed(tmp_path, "gpus", "gpu", **pci(GPU))
    file = claimed(tmp_path, "gpus", "nic", **pci(GPUS[1])) / "resourceclaims/gpus/nic/gpu.example.com-metadata.json"
    file.write_text("{")
    assert asked('[[device]]\nclaim = "gpus"\nrequest = "gpu"\n', {}, tmp_path) == ([GPU], [])
    _, [problem] = asked('[[device]]\nclaim = "gpus"\n', {}, tmp_path)
    assert problem.startswith(f"device[0].claim: {file}: it is no JSON: ")


def test_two_claims_of_one_name_are_refused(tmp_path: Path) -> None:
    claimed(tmp_path, "gpus", **pci(GPU))
    claimed(tmp_path, "gpus", kind="resourceclaimtemplates", **pci(GPUS[1]))
    _, [problem] = asked('[[device]]\nclaim = "gpus"\n', {}, tmp_path)
    both = f"{tmp_path}/resourceclaims/gpus and {tmp_path}/resourceclaimtemplates/gpus"
    assert problem == (
        f"device[0].claim: two claims have this name, {both}; give the entry with the template another name in the pod's "
        "resourceClaims"
    )


def test_a_variable_gives_the_addresses_that_a_driver_set_by_cdi() -> None:
    text = '[[device]]\nvariable = "SRIOVNETWORK_PCI_ADDRESSES"\n'
    given = {"SRIOVNETWORK_PCI_ADDRESSES": "0000:1B:00.0,0000:43:00.0"}
    assert asked(text, given) == (["0000:1b:00.0", "0000:43:00.0"], [])
    assert asked(f"{text}count = 1\n{text}", given) == (["0000:1b:00.0", "0000:43:00.0"], [])
    _, [problem] = asked(text, {})
    assert problem.startswith(
        "device[0].variable: the environment has no address in SRIOVNETWORK_PCI_ADDRESSES; list the"
    )
    _, [problem] = asked(text, {"SRIOVNETWORK_PCI_ADDRESSES": "/dev/vfio/3"})
    assert problem == "device[0].variable: the environment lists '/dev/vfio/3' for it, which is no PCI address"


def test_devices_of_a_claim_are_checked_as_all_others(hgx: HostFacts) -> None:
    facts = with_vfio(hgx, claims={"gpus": read_claim(CLAIMS, "gpus")})
    text = f'{KERNEL}[[device]]\nclaim = "gpus"\nrequest = "gpu"\n'
    passing = plan_of(text, facts).machine.passthrough
    assert [(each.address, each.host_numa_node) for each in passing.devices] == [
        ("0000:1b:00.0", 0),
        ("0000:9d:00.0", 1),
    ]
    [problem] = problems(text, with_gpu(facts, vfio=False, driver="nvidia"))
    assert problem.startswith(f"device[0]: {GPU} (10de:2330) is bound to 'nvidia', not to vfio-pci; bind it: driverctl")


@pytest.mark.parametrize(
    ("sysfs", "driver", "expected", "remark"),
    [
        (0, {"int": 0}, 0, False),
        (-1, {"int": 1}, 1, False),
        (-1, {"ints": [1, 0]}, 1, False),
        (-1, None, -1, True),
        (0, {"int": 1}, 0, True),
    ],
)
def test_the_driver_says_the_numa_node_where_the_firmware_does_not(
    hgx: HostFacts,
    tmp_path: Path,
    sysfs: int,
    driver: object,
    expected: int,
    remark: bool,  # noqa: FBT001
) -> None:
    more = {} if driver is None else {"resource.kubernetes.io/numaNode": driver}
    files = read_claim(claimed(tmp_path / "claims", "gpus", **pci(GPU, **more)), "gpus")
    facts = with_vfio(with_gpu(hgx, numa_node=sysfs), claims={"gpus": files})
    plan = plan_of(f'{KERNEL}{ON_BOTH}[[device]]\nclaim = "gpus"\n', facts)
    [device] = plan.machine.passthrough.devices
    assert device.host_numa_node == expected
    remarks = [
        each
        for each in map(str, plan.remarks)
        if "by the driver of the claim 'gpus'" in each or "does not report" in each
    ]
    assert bool(remarks) is remark


# -- refusals and backends


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"silent": True},
            f"device[0]: {GPU} (10de:2330) cannot be used: it does not answer: its configuration space reads as nothing but ones",
        ),
        (
            {"link": PciLink("Unknown", 0, "32.0 GT/s PCIe", 16)},
            f"device[0]: {GPU} (10de:2330) cannot be used: its PCI Express link is down; look at its slot and power; if it was a guest's",
        ),
        ({"group": None}, f"device[0]: {GPU} (10de:2330) has no IOMMU group, so the IOMMU is off; switch on VT-d"),
        (
            {"vfio": False, "driver": "nvidia"},
            f"device[0]: {GPU} (10de:2330) is bound to 'nvidia', not to vfio-pci; bind it: driverctl set-override {GPU} vfio-pci",
        ),
        ({"vfio": False, "driver": None}, f"device[0]: {GPU} (10de:2330) is bound to no driver; bind it: driverctl"),
        (
            {"group_node": DeviceNode(PurePosixPath("/dev/vfio/30"), "Device or resource busy", busy=True)},
            f"device[0]: {GPU} is in use: another process has /dev/vfio/30 open; end the other instance",
        ),
    ],
)
def test_a_device_that_cannot_be_passed_is_refused(hgx: HostFacts, values: dict[str, object], expected: str) -> None:
    [problem] = problems(KERNEL + ONE, with_gpu(hgx, **values))
    assert problem.startswith(expected)


def test_a_device_that_is_not_there_is_refused(hgx: HostFacts) -> None:
    [problem] = problems(KERNEL + '[[device]]\naddress = "0000:00:09.0"\n', hgx)
    assert problem == "device[0]: there is no PCI device 0000:00:09.0 here; `lspci -D` lists them"


def test_a_group_is_passed_whole_or_not_at_all(tmp_path: Path) -> None:
    sound = {
        **next(record for record in HGX if record["address"] == GPU),
        "address": "0000:1b:00.1",
        "driver": "snd_hda_intel",
    }
    facts = host(tmp_path, [*HGX, sound])
    [problem] = problems(KERNEL + ONE, facts)
    assert problem.startswith(
        f"device[0]: {GPU} shares its IOMMU group 30 with 0000:1b:00.1, which is bound to 'snd_hda_intel' and could reach"
    )
    assert problem.endswith("drivers_probe)")
    whole = plan_of(KERNEL + ONE, host(tmp_path / "bound", [*HGX, {**sound, "driver": "vfio-pci"}]))
    assert [device.address for device in whole.machine.passthrough.devices] == [GPU]


@pytest.mark.parametrize(
    ("iommu", "values", "gpu", "backend", "reason"),
    [
        ("auto", {}, {}, "iommufd", ""),
        ("legacy", {}, {}, "legacy", ""),
        ("auto", {"qemu_version": "7.2.22"}, {}, "legacy", ""),
        (
            "auto",
            {"qemu_version": "8.2.0"},
            {"group_node": None},
            "",
            "not by 'legacy': the kernel makes no nodes of IOMMU groups",
        ),
        ("iommufd", {"qemu_version": "8.2.0"}, {}, "", "not by 'iommufd': QEMU 8.2.0 is older than 9.0"),
        ("iommufd", {"qemu_version": ""}, {}, "", "not by 'iommufd': QEMU of unknown version is older than 9.0"),
        ("auto", {"iommufd": DeviceNode(PurePosixPath("/dev/iommu"), "No such file or directory")}, {}, "legacy", ""),
        ("auto", {}, {"device_node": None}, "legacy", ""),
        (
            "auto",
            {"container": DeviceNode(PurePosixPath("/dev/vfio/vfio"), "No such file or directory")},
            {"device_node": DeviceNode(PurePosixPath("/dev/vfio/devices/vfio1"), "Operation not permitted")},
            "",
            "not by 'iommufd': /dev/vfio/devices/vfio1: Operation not permitted; give the container the node",
        ),
        (
            "legacy",
            {},
            {"group_node": DeviceNode(PurePosixPath("/dev/vfio/30"), "Permission denied")},
            "",
            "not by 'legacy': /dev/vfio/30: Permission denied; let every user open it, on the node, by a rule of udev with MODE=",
        ),
        (
            "legacy",
            {},
            {"group_node": DeviceNode(PurePosixPath("/dev/vfio/30"), "Operation not permitted")},
            "",
            "not by 'legacy': /dev/vfio/30: Operation not permitted; give the container the node: by a device plugin's resource",
        ),
    ],
)
def test_the_vfio_backend_is_one_that_works(
    hgx: HostFacts, iommu: str, values: dict[str, object], gpu: dict[str, object], backend: str, reason: str
) -> None:
    text = f'{KERNEL}{ONE}iommu = "{iommu}"\n'
    facts = with_vfio(with_gpu(hgx, **gpu), **values)
    if reason:
        [problem] = problems(text, facts)
        assert problem.startswith(f"device[0].iommu: {GPU} cannot be passed through; ")
        assert reason in problem
        return
    passing = plan_of(text, facts).machine.passthrough
    assert [device.vfio_backend for device in passing.devices] == [backend]
    assert (passing.iommufd is not None) == (backend == "iommufd")


def test_all_devices_have_one_vfio_backend_so_that_ram_is_locked_once(hgx: HostFacts) -> None:
    two = f'{KERNEL}{ONE}[[device]]\naddress = "{GPUS[1]}"\n'
    backends = [
        device.vfio_backend for device in plan_of(two, with_gpu(hgx, device_node=None)).machine.passthrough.devices
    ]
    assert backends == ["legacy", "legacy"]
    backends = [device.vfio_backend for device in plan_of(two + 'iommu = "legacy"\n', hgx).machine.passthrough.devices]
    assert backends == ["legacy", "legacy"]


def test_gpus_with_a_peer_to_peer_clique_use_the_legacy_backend(hgx: HostFacts) -> None:
    text = f"{KERNEL}{ONE}properties = {{ x-nv-gpudirect-clique = 3 }}\n"
    [device] = plan_of(text, hgx).machine.passthrough.devices
    assert (device.vfio_backend, device.properties) == ("legacy", (("x-nv-gpudirect-clique", 3),))
    plan = plan_of(text + 'iommu = "iommufd"\n', hgx)
    assert any("no device can access another's memory" in remark for remark in map(str, plan.remarks))


@pytest.mark.parametrize(
    ("user", "everyone", "lent_to"), [("nobody", False, 65534), ("nobody", True, None), ("root", False, None)]
)
def test_a_group_node_is_lent_to_a_user_without_access(
    hgx: HostFacts,
    user: str,
    everyone: bool,  # noqa: FBT001
    lent_to: int | None,
) -> None:
    facts = with_gpu(hgx, group_node=DeviceNode(PurePosixPath("/dev/vfio/30"), everyone=everyone))
    facts = attrs.evolve(facts, users={**facts.users, "root": User("root", 0, 0)})
    text = f'[instance]\nuser = "{user}"\n{KERNEL}{ONE}iommu = "legacy"\n'
    [device] = plan_of(text, facts).machine.passthrough.devices
    assert device.lent_to == lent_to


@pytest.mark.parametrize(
    ("values", "user", "refused"),
    [
        ({}, "nobody", False),
        ({"lockable": 8 << 20}, "nobody", True),
        ({"lockable": (512 + 64) * MIB}, "nobody", False),
        ({"lockable": (512 + 64) * MIB - 1}, "nobody", True),
        ({"lockable": 8 << 20, "may_lock": True}, "nobody", True),
        ({"lockable": 8 << 20, "may_lock": True}, "root", False),
    ],
)
def test_ram_that_cannot_be_locked_is_refused(
    hgx: HostFacts,
    values: dict[str, Any],
    user: str,
    refused: bool,  # noqa: FBT001
) -> None:
    facts = attrs.evolve(hgx, limits=MemoryLimits(**values), users={**hgx.users, "root": User("root", 0, 0)})
    text = f'[instance]\nuser = "{user}"\n{KERNEL}{ONE}'
    if not refused:
        assert plan_of(text, facts).machine.lockable == (512 + 64) * MIB
        return
    [problem] = problems(text, facts)
    assert problem.startswith("device: 576 MiB may have to be locked, and RLIMIT_MEMLOCK is ")
    assert "KiB: the guest's RAM for VFIO ([[device]]); " in problem
    assert "LimitMEMLOCK=infinity" in problem


def test_memory_is_preallocated_before_it_is_mapped_for_devices(hgx: HostFacts) -> None:
    assert plan_of(KERNEL + ONE, hgx).machine.ram.preallocate
    [problem] = problems(f"{KERNEL}[memory]\nprealloc = false\n{ONE}", hgx)
    assert problem == "memory.prealloc: must not be false: VFIO locks all of it for [[device]]; leave it out"


def test_memory_locked_for_both_reasons_is_counted_twice(hgx: HostFacts) -> None:
    """VFIO's count is added to that of mlockall(2), which has counted the devices' regions as QEMU's addresses."""
    text = f"{KERNEL}[memory]\nlock = true\n{ONE}"
    regions = sum(bar.size for bar in vfio_of(hgx).devices[GPU].bars)
    needed = 2 * 512 * MIB + (512 + (1 + 4) * 80) * MIB + 64 * MIB + regions
    assert plan_of(text, hgx).machine.lockable == needed
    assert plan_of(text, attrs.evolve(hgx, limits=MemoryLimits(lockable=needed))).machine.ram.locked
    [problem] = problems(text, attrs.evolve(hgx, limits=MemoryLimits(lockable=needed - 1)))
    assert problem.startswith(f"memory.lock: {needed >> 20} MiB may have to be locked")
    assert "addresses (memory.lock) and the guest's RAM for VFIO ([[device]]); " in problem


def test_a_suboptimal_device_is_a_remark(hgx: HostFacts) -> None:
    link = vfio_of(hgx).devices[GPU].link
    assert link is not None
    for values, expected in (
        ({"resets": ""}, "cannot be reset by itself"),
        (
            {"link": attrs.evolve(link, width=8)},
            "its PCI Express link is 32.0 GT/s PCIe x8, its best is 32.0 GT/s PCIe x16; look",
        ),
        ({"link": attrs.evolve(link, speed="2.5 GT/s PCIe")}, "an idle GPU lowers its speed"),
        ({"numa_node": -1}, "the firmware does not report the NUMA node"),
        ({"numa_node": 1}, "is on the host's NUMA node 1, the vCPUs are on 0: every access goes farther"),
    ):
        remarks = plan_of(KERNEL + ONE, with_gpu(hgx, **values)).remarks
        assert sum(expected in remark for remark in map(str, remarks)) == 1, expected
    quiet = plan_of(KERNEL + ONE, hgx).remarks
    assert not any(GPU in remark for remark in map(str, quiet))


# -- the place in the guest


def test_eight_gpus_are_on_the_guest_numa_nodes_of_their_host_numa_nodes(hgx: HostFacts) -> None:
    plan = plan_of(KERNEL + ON_BOTH + '[[device]]\nresource = "nvidia.com/GH100"\n', hgx)
    passing = plan.machine.passthrough
    assert [device.address for device in passing.devices] == GPUS
    assert [device.bus for device in passing.devices] == ["pcie.1"] * 4 + ["pcie.2"] * 4
    assert [device.guest_numa_node for device in passing.devices] == [0] * 4 + [1] * 4
    # 128 GiB and 48 MiB more take 256 GiB behind each port: firmware puts nothing else into the rest.
    assert passing.window == 4096 * GIB
    descriptors = QemuFds(
        10,
        11,
        (12, 13),
        {"kernel": 20},
        guest_agent_channel=41,
        devices={**{gpu: 30 + n for n, gpu in enumerate(GPUS)}, "iommufd": 40},
    )
    text = lines(qemu_argv(plan.machine, descriptors))
    assert text == (GOLDEN / "eight-gpus.txt").read_text()
    assert set(range(30, 41)) - {38, 39} <= set(descriptors.numbers())
    text = "\n".join(plan_lines(plan))
    assert f"device {GPUS[7]} (10de:2330) by iommufd, on NUMA node 1, the guest's 1, 131120MiB of device memory" in text
    assert "4TiB of addresses for device memory" in text
    assert fitting("plan", plan_json(plan))["machine"]["passthrough"]["devices"][0]["address"] == GPU


def test_a_device_by_its_group_and_in_the_script(hgx: HostFacts) -> None:
    text = KERNEL + ON_BOTH + f'{ONE}iommu = "legacy"\nrom = true\nproperties = {{ x-no-mmap = true }}\n'
    plan = plan_of(text, hgx)
    argv = qemu_argv(plan.machine, QemuFds(10, 11, (12, 13), {"kernel": 20}))
    assert f"vfio-pci,id=device0,bus=port0,host={GPU},x-no-mmap=on" in argv
    assert not any("iommufd" in word for word in argv)
    assert f"host={GPU}" in pasteable(plan, None)
    assert "iommufd" not in pasteable(plan, None)
    assert "-object iommufd,id=iommufd0" in pasteable(plan_of(KERNEL + ONE, hgx), None)


def test_ovmf_gets_the_size_of_the_window(hgx: HostFacts) -> None:
    uefi = '[boot]\nfirmware = "/OVMF.fd"\n'
    argv = qemu_argv(
        plan_of(uefi + ONE, hgx).machine, QemuFds(1, 2, (3,), {"firmware": 4}, devices={GPU: 5, "iommufd": 6})
    )
    assert "name=opt/ovmf/X-PciMmio64Mb,string=524288" in argv
    assert "q35-pcihost.pci-hole64-size=549755813888" in argv


def test_a_guest_of_one_numa_node_has_its_devices_on_the_root(hgx: HostFacts) -> None:
    [device] = plan_of(KERNEL + ONE, hgx).machine.passthrough.devices
    assert (device.bus, device.host_numa_node, device.guest_numa_node) == ("pcie.0", 0, None)


def test_more_devices_than_a_bus_takes_are_refused(hgx: HostFacts) -> None:
    gpu = vfio_of(hgx).devices[GPU]
    small = {
        f"0000:{bus:02x}:00.0": attrs.evolve(gpu, address=f"0000:{bus:02x}:00.0", bars=(Bar(4096, high=False),))
        for bus in range(1, 32)
    }
    facts = with_vfio(hgx, devices=small, environment={"PCIDEVICE_A_B": ",".join(small)})
    for count, cpus, expected in (
        (23, "", None),
        (
            24,
            "",
            "hotplug.disks: the guest's root bus has 30 slots, and 31 are wanted: 24 devices, 4 for disks attached later (hotpl",
        ),
        (
            28,
            "",
            "the guest's root bus has 30 slots, and 35 are wanted: 28 devices, 4 for disks attached later (hotplug.disks), 1 for agent",
        ),
        (31, ON_BOTH, None),
    ):
        text = f'{KERNEL}{cpus}[[device]]\nresource = "a/b"\ncount = {count}\n'
        if expected is None:
            assert len(plan_of(text, facts).machine.passthrough.devices) == count
        else:
            [problem] = problems(text, facts)
            assert problem.startswith(expected)


# -- the window of addresses


@pytest.mark.parametrize(
    ("devices", "window"),
    [
        ([], 0),
        ([[Bar(16 * MIB, high=False)]], 0),
        ([[Bar(GIB, high=True)]], 2 * GIB),
        ([[Bar(GIB, high=True), Bar(MIB, high=True)]], 4 * GIB),
        ([[Bar(GIB, high=True)]] * 3, 4 * GIB),
        ([[Bar(256 * GIB, high=True), Bar(64 * MIB, high=True)]] * 8, 8192 * GIB),
    ],
)
def test_the_window_holds_every_port(devices: list[list[Bar]], window: int) -> None:
    assert bar_window(devices) == window


def test_where_the_window_ends() -> None:
    assert top_of_addresses(GIB, 32 * GIB, amd=False) == 64 * GIB
    assert top_of_addresses(64 * GIB, 32 * GIB, amd=False) == 128 * GIB
    assert top_of_addresses(64 * GIB, 2048 * GIB, amd=False) == 4096 * GIB
    assert top_of_addresses(1024 * GIB, 32 * GIB, amd=True) == (2048 + 32) * GIB, (
        "above what HyperTransport has reserved"
    )


@pytest.mark.parametrize(
    ("accel", "model", "bits"),
    [
        ("kvm", None, 46),
        ("kvm", "host,topoext=on", 46),
        ("kvm", "EPYC", 40),
        ("kvm", "EPYC,host-phys-bits=on", 46),
        ("kvm", "EPYC,phys-bits=48", 48),
        ("kvm", "host,host-phys-bits-limit=39", 39),
        ("kvm", "max,host-phys-bits-limit=60", 46),
        ("kvm", "host,host-phys-bits-limit=0", 46),
        ("kvm", "host,phys-bits=39", 46),
        ("kvm", "host,-host-phys-bits,phys-bits=39", 39),
        ("kvm", "host,host-phys-bits=off", 40),
        ("kvm", "EPYC,host_phys_bits=on,host_phys_bits_limit=0x2a", 42),
        ("kvm", "EPYC,host-phys-bits-limit=42", 40),
        ("tcg", None, 40),
        ("tcg", "max,host-phys-bits=on", 40),
        ("tcg", "max,phys-bits=46", 46),
    ],
)
def test_how_far_a_guest_can_address(accel: Accel, model: str | None, bits: int) -> None:
    assert guest_address_bits(accel, model, 46) == bits


def test_a_window_beyond_the_guests_addresses_is_refused(hgx: HostFacts) -> None:
    text = KERNEL + ON_BOTH + '[[device]]\nresource = "nvidia.com/GH100"\n'
    [problem] = problems(text, with_vfio(hgx, address_bits=39))
    assert problem.startswith(
        "device: the devices' memory needs a window of 4TiB above 64GiB of RAM, which ends at 8TiB, and the guest has "
        "39 address bits (512GiB); pass fewer devices, or under KVM "
    )
    for enough in (43, 0):  # 0: a kernel that does not report it
        assert plan_of(text, with_vfio(hgx, address_bits=enough)).machine.passthrough.window == 4096 * GIB


def test_the_time_to_release_devices_shortens_the_guests() -> None:
    assert share_grace(30, 10).power_down == 27
    assert share_grace(30, 10, 1).power_down == 20
    assert share_grace(30, 10, 8).power_down == pytest.approx(15), "half of it is the guest's"
    long = share_grace(120, 10, 8)
    assert (long.forced, long.devices_back) == (19, 5)
    for grace, devices in ((1, 1), (8, 16), (30, 1), (600, 8)):
        plan = share_grace(grace, 10, devices)
        assert plan.power_down + plan.forced + plan.devices_back == pytest.approx(grace), (
            "the grace includes every wait"
        )
        assert min(plan.quit, plan.devices_back) > 0


def test_facts_of_devices_are_asked_for_by_address(tmp_path: Path) -> None:
    fake_pci_tree(tmp_path, HGX)
    [found] = read_pci_facts([GPU, "0000:ff:00.0"], Roots.below(tmp_path)).values()
    assert found.group_node == DeviceNode(PurePosixPath(tmp_path / "dev/vfio/30"), None, busy=False, everyone=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[device]]\n", "device[0].address: is missing; a device needs an address, a resource, a claim or a variable"),
        (
            '[[device]]\nclaim = "a"\nresource = "a/b"\n',
            "device[0].claim: resource and claim are both given; leave one of them out",
        ),
        (f'{ONE}variable = "A"\n', "device[0].variable: address and variable are both given; leave one of them out"),
        (f'{ONE}request = "a"\n', "device[0].request: needs the claim whose request it is"),
        (
            '[[device]]\nclaim = "../a"\n',
            'device[0].claim: found the string "../a"; it takes the name of a resource claim',
        ),
        (f'{ONE}resource = "a/b"\n', "device[0].resource: address and resource are both given; leave one of them out"),
        (
            f"{ONE}count = 1\n",
            "device[0].count: needs a resource, a claim or a variable: an address names one device",
        ),
        (ONE + ONE, f"device[1].address: '{GPU}' is taken by device[0] already"),
        (
            f"{ONE}properties = {{ x-nv-gpudirect-cliqe = 1 }}\n",
            "device[0].properties: found the unknown 'x-nv-gpudirect-cliqe'; did you mean \"x-nv-gpudirect-clique\"? It takes",
        ),
        (
            f"{ONE}properties = {{ x-nv-gpudirect-clique = 16 }}\n",
            "device[0].properties: x-nv-gpudirect-clique: found the integer 16, where it takes an integer from 0 to 15; it takes",
        ),
        (
            f"{ONE}properties = 1\n",
            "device[0].properties: found the integer 1; it takes a table of x-nv-gpudirect-clique",
        ),
        ('[[device]]\naddress = "41:00.0"\n', 'device[0].address: found the string "41:00.0"; it takes a PCI address'),
    ],
)
def test_invalid_device_tables_are_refused(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_instance("spec.toml", (KERNEL + text).encode())
    assert [str(problem)[: len(expected)] for problem in caught.value.problems] == [expected]

"""A real Linux guest under the real program, from its first instruction to its last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program_runs import ProgramStarter

SHARE = '[[share]]\ntag = "share"\npath = "{}"\n'


def thread_ids(pid: int) -> list[str]:
    return [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()]


def shared(root: Path) -> tuple[str, Path]:
    directory = root / "shared"
    directory.mkdir()
    return SHARE.format(directory), directory


@pytest.mark.heart
def test_boot_dhcp_share_sigterm(start: ProgramStarter, tmp_path: Path) -> None:
    """Boot a guest with a network and a share, and stop it; only the console's log is left."""
    share, directory = shared(tmp_path)
    run = start("[[network]]\n" + share, "guest.word=xyzzy")
    run.until_done()
    receipt = json.loads((run.state / "receipt.json").read_text())
    threads = receipt["threads"]
    [vcpu] = [thread for thread in threads if thread["role"] == "vcpu"]
    assert vcpu["allowed_cpus"] == receipt["instance_cpus"]
    assert {thread["role"] for thread in threads} == {"runner", "anchor", "dnsmasq", "virtiofsd", "emulator", "vcpu"}
    if not receipt["shared"]:
        assert {thread["allowed_cpus"] for thread in threads if thread["role"] != "vcpu"} == {receipt["float_cpus"]}

    # The receipt agrees with the kernel, and QEMU is an unprivileged user.
    [qemu] = run.descendants()["qemu-system-x86"]
    status = Path(f"/proc/{qemu}/status").read_text()
    assert "Uid:\t0" not in status
    assert "Seccomp:\t2" in status
    masks = [Path(f"/proc/{qemu}/task/{tid}/status").read_text() for tid in thread_ids(qemu)]
    pinned = [text for text in masks if f"Cpus_allowed_list:\t{receipt['instance_cpus']}\n" in text]
    assert len(pinned) == (1 if not receipt["shared"] else len(masks))
    dnsmasq = Path(f"/proc/{run.descendants()['dnsmasq'][0]}/status").read_text()
    assert "Uid:\t0" not in dnsmasq

    assert run.stop() == 0, run.log
    assert "guest: address 192.168.77.2/24 mtu 1500 from 192.168.77.1" in run.console
    assert "guest: pings 192.168.77.1" in run.console
    assert "guest: power button" in run.console
    assert (directory / "word").read_text() == "xyzzy\n"
    assert run.termination_log() == {
        "version": 1,
        "status": 0,
        "outcome": "stopped",
        "detail": "the guest powered down when asked to",
        "faults": [],
        "problems": [],
    }
    assert [path.name for path in run.state.iterdir()] == ["console.log"]
    assert (run.state / "console.log").read_text() == run.console


CAPABILITIES = "chown dac_override fsetid fowner mknod net_raw setgid setuid setfcap setpcap net_bind_service sys_chroot kill audit_write"
"""What Docker gives a container by default."""


def test_the_capabilities_the_readme_names_are_enough(start: ProgramStarter, tmp_path: Path) -> None:
    share, directory = shared(tmp_path)
    bounding = ",".join(f"+{name}" for name in (*CAPABILITIES.split(), "net_admin", "sys_nice"))
    run = start(
        "[[network]]\n" + share,
        "guest.word=caps",
        inside=("setpriv", f"--bounding-set=-all,{bounding}", "--inh-caps=-all"),
    )
    run.until_done()
    assert "CapBnd:\t00000000a88" in Path(f"/proc/{run.pid()}/status").read_text(), (
        "only the capabilities above are in the bounding set"
    )
    assert "guest: address 192.168.77.2/24" in run.console
    assert (directory / "word").read_text() == "caps\n"
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


@pytest.fixture
def pod() -> Iterator[str]:
    """Make a pod's network namespace as CNI plugins do: a /32 address and a gateway outside of its subnet."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    for name in ("pod", "gateway"):
        ip("netns", "add", name)
    veth = ("type", "veth", "peer", "name", "gw0", "netns", "gateway")
    ip("-n", "pod", "link", "add", "eth0", "address", "0a:58:0a:f4:01:05", "mtu", "1450", *veth)
    ip("-n", "pod", "address", "add", "10.244.1.5/32", "dev", "eth0")
    ip("-n", "pod", "link", "set", "eth0", "up")
    ip("-n", "pod", "route", "add", "169.254.1.1", "dev", "eth0")
    ip("-n", "pod", "route", "add", "default", "via", "169.254.1.1", "dev", "eth0")
    ip("-n", "gateway", "link", "set", "gw0", "up")
    ip("-n", "gateway", "address", "add", "169.254.1.1/32", "dev", "gw0")
    ip("-n", "gateway", "route", "add", "10.244.1.5", "dev", "gw0")
    yield "pod"
    for name in ("pod", "gateway"):
        ip("netns", "delete", name)


def links(namespace: str) -> str:
    """Return the links, IPv4 addresses and routes of a namespace, without counters."""
    result = ""
    for what in ("link", "address", "route"):
        result += subprocess.run(
            ["ip", "-4", "-n", namespace, what, "show"], check=True, capture_output=True, text=True
        ).stdout
    return result


@pytest.mark.parametrize("end", ["sigterm", "sigkill"])
def test_the_guest_takes_the_pods_place(start: ProgramStarter, pod: str, end: str) -> None:
    before = links(pod)
    run = start('[[network]]\nmode = "bridge"\n', "", around=("ip", "netns", "exec", pod))
    run.until_done()
    assert "guest: address 10.244.1.5/32 mtu 1450" in run.console
    assert "guest: route default via 169.254.1.1 dev eth0" in run.console
    assert "guest: pings 169.254.1.1" in run.console
    assert "inet 10.244.1.5" not in links(pod)
    if end == "sigkill":
        # A killed runner gives nothing back; the next one in the same network namespace does.
        run.send(signal.SIGKILL)
        run.wait()
        assert links(pod) != before
        run = start('[[network]]\nmode = "bridge"\n', "guest.then=poweroff", around=("ip", "netns", "exec", pod))
        assert run.wait() == 10
        assert "guest: address 10.244.1.5/32 mtu 1450" in run.console
    else:
        assert run.stop() == 0
    assert links(pod) == before


@pytest.mark.parametrize(
    ("then", "spec", "status", "outcome"),
    [
        ("poweroff", "", 10, "guest_shutdown"),
        ("poweroff", "[shutdown]\npoweroff_status = 0\n", 0, "guest_shutdown"),
        ("reboot", '[shutdown]\non_reboot = "exit"\n', 11, "guest_reset"),
        ("panic", "", 12, "guest_panicked"),
    ],
)
def test_the_guest_ends_by_itself(start: ProgramStarter, then: str, spec: str, status: int, outcome: str) -> None:
    run = start(spec, f"guest.then={then}")
    assert run.wait() == status, run.log
    assert (run.termination_log()["status"], run.termination_log()["outcome"]) == (status, outcome)


def test_a_guest_that_reboots_goes_on_in_place(start: ProgramStarter) -> None:
    run = start("", "guest.then=reboot")
    run.until("the guest was reset reason=guest-reset", lambda: run.log)
    pid = run.descendants()["qemu-system-x86"]
    run.until("guest: done", lambda: run.console.partition("guest: done")[2])
    assert run.descendants()["qemu-system-x86"] == pid
    # After the request to stop, a reboot counts as the guest's power-down.
    assert run.stop() == 0


def test_a_guest_that_ignores_the_power_button_is_switched_off_in_time(start: ProgramStarter) -> None:
    run = start("[shutdown]\ngrace = 3\n", "guest.deaf")
    run.until_done()
    assert run.stop() == 13
    assert "did not power down within 2.7 s" in run.termination_log()["detail"]


def test_disks(start: ProgramStarter, tmp_path: Path) -> None:
    """A raw file, a qcow2 file and a read-only one, all through descriptors; QEMU's user may read none of them."""
    (tmp_path / "raw").write_bytes(b"RAW-DISK".ljust(1 << 20, b"\0"))
    (tmp_path / "ro").write_bytes(b"READ-ONLY".ljust(1 << 20, b"\0"))
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", tmp_path / "qcow2", "2M"], check=True)
    for name in ("raw", "qcow2", "ro"):
        (tmp_path / name).chmod(0o600)
    text = "".join(
        f'[[disk]]\npath = "{tmp_path / name}"\nformat = "{form}"\nread_only = {mode}\n'
        for name, form, mode in (("raw", "raw", "false"), ("qcow2", "qcow2", "false"), ("ro", "raw", "true"))
    )
    run = start(text)
    run.until_done()
    assert "guest: disk vda of 2048 sectors beginning with RAW-DISK" in run.console
    assert "guest: disk vdb of 4096 sectors" in run.console
    assert "guest: disk vdc of 2048 sectors beginning with READ-ONLY" in run.console

    # Another instance cannot have these disks now, except the one that both only read.
    second = start(text)
    assert second.wait() == 30
    assert f"disk[0].path: '{tmp_path / 'raw'}' is in use by another process" in second.log
    assert f"disk[1].path: '{tmp_path / 'qcow2'}' is in use by another process" in second.log
    assert "disk[2]" not in second.log
    assert run.stop() == 0


BOOT_SECTOR = bytes.fromhex("31c0 8ed8 be157c baf803 ac 84c0 7403 ee ebf8 f4 ebfd") + b"DISK BOOTED\r\n\0"
"""Puts its text on the first serial port, byte by byte, and halts."""


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_seabios_boots_the_first_disk(start: ProgramStarter, tmp_path: Path, form: str) -> None:
    (tmp_path / "raw").write_bytes(BOOT_SECTOR.ljust(510, b"\0") + b"\x55\xaa" + bytes(1 << 20))
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", form, tmp_path / "raw", tmp_path / "disk"], check=True)
    (tmp_path / "other").write_bytes(bytes(1 << 20))
    text = f'[[disk]]\npath = "{tmp_path}/disk"\nformat = "{form}"\n[[disk]]\npath = "{tmp_path}/other"\n[shutdown]\ngrace = 1\n'
    run = start(text, boot=False)
    run.until("DISK BOOTED", lambda: run.console)
    assert run.stop() == 13, "a boot sector does not react to the power button"


def test_an_image_that_takes_data_from_elsewhere_is_refused(start: ProgramStarter, tmp_path: Path) -> None:
    """The maker of an image could name any file of the host as its backing file or external data file."""
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    backing = ("-b", tmp_path / "secret", "-F", "raw")
    data = ("-o", f"data_file={tmp_path}/outside,data_file_raw=on")
    for name, options in (("backed", backing), ("split", data)):
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, tmp_path / name, "1M"], check=True)
        run = start(f'[[disk]]\npath = "{tmp_path}/{name}"\nformat = "qcow2"\n')
        assert run.wait() == 30
        assert f"disk[0].path: '{tmp_path}/{name}' takes data from" in run.log


def test_uefi(start: ProgramStarter, tmp_path: Path) -> None:
    firmware = next(
        path for path in map(Path, ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_CODE.fd")) if path.exists()
    )
    variables = tmp_path / "vars.fd"
    variables.write_bytes(Path(str(firmware).replace("CODE", "VARS")).read_bytes())
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    text = f'[boot]\nfirmware = "{firmware}"\nfirmware_vars = "{variables}"\n[[disk]]\npath = "{tmp_path}/disk"\n[shutdown]\ngrace = 1\n'
    run = start(text, boot=False)
    run.until("BdsDxe", lambda: run.console)
    assert run.stop() in {0, 13}
    assert variables.stat().st_size > 0


def test_more_vcpus_than_cpus_are_refused_and_as_many_share_them_with_a_warning(start: ProgramStarter) -> None:
    cpus = len(os.sched_getaffinity(0))
    run = start(f"[cpu]\ncount = {cpus + 1}\n")
    assert run.wait() == 30
    assert f"cpu.count: asks for {cpus + 1} vCPUs, but this process may use {cpus} CPUs" in run.log
    run = start(f"[cpu]\ncount = {cpus}\n")
    run.until_done()
    assert f"guest: up with {cpus} vCPUs" in run.console
    assert "all CPUs this process may use" in run.log
    assert run.stop() == 0


def test_the_script_to_paste_boots_the_same_machine(start: ProgramStarter, tmp_path: Path) -> None:
    for name in ("a,b", "c,d"):  # the guest may change no file that boots it
        (tmp_path / name).mkdir()
    (tmp_path / "a,b" / "kernel").write_bytes(start.guest.kernel.read_bytes())
    share = f'[[network]]\n[[share]]\ntag = "share"\npath = "{tmp_path}/c,d"\n'
    spec = start.spec(share, "guest.then=poweroff")
    spec.write_text(
        spec.read_text().replace(str(start.guest.kernel), f"{tmp_path}/a,b/kernel").replace('"console', '"-x; console')
    )
    script = subprocess.run(
        [
            Path(sys.executable).with_name("instance-runner"),
            "plan",
            "--show-argv",
            "--state-dir",
            tmp_path / "st",
            spec,
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (tmp_path / "by-hand.sh").write_text(script)
    result = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount-proc", "--net", "--kill-child", "sh", tmp_path / "by-hand.sh"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "guest: up with 1 vCPUs" in result.stdout, result.stderr
    assert result.returncode == 0

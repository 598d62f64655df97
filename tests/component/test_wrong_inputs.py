"""Wrong inputs as newcomers give them: each gets the answer that helps, its exit status, and nothing is touched.

The values are other programs' (libvirt, QEMU, Docker, compose files), other languages', other units, and what fingers do.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.base.errors import Status
from tests.support.fake_kernel import FAKE_KERNEL
from tests.support.program_runs import RUNNER

WHOLE = [
    ("", "boot: there is nothing to boot; set boot.kernel or boot.firmware, or add a [[disk]]"),
    ("boot", "cannot parse the document as TOML: "),
    ("[boot\n", "cannot parse the document as TOML: "),
    ("[boot]\nkernel = /k\n", "cannot parse the document as TOML: "),
    ('{"boot": {"kernel": "/k",}}', "cannot parse the document as JSON: "),
    ('{"boot": {"kernel": "/k"}', "cannot parse the document as JSON: "),
    ("[]", "cannot parse the document as TOML: "),
    ("null", "cannot parse the document as TOML: "),
    (
        "kernel: /k\nboot:\n  a: b\n",
        "cannot parse the document as TOML: 'kernel: /k' is YAML; write TOML, such as [cpu] and",
    ),
    ("\u00ff", "cannot decode the document: it is not UTF-8 at byte 0"),
    ("[boot]\nkernel = '/k\n", "cannot parse the document as TOML: "),
    ('[[disks]]\npath = "/d"\n', "disks: unknown key; did you mean 'disk'?"),
    ('[[disk]]\nfile = "/d"\n', "disk[0].file: unknown key; did you mean 'path'?"),
    ('[[disk]]\npath = "/d"\nreadonly = true\n', "disk[0].readonly: unknown key; did you mean 'read_only'?"),
    ('[[disk]]\npath = "/d"\ntype = "qcow2"\n', "disk[0].type: unknown key; did you mean 'format'?"),
    ('[[disk]]\npath = "/d"\nsize = "10GiB"\n', "disk[0].size: unknown key; known here"),
    ('[[disk]]\npath = "/d"\nbus = "virtio"\n', "disk[0].bus: unknown key; known here"),
    ('[boot]\nuefi = true\n[[disk]]\npath = "/d"\n', "boot.uefi: unknown key; did you mean 'firmware'?"),
    ('[boot]\nappend = "x"\nkernel = "/k"\n', "boot.append: unknown key; did you mean 'cmdline'?"),
    ('[boot]\ninitramfs = "/i"\nkernel = "/k"\n', "boot.initramfs: unknown key; did you mean 'initrd'?"),
    ('[boot]\nbios = "/b"\n[[disk]]\npath = "/d"\n', "boot.bios: unknown key; did you mean 'firmware'?"),
    ('[boot]\nkernel = "vmlinuz"\n', 'boot.kernel: found the string "vmlinuz"; it takes an absolute path'),
    ('[boot]\nkernel = "./vmlinuz"\n', 'boot.kernel: found the string "./vmlinuz"; it takes an absolute path'),
    ('[boot]\nkernel = "~/vmlinuz"\n', 'boot.kernel: found the string "~/vmlinuz"; it takes an absolute path'),
    ('[boot]\nkernel = ""\n', 'boot.kernel: found the string ""; it takes an absolute path'),
    ("[boot]\nkernel = 1\n", "boot.kernel: found the integer 1; it takes an absolute path"),
    (
        '[boot]\nfirmware = "ovmf"\n[[disk]]\npath = "/d"\n',
        'boot.firmware: found the string "ovmf"; did you mean "uefi"?',
    ),
    (
        '[boot]\nfirmware = "UEFI"\n[[disk]]\npath = "/d"\n',
        'boot.firmware: found the string "UEFI"; did you mean "uefi"?',
    ),
    ('[boot]\nfirmware = "bios"\n[[disk]]\npath = "/d"\n', 'boot.firmware: found the string "bios"; it takes'),
    (
        '[boot]\nfirmware = "efi"\n[[disk]]\npath = "/d"\n',
        'boot.firmware: found the string "efi"; did you mean "uefi"?',
    ),
    (
        '[boot]\nfirmware = "secure-boot"\n[[disk]]\npath = "/d"\n',
        'boot.firmware: found the string "secure-boot"; did you mean "uefi-secure"?',
    ),
    (
        '[boot]\ninitrd = "/i"\n[[disk]]\npath = "/d"\n',
        "boot.initrd: needs boot.kernel: only a kernel that QEMU starts directly uses it",
    ),
    (
        '[boot]\ncmdline = "x"\n[[disk]]\npath = "/d"\n',
        "boot.cmdline: needs boot.kernel: only a kernel that QEMU starts directly uses it",
    ),
    ('[boot]\nfirmware_vars = "/v"\n[[disk]]\npath = "/d"\n', "boot.firmware_vars: needs boot.firmware"),
    ("[[disk]]\n", "disk[0].path: is missing; a disk needs a path, or the fd that it is inherited as"),
    ('[[disk]]\npath = "disk.qcow2"\n', 'disk[0].path: found the string "disk.qcow2"; it takes an absolute path'),
    (
        '[[disk]]\npath = "/d"\nformat = "vmdk"\n',
        'disk[0].format: found the string "vmdk"; it takes one of "raw", "qcow2"',
    ),
    ('[[disk]]\npath = "/d"\nformat = "QCOW2"\n', 'disk[0].format: found the string "QCOW2"; did you mean "qcow2"?'),
    (
        '[[disk]]\npath = "/d"\nformat = "iso"\n',
        'disk[0].format: found the string "iso"; it takes one of "raw", "qcow2"',
    ),
    ('[[disk]]\npath = "/d"\nread_only = "true"\n', 'disk[0].read_only: found the string "true"; did you mean true?'),
    ('[[disk]]\npath = "/d"\ncache = "unsafe"\n', 'disk[0].cache: found the string "unsafe"; it takes'),
    ('[[disk]]\npath = "/d"\naio = "iouring"\n', 'disk[0].aio: found the string "iouring"; did you mean "io_uring"?'),
    ('[[disk]]\npath = "/d"\nserial = "a b"\n', 'disk[0].serial: found the string "a b"; it takes'),
    (
        '[[disk]]\npath = "/d"\nephemeral = true\nread_only = true\n',
        "disk[0].read_only: contradicts ephemeral = true, which never writes to path",
    ),
    ('[[disk]]\npath = "/d"\nephemeral_size = "1GiB"\n', "disk[0].ephemeral_size: needs ephemeral = true"),
    (
        '[[disk]]\npath = "/d"\nbacking = ["/b"]\n',
        'disk[0].backing: needs format = "qcow2": a raw image has no backing file',
    ),
    (
        '[[disk]]\npath = "/d"\nformat="qcow2"\nbacking = "/b"\n',
        'disk[0].backing: found the string "/b"; it takes an array of absolute paths',
    ),
    ('[[disk]]\npath = "/d"\n[[disk]]\npath = "/d"\n', "disk[1].path: '/d' is given twice and one of them is writable"),
    ('disk = "/d"\n', 'disk: must be an array of tables ([[disk]]), found the string "/d"'),
    ('disk = ["/d"]\n', 'disk[0]: must be a table, found the string "/d"'),
    (
        '[[disk]]\npath = "https://x/d.img"\n',
        'disk[0].path: found the string "https://x/d.img"; it takes an absolute path',
    ),
    (
        '[boot]\nkernel = "${HOME}/k"\n',
        'boot.kernel: found the string "${HOME}/k"; add [environment] allow = ["HOME"], without',
    ),
]
KERNEL = '[boot]\nkernel = "/k"\n'
WITH_KERNEL = [
    ('kernel = "/k"\n', "cannot parse the document as TOML: a key is given twice (at line 3, column 14)"),
    ("[boot]\n", "cannot parse the document as TOML: the table [boot] is given twice (at line 3, column 6)"),
    ("[vm]\n", "vm: unknown key; did you mean 'instance'?"),
    ("[kernel]\n", "kernel: unknown key; did you mean 'boot'?"),
    ("[cpus]\n", "cpus: unknown key; did you mean 'cpu'?"),
    ("[CPU]\n", "CPU: unknown key; did you mean 'cpu'?"),
    ("[cpu]\nvcpus = 2\n", "cpu.vcpus: unknown key; did you mean 'count'?"),
    ("[cpu]\ncores = 2\n", "cpu.cores: unknown key; did you mean 'count'?"),
    ("[cpu]\nCount = 2\n", "cpu.Count: unknown key; did you mean 'count'?"),
    ("[cpu]\nsockets = 2\n", "cpu.sockets: unknown key; did you mean 'topology'?"),
    ("[cpu]\nthreads = 2\n", "cpu.threads: unknown key; did you mean 'topology'?"),
    ("[cpu]\npinned = true\n", "cpu.pinned: unknown key; did you mean 'pinning'?"),
    ('[memory]\nram = "1GiB"\n', "memory.ram: unknown key; did you mean 'size'?"),
    ("[memory]\nhuge = true\n", "memory.huge: unknown key; did you mean 'hugepages'?"),
    ('[disk]\npath = "/d"\n', "disk: must be an array of tables ([[disk]]), found a table"),
    ('[network]\nmode = "private"\n', "network: must be an array of tables ([[network]]), found a table"),
    ("[[networks]]\n", "networks: unknown key; did you mean 'network'?"),
    ('[[network]]\nip = "10.0.0.2"\n', "network[0].ip: unknown key; did you mean 'address'?"),
    ('[[network]]\nbridge = "br0"\n', "network[0].bridge: unknown key; known here"),
    ('[[network]]\nmode = "private"\nforward = ["22:22"]\n', "network[0].forward: unknown key; did you mean 'ports'?"),
    ('[[share]]\nname = "s"\npath = "/s"\n', "share[0].name: unknown key; did you mean 'tag'?"),
    ('[[share]]\nsource = "/s"\n', "share[0].source: unknown key; did you mean 'path'?"),
    ("[cloud-init]\n", "cloud-init: unknown key; did you mean 'cloud_init'?"),
    ('[cloud_init]\nuserdata = "#cloud-config\\n"\n', "cloud_init.userdata: unknown key; did you mean 'user_data'?"),
    ("[shutdown]\ntimeout = 30\n", "shutdown.timeout: unknown key; did you mean 'grace'?"),
    ('[console]\nfile = "/x"\n', "console.file: unknown key; did you mean 'log'?"),
    ("[guest]\nvsock_cid = 3\n", "guest.vsock_cid: unknown key; did you mean 'vsock'?"),
    ("[uefi]\n", "uefi: unknown key; did you mean 'boot'?"),
    ('[cpu]\ncount = "4"\n', 'cpu.count: found the string "4"; did you mean 4?'),
    ('[cpu]\ncount = "4 cores"\n', 'cpu.count: found the string "4 cores"; it takes'),
    ("[cpu]\ncount = -1\n", 'cpu.count: found the integer -1; it takes an integer from 1 to 1024, or "all"'),
    ("[cpu]\ncount = 0\n", 'cpu.count: found the integer 0; it takes an integer from 1 to 1024, or "all"'),
    ("[cpu]\ncount = 2000\n", "cpu.count: found the integer 2000; it takes"),
    ("[cpu]\ncount = 2.5\n", 'cpu.count: found the number 2.5; it takes an integer from 1 to 1024, or "all"'),
    ("[cpu]\ncount = true\n", "cpu.count: found the boolean true; it takes"),
    ("[cpu]\ncount = [4]\n", 'cpu.count: found an array; it takes an integer from 1 to 1024, or "all"'),
    ('[cpu]\ncount = "max"\n', 'cpu.count: found the string "max"; it takes'),
    ('[cpu]\ncpus = "0..3"\n', "cpu.cpus: '0..3' in '0..3' is neither a CPU number nor a range like '2-5'; it takes"),
    ("[cpu]\ncpus = [0, 1]\n", "cpu.cpus: found an array; it takes"),
    ("[cpu]\ncpus = 4\n", "cpu.cpus: found the integer 4; it takes"),
    ('[cpu]\ncpus = "a"\n', "cpu.cpus: 'a' in 'a' is neither a CPU number nor a range like '2-5'; it takes"),
    ('[cpu]\naccel = "kvm "\n', 'cpu.accel: found the string "kvm "; did you mean "kvm"?'),
    ('[cpu]\naccel = "KVM"\n', 'cpu.accel: found the string "KVM"; did you mean "kvm"?'),
    ('[cpu]\naccel = "hvf"\n', 'cpu.accel: found the string "hvf"; it takes'),
    ("[cpu]\naccel = true\n", "cpu.accel: found the boolean true; it takes"),
    ('[cpu]\nplacement = "pinned"\n', 'cpu.placement: found the string "pinned"; it takes'),
    ('[cpu]\nplacement = "none"\n', 'cpu.placement: found the string "none"; it takes'),
    (
        '[cpu]\nmodel = "host passthrough"\n',
        'cpu.model: found the string "host passthrough"; it takes a QEMU CPU model',
    ),
    ('[cpu]\nsweep = "yes"\n', 'cpu.sweep: found the string "yes"; did you mean true?'),
    ("[cpu]\nsweep = 1\n", "cpu.sweep: found the integer 1; it takes true or false"),
    ("[memory]\nsize = 2048\n", 'memory.size: found the integer 2048; did you mean "2GiB"?'),
    ('[memory]\nsize = "2048"\n', 'memory.size: found the string "2048"; did you mean "2GiB"?'),
    ('[memory]\nsize = "2G"\n', 'memory.size: found the string "2G"; did you mean "2GiB"?'),
    ('[memory]\nsize = "2GB"\n', 'memory.size: found the string "2GB"; did you mean "2GiB"?'),
    ('[memory]\nsize = "2 GiB"\n', 'memory.size: found the string "2 GiB"; did you mean "2GiB"?'),
    ('[memory]\nsize = "2gib"\n', 'memory.size: found the string "2gib"; did you mean "2GiB"?'),
    ('[memory]\nsize = "0.5GiB"\n', 'memory.size: found the string "0.5GiB"; did you mean "512MiB"?'),
    ('[memory]\nsize = "16MiB"\n', 'memory.size: found the string "16MiB"; did you mean "32MiB"?'),
    ('[memory]\nsize = "-1GiB"\n', 'memory.size: found the string "-1GiB"; it takes'),
    ('[memory]\nsize = "lots"\n', 'memory.size: found the string "lots"; did you mean "limits"?'),
    ("[memory]\nhugepages = true\n", 'memory.hugepages: found the boolean true; it takes one of "2MiB", "1GiB"'),
    ('[memory]\nhugepages = "4KiB"\n', 'memory.hugepages: found the string "4KiB"; it takes one of "2MiB", "1GiB"'),
    ("[memory]\nhugepages = 2\n", 'memory.hugepages: found the integer 2; it takes one of "2MiB", "1GiB"'),
    ('cmdline = ["a"]\n', "boot.cmdline: found an array; it takes"),
    ('[[network]]\nmode = "user"\n', 'network[0].mode: found the string "user"; did you mean "passt"?'),
    ('[[network]]\nmode = "nat"\n', 'network[0].mode: found the string "nat"; did you mean "passt"?'),
    ('[[network]]\nmode = "tap"\n', 'network[0].mode: found the string "tap"; did you mean "private"?'),
    ('[[network]]\nmode = "bridged"\n', 'network[0].mode: found the string "bridged"; did you mean "bridge"?'),
    ('[[network]]\nmode = "host"\n', 'network[0].mode: found the string "host"; it takes'),
    ('[[network]]\nmode = "sriov"\n', 'network[0].mode: found the string "sriov"; it takes'),
    ('[[network]]\nmode = "none"\n', 'network[0].mode: found the string "none"; it takes'),
    (
        '[[network]]\ninterface = "eth0"\n',
        'network[0].interface: needs mode = "bridge" or "macvtap", and it is "private"',
    ),
    (
        '[[network]]\nmode = "bridge"\nsubnet = "10.0.0.0/24"\n',
        'network[0].subnet: needs mode = "private", and it is "bridge"',
    ),
    (
        '[[network]]\nsubnet = "10.0.0.1"\n',
        'network[0].subnet: found the string "10.0.0.1", which has no room for a gateway and a',
    ),
    (
        '[[network]]\nsubnet = "10.0.0.1/24"\n',
        'network[0].subnet: found the string "10.0.0.1/24" (10.0.0.1/24 has host bits set); it',
    ),
    (
        '[[network]]\naddress = "10.0.0.2"\n',
        "network[0].address: 10.0.0.2 is not a guest's address of 192.168.77.0/24; take one from 192.168.77.2 to 192.168.77.254",
    ),
    (
        '[[network]]\naddress = "192.168.77.1"\n',
        "network[0].address: 192.168.77.1 is not a guest's address of 192.168.77.0/24; take one from 192.168.77.2 to 192.168.77.254",
    ),
    (
        '[[network]]\naddress = "dhcp"\n',
        "network[0].address: found the string \"dhcp\" (Expected 4 octets in 'dhcp'); it takes",
    ),
    ('[[network]]\nmac = "01:00:00:00:00:01"\n', 'network[0].mac: found the string "01:00:00:00:00:01"; it takes'),
    (
        '[[network]]\nmac = "52-54-00-00-00-01"\n',
        'network[0].mac: found the string "52-54-00-00-00-01"; did you mean "52:54:00:00:00:01"?',
    ),
    (
        '[[network]]\nmac = "52:54:00:AA:00:01"\n',
        'network[0].mac: found the string "52:54:00:AA:00:01"; did you mean "52:54:00:aa:00:01"?',
    ),
    ('[[network]]\nmtu = "1500"\n', 'network[0].mtu: found the string "1500"; did you mean 1500?'),
    ("[[network]]\nmtu = 9\n", "network[0].mtu: found the integer 9; it takes an integer from 576 to 65521"),
    ("[[network]]\nqueues = 0\n", "network[0].queues: found the integer 0; it takes an integer from 1 to 64"),
    ('[[network]]\nports = ["22:22"]\n', 'network[0].ports: needs mode = "passt", and it is "private"'),
    (
        '[[network]]\nmode = "passt"\nports = ["22-20"]\n',
        'network[0].ports: found the string "22-20"; it takes an array of',
    ),
    ('[[network]]\nmode = "passt"\nports = "al"\n', 'network[0].ports: found the string "al"; did you mean "all"?'),
    ('[[network]]\nmode = "passt"\nports = "22:22"\n', 'network[0].ports: found the string "22:22"; it takes'),
    ('[[network]]\nmode = "passt"\nports = [0]\n', "network[0].ports: found the integer 0; it takes an array of"),
    ('[[network]]\nmode = "passt"\nports = ["1-9:1-8"]\n', 'network[0].ports: found the string "1-9:1-8"; it takes'),
    ('[[network]]\nmode = "passt"\nports = ["22/sctp"]\n', 'network[0].ports: found the string "22/sctp"; it takes'),
    ('[[network]]\nmode = "passt"\nports = ["999.0.0.1/22"]\n', 'network[0].ports: found the string "999.0.0.1/22"'),
    ('[[network]]\nmode = "passt"\nports = ["22:99999"]\n', 'network[0].ports: found the string "22:99999"; it takes'),
    (
        '[[network]]\nmode = "passt"\nports = ["22:22", "22:23"]\n',
        "network[0].ports: gives 22 to two ports of the guest; leave one of them out",
    ),
    ('[[network]]\nmode = "passt"\nqueues = 4\n', 'network[0].queues: must be 1 with mode = "passt"'),
    ('[[network]]\nmode = "descriptor"\n', 'network[0].fd: is missing; mode = "descriptor" needs the name of one'),
    (
        '[[network]]\nmode = "bridge"\n[[network]]\nmode = "bridge"\n',
        "network[1].interface: 'eth0' is taken by network[0] already",
    ),
    ('[[share]]\npath = "/s"\n', "share[0].tag: is missing; it takes up to 35 letters, digits, '.', '_' and '-'"),
    ('[[share]]\ntag = "a"\n', "share[0].path: is missing; it takes an absolute path"),
    ('[[share]]\ntag = "a b"\npath = "/s"\n', 'share[0].tag: found the string "a b"; it takes'),
    ('[[share]]\ntag = "a"\npath = "s"\n', 'share[0].path: found the string "s"; it takes an absolute path'),
    (
        '[[share]]\ntag = "a"\npath = "/s"\n[[share]]\ntag = "a"\npath = "/t"\n',
        "share[1].tag: 'a' is taken by share[0] already",
    ),
    ("[[device]]\n", "device[0].address: is missing; a device needs an address, a resource, a claim or a"),
    ('[[device]]\naddress = "41:00.0"\n', 'device[0].address: found the string "41:00.0"; it takes'),
    (
        '[[device]]\naddress = "0000:41:00.0"\n[[device]]\naddress = "0000:41:00.0"\n',
        "device[1].address: '0000:41:00.0' is taken by device[0] already",
    ),
    ('[[device]]\nresource = "gpu"\n', 'device[0].resource: found the string "gpu"; it takes'),
    (
        '[[device]]\naddress = "0000:41:00.0"\ncount = 2\n',
        "device[0].count: needs a resource, a claim or a variable: an address names one device",
    ),
    ('[[device]]\naddress = "0000:41:00.A"\n', 'device[0].address: found the string "0000:41:00.A"; it takes'),
    ('[shutdown]\ngrace = "30s"\n', 'shutdown.grace: found the string "30s"; did you mean 30?'),
    ('[shutdown]\ngrace = "1m"\n', 'shutdown.grace: found the string "1m"; did you mean 60?'),
    ("[shutdown]\ngrace = 0\n", "shutdown.grace: found the integer 0; it takes"),
    ("[shutdown]\ngrace = 9999\n", "shutdown.grace: found the integer 9999; it takes"),
    ('[shutdown]\non_reboot = "restart"\n', 'shutdown.on_reboot: found the string "restart"; did you mean "reset"?'),
    ("[shutdown]\npoweroff_status = 255\n", "shutdown.poweroff_status: found the integer 255; it takes"),
    ('[guest]\nready = "ssh"\n', 'guest.ready: found the string "ssh"; it takes'),
    ('[guest]\nready = "port:ssh"\n', 'guest.ready: found the string "port:ssh"; it takes'),
    (
        '[guest]\nready = "console:["\n',
        'guest.ready: found the string "[", which is no regular expression: unterminated character',
    ),
    (
        '[guest]\nready = "port:22"\n',
        "guest.ready: names a port, and the runner can connect to the guest only in a network with",
    ),
    (
        '[guest]\nagent = false\nready = "agent"\n',
        'guest.ready: is "agent", but guest.agent = false; leave one of them out',
    ),
    ("[guest]\nwatchdog = true\n", "guest.watchdog: found the boolean true; it takes"),
    ("[guest]\nvsock = 1\n", "guest.vsock: found the integer 1; it takes"),
    ('[guest]\nclock = "local"\n', 'guest.clock: found the string "local"; did you mean "localtime"?'),
    ('[console]\nlog_size = "1KiB"\n', 'console.log_size: found the string "1KiB"; did you mean "1MiB"?'),
    ('[instance]\nname = "my vm"\n', 'instance.name: found the string "my vm"; it takes'),
    ('[instance]\nname = "-x"\n', 'instance.name: found the string "-x"; it takes'),
    (
        '[instance]\nuuid = "3CEDA12C-3EE9-40FA-9F42-61428FE654A6"\n',
        'instance.uuid: found the string "3CEDA12C-3EE9-40FA-9F42-61428FE654A6"; did you mean "3ceda12c-3ee9-40fa-9f42-61428fe654a6"?',
    ),
    ('[instance]\nuuid = "1"\n', 'instance.uuid: found the string "1"; it takes a UUID in lower case'),
    ('[instance]\nuser = "Root"\n', 'instance.user: found the string "Root"; did you mean "root"?'),
    (
        '[cloud_init]\nuser_data = "hello"\n',
        "cloud_init.user_data: begins with 'hello', which cloud-init would ignore; begin it with",
    ),
    (
        '[cloud_init]\nssh_keys = "ssh-ed25519 AAAA"\n',
        'cloud_init.ssh_keys: found the string "ssh-ed25519 AAAA"; it takes',
    ),
    (
        '[cloud_init]\nssh_keys = ["hello"]\n',
        "cloud_init.ssh_keys[0]: is 'hello', which is no public key; one looks like 'ssh-ed25519",
    ),
    ('[cloud_init]\nhostname = "a_b"\n', 'cloud_init.hostname: found the string "a_b"; it takes a host name'),
    ('[environment]\nallow = "HOME"\n', 'environment.allow: found the string "HOME"; it takes'),
    ("[hotplug]\ndisks = 100\n", "hotplug.disks: found the integer 100; it takes an integer from 0 to 16"),
    ("[hotplug]\nmemory = true\n", "hotplug.memory: unknown key; known here: disks, cpus, qemu"),
    ('[display]\nvnc = ":0"\n', 'display.vnc: found the string ":0"; it takes true or false'),
]

COMMAND_LINES = [
    ("", "name a COMMAND: try, run, plan, inspect, check, ctl, schema, completion, manual, console, logs"),
    ("chekc", "unknown 'chekc'; did you mean 'check'?"),
    ("star", "invalid choice: 'star' (choose from"),
    ("create web", "invalid choice: 'create' (choose from"),
    ("help x", "invalid choice: 'x' (choose from"),
    ("--vresion", "unknown option '--vresion'; did you mean '--version'?"),
    ("--state-dir", "argument --state-dir: expected one argument"),
    ("--state-dir x", "name a COMMAND: try, run, "),
    ("run a b", "instance-runner: cannot take 'b': it is one argument too many"),
    ("run -x", "unknown option '-x'; see `instance-runner run --help`"),
    ("run --memory 2G", "unknown option '--memory'; see `instance-runner run --help`"),
    ("run --stat-dir /x", "unknown option '--stat-dir'; did you mean '--state-dir'?"),
    ("run --http 9441", "argument --http: '9441' is not ADDRESS:PORT"),
    ("run --http :x", "argument --http: ':x' is not ADDRESS:PORT"),
    ("run --log-format xml", "invalid choice: 'xml' (choose from"),
    ("run --log-level debgu", "unknown 'debgu'; did you mean 'debug'?"),
    (
        "plan",
        "cannot read the spec '/etc/instance/spec.toml': No such file or directory; name a SPEC, or mount one there",
    ),
    ("plan /none.toml", "cannot read the spec '/none.toml': No such file or directory"),
    ("plan .", "cannot read the spec '.': it is not a file"),
    ("plan a.toml b.toml", "name one SPEC, or check them by --document-only"),
    ("plan --document-only", "cannot check nothing: name SPECs with --document-only"),
    ("plan --show-argv --nccl s", "cannot give more than one of --json, --show-argv and --nccl; leave the others out"),
    ("plan --node", "argument --node: expected one argument"),
    ("plan --pod p.yaml", "cannot use --pod alone: name the kubelet's configuration with --node"),
    ("plan --node /none.yaml", "cannot read the kubelet configuration '/none.yaml': No such file or directory"),
    ("plan --node k --host /none.json", "cannot read the host record '/none.json': No such file or directory"),
    ("plan --record x s", "cannot plan while recording: --record takes nothing but --sys beside it"),
    ("check --jsn", "unknown option '--jsn'; did you mean '--json'?"),
    ("check a b", "instance-runner: cannot take 'b': it is one argument too many"),
    ("inspect --watch x", "argument --watch: 'x' is not a number of seconds from 0.1 to 86400"),
    ("inspect --trace", "argument --trace: expected one argument"),
    ("inspect --trace 2 --watch 2", "argument --watch: not allowed with argument --trace"),
    ("ctl", "name a COMMAND: status, cpus, qmp, disk, upgrade, qemu-update"),
    ("ctl stauts", "unknown 'stauts'; did you mean 'status'?"),
    ("ctl status --jsn", "unknown option '--jsn'; did you mean '--json'?"),
    ("ctl disk", "name a COMMAND: list, attach, detach, grow"),
    ("ctl disk atach /d", "unknown 'atach'; did you mean 'attach'?"),
    ("ctl disk attach", "the following arguments are required: PATH"),
    ("ctl disk attach /d readonly", "cannot understand 'readonly': keys of a disk are given once each, as key=value"),
    ("ctl disk attach /d a=1 a=2", "cannot understand 'a=2': keys of a disk are given once each, as key=value"),
    ("ctl disk detach", "the following arguments are required: NAME"),
    ("ctl cpus two", "argument COUNT: 'two' is no number of vCPUs such as 4"),
    ("ctl cpus -1", "argument COUNT: '-1' is no number of vCPUs such as 4"),
    ("ctl qmp", "cannot tell what to execute: name a QMP command, or --shell without one"),
    ("ctl upgrade", "the following arguments are required: --from, --digest"),
    ("console --detach-key x", "cannot detach with 'x': it is no key like ctrl-] or ctrl-a"),
    ("console --steal --read-only", "argument --read-only: not allowed with argument --steal"),
    ("logs x", "instance-runner: cannot take 'x': it is one argument too many"),
    ("schema plam", "unknown 'plam'; did you mean 'plan'?"),
    ("completion tcsh", "invalid choice: 'tcsh' (choose from"),
    ("try --dsik x", "unknown option '--dsik'; did you mean '--disk'?"),
    ("try --disk", "argument --disk: expected one argument"),
]

ELSEWHERE = [
    (
        "ctl status",
        "cannot reach the instance at '{dir}/state/control.sock': No such file or directory; start an instance",
    ),
    ("ctl qmp query-status", "cannot connect to '{dir}/state/qmp.sock': No such file or directory; start an instance"),
    ("console", "cannot connect to '{dir}/state/console.sock': No such file or directory; start an instance"),
    ("logs", "cannot find console.log in '{dir}/state': no instance has run there"),
]

FILES = [
    ('[boot]\nkernel = "{dir}/none"\n', "boot.kernel: '{dir}/none' does not exist"),
    ('[boot]\nkernel = "{dir}"\n', "boot.kernel: '{dir}' is a directory, not a file"),
    ('[boot]\nkernel = "{dir}/text"\n', "boot.kernel: '{dir}/text' is no kernel that QEMU can start"),
    ('[boot]\nkernel = "{dir}/gz"\n', "it holds data packed by gzip"),
    ('[boot]\nkernel = "{dir}/kernel"\ninitrd = "{dir}/none"\n', "boot.initrd: '{dir}/none' does not exist"),
    ('[boot]\nkernel = "{dir}/kernel"\ninitrd = "{dir}/kernel"\n', "which Linux does not take as an initial RAM disk"),
    (
        '[boot]\nfirmware = "{dir}/text"\n',
        "boot.firmware: '{dir}/text' has 6 bytes, and QEMU takes firmware of a multiple",
    ),
    ('[[disk]]\npath = "{dir}/none"\n', "disk[0].path: '{dir}/none' does not exist"),
    ('[[disk]]\npath = "{dir}"\n', "disk[0].path: '{dir}' is a directory, not a file or block device"),
    ('[[disk]]\npath = "{dir}/empty"\n', "`truncate -s 10G {dir}/empty` makes it a disk of 10 GiB"),
    ('[[disk]]\npath = "{dir}/short"\n', "`truncate -s %512 {dir}/short` makes it longer"),
    (
        '[[disk]]\npath = "{dir}/text"\n',
        "'{dir}/text' holds nothing but text, which the guest would see as it is; fetch the file",
    ),
    ('[[disk]]\npath = "{dir}/gz"\n', "convert it: `gzip -dc {dir}/gz >NEW`"),
    ('[[disk]]\npath = "{dir}/vmdk"\n', "convert it: `qemu-img convert -f vmdk -O qcow2 {dir}/vmdk NEW`"),
    ('[[disk]]\npath = "{dir}/qcow2"\n', 'holds a qcow2 image; set format = "qcow2"'),
    ('[[disk]]\npath = "{dir}/disk"\nformat = "qcow2"\n', 'holds a raw image; set format = "raw"'),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[[share]]\ntag = "s"\npath = "{dir}/none"\n',
        "share[0].path: '{dir}/none' does not exist",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[[share]]\ntag = "s"\npath = "{dir}/disk"\n',
        "'{dir}/disk' is a file, not a directory",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[cloud_init]\nuser_data = "{dir}/none"\n',
        "cloud_init.user_data: cannot read '{dir}/none'",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[cloud_init]\nssh_keys = ["{dir}/private"]\n',
        "a private key, which must stay secret",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[console]\nlog = "{dir}"\n',
        "console.log: cannot write '{dir}': Is a directory",
    ),
    ('[boot]\nkernel = "{dir}/kernel"\n[console]\nlog = "{dir}/none/log"\n', "there is no directory '{dir}/none'"),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[instance]\nuser = "nouser-here"\n',
        "instance.user: user 'nouser-here' does not exist here",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[cpu]\ncount = 1024\n',
        "cpu.count: asks for 1024 vCPUs, but this process may use",
    ),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[cpu]\ncpus = "8000"\n',
        "cpu.cpus: '8000' of '8000' may not be used by this process",
    ),
    ('[boot]\nkernel = "{dir}/kernel"\n[memory]\nsize = "9000GiB"\n', "memory.size: "),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[cpu]\nplacement = "controller"\n',
        "cpu.placement: 'controller' cannot be used: ",
    ),
    ('[boot]\nkernel = "{dir}/kernel"\n[cpu]\nmodel = "Pentium5"\n', "has no CPU model 'Pentium5'"),
    (
        '[boot]\nkernel = "{dir}/kernel"\n[[network]]\nmode = "bridge"\ninterface = "none0"\n',
        "there is no network interface 'none0' here",
    ),
]
"""Specs that name files, users, CPUs and interfaces of this machine."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSTANCE_RUNNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def test_the_inputs_are_enough_to_be_judged_by() -> None:
    assert len(WHOLE) + len(WITH_KERNEL) + len(COMMAND_LINES) + len(ELSEWHERE) + len(FILES) >= 160


@pytest.mark.parametrize(("text", "words"), [*WHOLE, *((KERNEL + text, words) for text, words in WITH_KERNEL)])
def test_a_wrong_spec(here: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (here / "spec").write_bytes(text.encode("latin-1"))
    assert main(["plan", "spec"]) == Status.REFUSED
    output = capsys.readouterr()
    assert f"instance-runner: spec: {words}" in output.err
    assert output.out == ""
    assert [path.name for path in here.iterdir()] == ["spec"]


@pytest.mark.parametrize(("line", "words"), COMMAND_LINES)
def test_a_wrong_command_line(here: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert main(line.split()) == Status.USAGE
    output = capsys.readouterr()
    assert words in output.err
    assert output.out == ""
    assert not list(here.iterdir())


@pytest.mark.parametrize(("line", "words"), ELSEWHERE)
def test_a_command_where_no_instance_is(here: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert main(line.split()) == Status.FAILED
    assert words.format(dir=here) in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize(("text", "words"), FILES)
def test_a_spec_that_does_not_fit_this_machine(here: Path, text: str, words: str) -> None:
    contents = {
        "kernel": FAKE_KERNEL,
        "text": b"hello\n",
        "short": b"\1\2\3",
        "empty": b"",
        "disk": bytes(1 << 20),
        "gz": b"\x1f\x8b\x08".ljust(512, b"\0"),
        "vmdk": b"KDMV".ljust(512, b"\0"),
        "qcow2": b"QFI\xfb\0\0\0\3".ljust(1024, b"\0"),
        "private": b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
    }
    for name, content in contents.items():
        (here / name).write_bytes(content)
    (here / "spec").write_text(text.format(dir=here))
    done = subprocess.run((RUNNER, "plan", "spec"), check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (Status.REFUSED, "")
    assert words.format(dir=here) in done.stderr
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        **contents,
        "spec": text.format(dir=here).encode(),
    }

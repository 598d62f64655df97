"""Networks on the command lines of QEMU, dnsmasq and passt, and in the shell script for a person."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import assert_never

from runner.plan.argv.wires import WireNumbers
from runner.plan.dhcp import dhcp_routes
from runner.plan.network_plan import (
    BridgedPlan,
    DhcpPlan,
    InheritedFdPlan,
    Ipv6Plan,
    MacvtapPlan,
    NetworkPlan,
    Nic,
    PasstPlan,
)

DNSMASQ_UP = "started, version "
"""The message that dnsmasq logs when its sockets are bound and its privileges dropped (``main`` of ``src/dnsmasq.c``), without a locale's
translation."""


def nic_device(index: int, nic: Nic) -> str:
    """Return the guest's device: with several queues, one vector for each, one for the configuration and one for the control queue."""
    several = f",mq=on,vectors={2 * nic.queues + 2}" if nic.queues > 1 else ""
    return f"virtio-net-pci,netdev=net{index},mac={nic.mac},host_mtu={nic.mtu}{several},romfile="


def netdev_by_hand(index: int, network: NetworkPlan) -> str:
    """Return the kind and properties of ``-netdev`` for a QEMU started by hand, which opens its files by name."""
    match network:
        case BridgedPlan():
            queues = f",queues={network.queues}" if network.queues > 1 else ""
            return f"tap,ifname={network.tap},script=no,downscript=no{queues}" + (",vhost=on" if network.vhost else "")
        case MacvtapPlan():  # the shell opens it, once for each queue
            numbers = tuple(10 + 10 * index + queue for queue in range(network.queues))
            return WireNumbers(numbers).netdev() + (",vhost=on" if network.vhost else "")
        case PasstPlan():
            return f"stream,server=off,addr.type=unix,addr.path=/tmp/passt{index}.sock"
        case InheritedFdPlan():
            return "user,restrict=on"  # a shell does not have the descriptors
        case other:
            assert_never(other)


def network_by_hand(index: int, network: NetworkPlan) -> Iterator[str]:
    """Yield the shell commands that make a network for a QEMU started by hand."""
    match network:
        case BridgedPlan():
            if network.pod is not None:
                yield f"# {network.pod.name} is left alone: to take its place, move its address and put it into {network.bridge}"
            yield f"ip link add {network.bridge} type bridge && ip addr add {network.host} dev {network.bridge}"
            if network.ipv6 is not None and network.ipv6.host is not None:
                yield f"ip addr add {network.ipv6.host} dev {network.bridge} nodad"
            several = " multi_queue vnet_hdr" if network.queues > 1 else ""
            yield f"ip tuntap add {network.tap} mode tap{several} && ip link set {network.tap} master {network.bridge} up"
            yield f"ip link set {network.bridge} up"
        case MacvtapPlan():
            yield (
                f"ip link add link {shlex.quote(network.over)} name {network.link} address {network.mac} mtu {network.mtu} "
                "type macvtap mode bridge"
            )
            yield f"ip link set {network.link} up"
            for queue in range(network.queues):
                yield f'exec {10 + 10 * index + queue}<>"/dev/tap$(cat /sys/class/net/{network.link}/ifindex)"'
        case PasstPlan():
            yield shlex.join([*passt_argv(network, f"--socket=/tmp/passt{index}.sock")]) + " &"
            yield f"until [ -S /tmp/passt{index}.sock ]; do sleep 0.1; done"
        case InheritedFdPlan():
            yield f"# network {index} is inherited by the runner as {', '.join(network.fds)}; here it is left unconnected"
        case other:
            assert_never(other)


def passt_argv(network: PasstPlan, endpoint: str) -> list[str]:
    """Return passt's argv; *endpoint* is ``--fd=N`` (a connected socket) or ``--socket=…``.

    Without *ports* in the plan it forwards none; passt's own default is all free ports. By default it also lets the guest reach the
    pod's loopback, where sidecars, and with hostNetwork the node's programs, expect friends alone.
    """
    argv = [str(network.program), "--foreground", "--one-off", "--quiet", f"--mtu={network.mtu}"]
    ports = [f"--tcp-ports={each}" for each in network.ports or ("none",)]
    ports += [f"--udp-ports={each}" for each in network.udp_ports or ("none",)]
    return [*argv, *([] if network.reaches_loopback else ["--no-map-gw"]), *ports, endpoint]


def dnsmasq_argv(dhcp: DhcpPlan) -> list[str]:
    """Return dnsmasq's argv: a DHCP server for one guest on one bridge, no DNS, no files.

    The lease is static and infinite, so there is no lease file that could be full, corrupt or left behind, and a guest
    never renews. Other hosts on a bridged link get no answer.
    """
    network = dhcp.network
    argv = [
        str(dhcp.program),
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-hosts",
        "--no-resolv",
        "--port=0",
        f"--interface={network.bridge}",
        "--bind-interfaces",
        "--except-interface=lo",
        f"--user={dhcp.user}",
        "--pid-file=",
        "--log-facility=-",
        "--leasefile-ro",
        "--no-ping",
        "--dhcp-authoritative",
        "--dhcp-ignore=tag:!known",
        f"--dhcp-range={network.guest.ip},static,{network.guest.netmask},infinite",
        f"--dhcp-host={network.mac},{network.guest.ip}{_ipv6_lease(network.ipv6)},infinite",
    ]
    if network.host.ip not in network.guest.network:
        # Our address is link-local: the guest's subnet belongs to the pod's network, not to the bridge.
        argv.append(f"--shared-network={network.bridge},{network.guest.ip}")
    if network.ipv6 is not None:
        argv += _ipv6_options(network, network.ipv6)
    return argv + list(_options(network))


def _options(network: BridgedPlan) -> Iterator[str]:
    """Yield the guest's DHCP options, the least important first: dnsmasq sends the last ones first, and omits those that do not fit."""
    if network.search:
        yield "--dhcp-option=option:domain-search," + ",".join(network.search)
        yield f"--dhcp-option=option:domain-name,{network.search[0]}"
    yield f"--dhcp-option=option:mtu,{network.mtu}"
    yield "--dhcp-option=option:dns-server" + "".join(f",{address}" for address in network.nameservers)
    yield f"--dhcp-option=option:router{_option_value(network.gateway)}"
    if network.routes:
        pairs = (
            f",{each.destination},{each.gateway or '0.0.0.0'}" for each in dhcp_routes(network.guest, network.routes)
        )
        yield "--dhcp-option=option:classless-static-route" + "".join(pairs)


def _option_value(address: object) -> str:
    return "" if address is None else f",{address}"


def _ipv6_lease(ipv6: Ipv6Plan | None) -> str:
    return "" if ipv6 is None else f",[{ipv6.guest.ip}]"


def _ipv6_options(network: BridgedPlan, ipv6: Ipv6Plan) -> Iterator[str]:
    """Yield the options for the guest's IPv6 address (DHCPv6), and for the router advertisement that makes the guest request it.

    On a private network dnsmasq sends the advertisement. In a pod's network the network's own router sends it.
    """
    yield f"--dhcp-range={ipv6.guest.ip},static,{max(64, ipv6.guest.network.prefixlen)},infinite"
    if ipv6.host is None:
        yield f"--shared-network={network.bridge},{ipv6.guest.ip}"
    else:
        yield "--enable-ra"
        yield f"--ra-param={network.bridge},mtu:{network.mtu},60"
    servers = ",".join(f"[{address}]" for address in ipv6.nameservers)
    yield f"--dhcp-option=option6:dns-server{',' if servers else ''}{servers}"

"""A control plane of Kubernetes on this machine: etcd, API server, controller manager and scheduler.

Their addresses are those of this process's network namespace, which is to be its own: nobody else can reach them. etcd does not
flush its files (``--unsafe-no-fsync``), and everything is gone with the block that started it.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import attrs

from tests.cluster.certificates import Certificates
from tests.cluster.kubectl import Kubectl, KubectlError, Object

ADDRESS, NODE_ADDRESS, SERVICES = "10.99.0.1", "10.99.0.2", "10.96.0.0/16"
SERVER = f"https://{ADDRESS}:6443"
NODE = "node"
"""The name of the node that joins."""
STARTS_WITHIN = 120
ENDS_WITHIN = 30
UNREACHABLE_SECONDS = 5
"""After which pods that do not tolerate a node that does not answer are deleted from it; by default it is 300."""
HEARTBEAT_SECONDS = 5
SILENT_SECONDS = 30
"""Seconds without a node's heartbeat until it counts as unreachable; by default 50."""
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
KUBELET_API = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "kubelet-api-admin"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}],
}
"""Without it `kubectl logs` and `kubectl exec` are forbidden; kubeadm makes it."""


@attrs.frozen
class Process:
    """A program of the control plane."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def alive(self) -> None:
        """Fail if it has ended."""
        status = self.popen.poll()
        assert status is None, f"{self.name} has ended with status {status}:\n{self.log.read_text()[-4000:]}"

    def stop(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@attrs.frozen
class ControlPlane:
    """Its certificates, its administrator's kubectl, and how long it took to be ready, in seconds."""

    certificates: Certificates
    kubectl: Kubectl
    processes: Sequence[Process]
    ready_after: float

    def logs(self) -> str:
        """Return the end of every program's log."""
        return "".join(f"--- {each.name}\n{each.log.read_text(errors='replace')[-3000:]}\n" for each in self.processes)


def make_certificates(directory: Path) -> Certificates:
    """Make everything that a cluster needs, as kubeadm does."""
    it = Certificates(directory)
    for name in ("ca", "front-proxy-ca", "etcd-ca"):
        it.authority(name)
    both, client, server = "serverAuth,clientAuth", "clientAuth", "serverAuth"
    it.issue("etcd", "etcd-ca", "/CN=etcd", both, "IP:127.0.0.1")
    it.issue("etcd-client", "etcd-ca", "/CN=apiserver-etcd-client", client)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    addresses = ["127.0.0.1", "10.96.0.1", ADDRESS]
    alternatives = ",".join([*(f"IP:{each}" for each in addresses), *(f"DNS:{each}" for each in names)])
    it.issue("apiserver", "ca", "/CN=kube-apiserver", server, alternatives)
    it.issue("apiserver-kubelet", "ca", "/CN=kube-apiserver-kubelet-client", client)
    it.issue("front-proxy", "front-proxy-ca", "/CN=front-proxy-client", client)
    it.signing_key("sa")
    it.client("admin", "/O=system:masters/CN=admin", SERVER)
    it.client("controller-manager", "/CN=system:kube-controller-manager", SERVER)
    it.client("scheduler", "/CN=system:kube-scheduler", SERVER)
    node = f"/O=system:nodes/CN=system:node:{NODE}"
    it.client("node", node, SERVER, Path("/var/lib/kubelet/pki"))
    it.issue("kubelet-serving", "ca", node, server, f"IP:{NODE_ADDRESS},DNS:{NODE}")
    return it


def answers(url: str) -> bool:
    """Return whether a page is there; who serves it is not checked."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, context=context, timeout=5) as answer:  # noqa: S310 - our own URL
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def control_plane(binaries: Path, client: Path, etcd: Path, directory: Path) -> Iterator[ControlPlane]:
    """Hold a control plane of the programs in *binaries*, which is ready; *client* is kubectl, and its files are in *directory*."""
    pki = directory / "pki"
    pki.mkdir(parents=True)
    it = make_certificates(pki)
    started: list[Process] = []
    begun = time.monotonic()
    with ExitStack() as stack:

        def start(name: str, program: Path, page: str, *arguments: str) -> None:
            log = directory / f"{name}.log"
            with log.open("wb") as output:
                popen = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", str(program), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            process = Process(name, popen, log)
            started.append(process)
            stack.callback(process.stop)
            end = time.monotonic() + STARTS_WITHIN
            while not answers(page):
                process.alive()
                assert time.monotonic() < end, f"{name} is not ready:\n{log.read_text()[-4000:]}"
                time.sleep(0.1)

        start("etcd", etcd, "http://127.0.0.1:2381/health", *_etcd(it, directory / "etcd"))
        start("apiserver", binaries / "kube-apiserver", "https://127.0.0.1:6443/readyz", *_api_server(it))
        files = [f"--{each}kubeconfig={{}}" for each in ("", "authentication-", "authorization-")]
        start(
            "controller-manager",
            binaries / "kube-controller-manager",
            "https://127.0.0.1:10257/healthz",
            *(each.format(it["controller-manager.conf"]) for each in files),
            *_controller_manager(it, directory),
        )
        start(
            "scheduler",
            binaries / "kube-scheduler",
            "https://127.0.0.1:10259/readyz",
            *(each.format(it["scheduler.conf"]) for each in files),
            *("--bind-address=127.0.0.1", "--leader-elect=false"),
        )
        kubectl = Kubectl(client, pki / "admin.conf")
        kubectl.apply(KUBELET_API)
        end = time.monotonic() + STARTS_WITHIN
        while kubectl.run("get", "serviceaccount", "default").returncode != 0:
            assert time.monotonic() < end, "no service account for pods"
            time.sleep(0.1)
        yield ControlPlane(it, kubectl, started, time.monotonic() - begun)


def _etcd(it: Certificates, data: Path) -> tuple[str, ...]:
    client, peer = "https://127.0.0.1:2379", "http://127.0.0.1:2380"
    return (
        *(f"--data-dir={data}", "--name=etcd", "--unsafe-no-fsync", "--log-level=warn"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=etcd={peer}"),
        *(f"--cert-file={it['etcd.crt']}", f"--key-file={it['etcd.key']}"),
        *(
            "--client-cert-auth",
            f"--trusted-ca-file={it['etcd-ca.crt']}",
            "--listen-metrics-urls=http://127.0.0.1:2381",
        ),
    )


def _api_server(it: Certificates) -> tuple[str, ...]:
    return (
        *("--bind-address=0.0.0.0", f"--advertise-address={ADDRESS}", "--secure-port=6443"),
        *("--etcd-servers=https://127.0.0.1:2379", f"--etcd-cafile={it['etcd-ca.crt']}"),
        *(f"--etcd-certfile={it['etcd-client.crt']}", f"--etcd-keyfile={it['etcd-client.key']}"),
        *(f"--client-ca-file={it['ca.crt']}", f"--tls-cert-file={it['apiserver.crt']}"),
        *(f"--tls-private-key-file={it['apiserver.key']}", f"--kubelet-certificate-authority={it['ca.crt']}"),
        f"--kubelet-client-certificate={it['apiserver-kubelet.crt']}",
        *(f"--kubelet-client-key={it['apiserver-kubelet.key']}", "--kubelet-preferred-address-types=InternalIP"),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={it['sa.pub']}"),
        f"--service-account-signing-key-file={it['sa.key']}",
        f"--requestheader-client-ca-file={it['front-proxy-ca.crt']}",
        *(f"--proxy-client-cert-file={it['front-proxy.crt']}", f"--proxy-client-key-file={it['front-proxy.key']}"),
        *("--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User"),
        *("--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-"),
        *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true"),
        f"--service-cluster-ip-range={SERVICES}",
        f"--default-unreachable-toleration-seconds={UNREACHABLE_SECONDS}",
        f"--default-not-ready-toleration-seconds={UNREACHABLE_SECONDS}",
    )


def _controller_manager(it: Certificates, directory: Path) -> tuple[str, ...]:
    return (
        *("--bind-address=127.0.0.1", "--leader-elect=false", "--use-service-account-credentials=true"),
        *(f"--service-account-private-key-file={it['sa.key']}", f"--root-ca-file={it['ca.crt']}"),
        *(f"--client-ca-file={it['ca.crt']}", f"--requestheader-client-ca-file={it['front-proxy-ca.crt']}"),
        *(f"--cluster-signing-cert-file={it['ca.crt']}", f"--cluster-signing-key-file={it['ca.key']}"),
        # its default, in /usr/libexec, would be made on this machine
        f"--flex-volume-plugin-dir={directory / 'plugins'}",
        f"--node-monitor-grace-period={SILENT_SECONDS}s",
        "--node-monitor-period=2s",
    )


class FakeNode:
    """A Node object without a machine: it has a capacity and a heartbeat, so that pods are bound to it; none of them starts."""

    def __init__(self, kubectl: Kubectl, name: str, capacity: Object) -> None:
        self.kubectl, self.name, self.capacity = kubectl, name, capacity
        self._silent = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        labels = {
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "kubernetes.io/hostname": self.name,
        }
        self._renew()
        self.kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "no kubelet"}
        self.patch_status(
            "node",
            self.name,
            {
                "capacity": self.capacity,
                "allocatable": self.capacity,
                "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
                "addresses": [{"type": "InternalIP", "address": "10.99.0.9"}],
            },
        )
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.fall_silent()
        self.kubectl("delete", "node", self.name, "--wait=false")

    def fall_silent(self) -> None:
        """Beat no more, as a machine that was switched off."""
        self._silent.set()
        self._heart.join()

    def patch_status(self, kind: str, name: str, status: Object, *more: str) -> None:
        """Write an object's status, as a kubelet does."""
        patch = json.dumps({"status": status})
        self.kubectl("patch", kind, name, *more, "--subresource=status", "--type=merge", f"--patch={patch}")

    def run(self, name: str, namespace: str = "instances") -> None:
        """Report a pod that is bound to it as running and ready."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {"type": each, "status": "True", "lastTransitionTime": now}
            for each in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        ]
        self.patch_status("pod", name, {"phase": "Running", "conditions": conditions}, "-n", namespace)

    def _beat(self) -> None:
        while not self._silent.wait(HEARTBEAT_SECONDS):
            try:
                self._renew()
            except KubectlError:
                return  # the control plane has ended

    def _renew(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata = {"name": self.name, "namespace": "kube-node-lease"}
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now}
        self.kubectl.apply(
            {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        )

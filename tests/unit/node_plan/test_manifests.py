from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.document_value import Value
from runner.base.errors import SpecError
from runner.kubelet.pod import Container, ContainerKind, Pod, QosClass
from runner.node_plan.cpu_manager import exclusive_cpus_of_pod
from runner.node_plan.manifests import Manifest, parse_manifests

pytestmark = pytest.mark.kubelet_model

GIB = 1 << 30


def pod(*containers: dict[str, Any], name: str = "p", **spec: Any) -> dict[str, Any]:
    named = [{"name": f"c{place}", **container} for place, container in enumerate(containers)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": named, **spec}}


def limits(**amounts: Any) -> dict[str, Any]:
    return {"resources": {"limits": amounts}}


def read_all(*documents: dict[str, Any], gate: bool = True) -> tuple[list[Manifest], list[str]]:
    return parse_manifests([Value(document, "p.yaml") for document in documents], pod_level_resources=gate)


def read(document: dict[str, Any], *, gate: bool = True) -> Manifest:
    ((manifest,), skipped) = read_all(document, gate=gate)
    assert skipped == []
    return manifest


def test_an_instance_s_pod() -> None:
    manifest = read(
        pod({"resources": {"limits": {"cpu": "40", "memory": "4Gi", "hugepages-2Mi": "80Gi", "nvidia.com/gpu": 2}}})
    )
    assert manifest == Manifest(
        "p",
        "p.yaml",
        Pod(
            "p",
            (Container("c0", 40_000, {"memory": 4 * GIB, "hugepages-2Mi": 80 * GIB}, devices={"nvidia.com/gpu": 2}),),
        ),
        QosClass.GUARANTEED,
    )


@pytest.mark.parametrize(
    ("resources", "qos", "why"),
    [
        ({}, QosClass.BEST_EFFORT, ["container 'c0' has no limits.cpu", "container 'c0' has no limits.memory"]),
        ({"limits": {"cpu": 2, "memory": "1Gi"}}, QosClass.GUARANTEED, []),
        (
            {"requests": {"cpu": "2000m", "memory": "1024Mi"}, "limits": {"cpu": 2, "memory": "1Gi"}},
            QosClass.GUARANTEED,
            [],
        ),
        ({"limits": {"cpu": 2}}, QosClass.BURSTABLE, ["container 'c0' has no limits.memory"]),
        (
            {"requests": {"cpu": 1}, "limits": {"cpu": 2, "memory": "1Gi"}},
            QosClass.BURSTABLE,
            ["container 'c0' has requests.cpu below its limits.cpu"],
        ),
        (
            {"requests": {"cpu": 1, "memory": "1Gi"}},
            QosClass.BURSTABLE,
            ["container 'c0' has no limits.cpu", "container 'c0' has no limits.memory"],
        ),
        (
            {"limits": {"nvidia.com/gpu": 1}},
            QosClass.BEST_EFFORT,
            ["container 'c0' has no limits.cpu", "container 'c0' has no limits.memory"],
        ),
        (
            {"limits": {"cpu": 0, "memory": 0}},
            QosClass.BEST_EFFORT,
            ["container 'c0' has no limits.cpu", "container 'c0' has no limits.memory"],
        ),
    ],
)
def test_the_qos_class_and_its_reasons(resources: dict[str, Any], qos: QosClass, why: list[str]) -> None:
    manifest = read(pod({"resources": resources}))
    assert (manifest.qos, list(manifest.why)) == (qos, why)
    assert manifest.pod.guaranteed == (qos is QosClass.GUARANTEED)


def test_one_container_decides_the_class_of_the_pod() -> None:
    manifest = read(pod(limits(cpu=2, memory="1Gi"), {}, initContainers=[{"name": "first"}]))
    assert manifest.qos is QosClass.BURSTABLE
    assert [reason.split()[1] for reason in manifest.why] == ["'first'", "'first'", "'c1'", "'c1'"]
    assert exclusive_cpus_of_pod(manifest.pod) == 0


def test_init_containers_come_first_and_sidecars_are_distinguished() -> None:
    document = pod(
        limits(cpu=4, memory="1Gi"),
        initContainers=[
            {"name": "fetch", **limits(cpu=6, memory="1Gi")},
            {"name": "log", "restartPolicy": "Always", **limits(cpu=1, memory="1Gi")},
        ],
    )
    assert [(container.name, container.kind) for container in read(document).pod.containers] == [
        ("fetch", ContainerKind.INIT),
        ("log", ContainerKind.SIDECAR),
        ("c0", ContainerKind.APP),
    ]
    assert exclusive_cpus_of_pod(read(document).pod) == 6


def test_a_kind_that_creates_pods_is_planned_as_one_pod() -> None:
    template = {"metadata": {"labels": {}}, "spec": pod(limits(cpu=2, memory="1Gi"))["spec"]}
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "web", "uid": "d"},
        "spec": {"replicas": 3, "template": template},
    }
    cron = {
        "kind": "CronJob",
        "metadata": {"generateName": "tick-"},
        "spec": {"jobTemplate": {"spec": {"template": template}}},
    }
    manifests, skipped = read_all(deployment, cron, {"kind": "Service"}, {"kind": "List", "items": [pod({})]})
    assert [(manifest.name, manifest.pod.pod_uid) for manifest in manifests] == [
        ("web", "web"),
        ("tick-", "tick-"),
        ("p", "p"),
    ]
    assert manifests[0].notes == (
        "3 replicas, planned as one pod; name the file once for each that comes to this node",
    )
    assert skipped == ["p.yaml: a Service creates no pod and was left out"]


def test_pods_of_one_name_are_numbered_and_a_running_one_keeps_its_uid() -> None:
    manifests, _ = read_all(pod({}), pod({}), pod({}, name="q"), pod({}) | {"metadata": {"name": "r", "uid": "1-2"}})
    assert [(manifest.name, manifest.pod.pod_uid) for manifest in manifests] == [
        ("p", "p"),
        ("p#2", "p#2"),
        ("q", "q"),
        ("r", "1-2"),
    ]


def test_pod_level_resources() -> None:
    whole = pod({}, resources={"limits": {"cpu": 2, "memory": "1Gi"}})
    with_gate, without = read(whole), read(whole, gate=False)
    assert (with_gate.qos, without.qos) == (QosClass.GUARANTEED, QosClass.BEST_EFFORT)
    assert with_gate.pod.pod_level_resources
    assert without.pod.pod_level_resources
    assert (with_gate.pod.requests["cpu"], without.pod.requests["cpu"]) == (2000, 0)
    assert with_gate.notes == ()


HALF = {"resources": {"requests": {"cpu": 1}, "limits": {"cpu": 2, "memory": "1Gi"}}}


@pytest.mark.parametrize(
    ("container", "resources", "requests", "qos"),
    [
        # Requests that are missing are what the containers request, and only else the limit (defaultPodRequests).
        (HALF, {"limits": {"cpu": 2, "memory": "2Gi"}}, {"cpu": 1000, "memory": GIB}, QosClass.BURSTABLE),
        ({}, {"limits": {"cpu": 2}, "requests": {"cpu": 1}}, {"cpu": 1000}, QosClass.BURSTABLE),
        (
            limits(cpu=2, memory="1Gi"),
            {"limits": {"cpu": 2, "memory": "1Gi"}},
            {"cpu": 2000, "memory": GIB},
            QosClass.GUARANTEED,
        ),
        ({}, {"requests": {"cpu": 2, "memory": "1Gi"}}, {"cpu": 2000, "memory": GIB}, QosClass.BURSTABLE),
        # Huge pages of a container are a limit of the pod (defaultHugePagePodLimits), and then a request.
        (
            limits(**{"hugepages-2Mi": "2Mi"}),
            {"requests": {"cpu": 2}},
            {"cpu": 2000, "hugepages-2Mi": 2 << 20},
            QosClass.BURSTABLE,
        ),
        ({}, {"limits": {"hugepages-2Mi": "4Mi"}}, {"hugepages-2Mi": 4 << 20}, QosClass.BEST_EFFORT),
    ],
)
def test_defaults_of_pod_level_resources(
    container: dict[str, Any], resources: dict[str, Any], requests: dict[str, int], qos: QosClass
) -> None:
    manifest = read(pod(container, resources=resources))
    assert (manifest.pod.pod_level_requests, manifest.qos) == (requests, qos)


def test_containers_whose_requests_equal_their_limits() -> None:
    whole = limits(cpu=2, memory="1Gi")["resources"]["limits"]
    for resources, guaranteed in (
        ({"limits": whole}, True),
        ({"limits": whole, "requests": {"cpu": "2000m"}}, True),
        ({"limits": whole, "requests": {"cpu": 1}}, False),
        ({"requests": whole}, False),
        ({"limits": {"cpu": 2}}, False),
        ({"limits": {**whole, "memory": 0}}, False),
        ({}, False),
    ):
        assert read(pod({"resources": resources})).pod.containers[0].guaranteed == guaranteed, resources


def test_empty_pod_level_resources_decide_about_the_qos_class_alone() -> None:
    manifest = read(pod(limits(cpu=2, memory="1Gi"), resources={}))
    assert (manifest.qos, manifest.pod.pod_level_resources) == (QosClass.BEST_EFFORT, False)
    assert manifest.pod.requests["cpu"] == 2000
    assert manifest.why == ("the pod has no limits.cpu", "the pod has no limits.memory")


def test_what_the_general_filter_needs_to_know_of_a_pod() -> None:
    plain = read(pod({}))
    assert (plain.pod.priority, plain.pod.critical, plain.node_name, plain.ended) == (None, False, "", False)
    document = pod(
        {"resources": {"requests": {"cpu": "100m", "memory": "1Mi", "ephemeral-storage": "1Gi"}}},
        overhead={"cpu": "250m", "memory": "120Mi"},
        priorityClassName="system-node-critical",
        nodeName="n1",
    )
    full = read(document | {"status": {"phase": "Succeeded"}})
    assert full.pod.requests == {"cpu": 350, "memory": 121 << 20, "ephemeral-storage": GIB}
    assert (full.pod.priority, full.pod.critical) == (2_000_001_000, True)
    assert (full.node_name, full.ended) == ("n1", True)
    assert read(pod({}, priority=1_000_000_000)).pod.critical is False


@pytest.mark.parametrize(
    ("annotations", "uid", "critical"),
    [
        ({"kubernetes.io/config.source": "file"}, "own", True),
        ({"kubernetes.io/config.source": "api"}, "own", False),
        # The API server's copy of a static pod; the kubelet knows the pod itself, by the hash of its manifest.
        ({"kubernetes.io/config.source": "file", "kubernetes.io/config.mirror": "hash"}, "hash", True),
    ],
)
def test_static_pods_are_critical(annotations: dict[str, str], uid: str, *, critical: bool) -> None:
    manifest = read(pod({}) | {"metadata": {"name": "p", "uid": "own", "annotations": annotations}})
    assert (manifest.pod.pod_uid, manifest.pod.static, manifest.pod.critical) == (uid, critical, critical)


def test_notes_for_the_operator() -> None:
    half = read(pod(limits(cpu="2500m", memory="1Gi")))
    assert half.notes == (
        "container 'c0' asks for 2500m CPUs, which is not a whole number: it runs in the shared pool",
    )
    burstable = read(pod({"resources": {"requests": {"cpu": 1}, "limits": {"hugepages-1Gi": "1Gi"}}}))
    assert burstable.notes == ("hugepages-1Gi: the Memory Manager places them for Guaranteed pods only",)


def test_what_is_not_known_of_resource_claims_is_said() -> None:
    """Which claims, of which container; that no manager of the kubelet looks at them; and claims that no container uses."""
    uses = [{"name": "gpus"}, {"name": "nics", "request": "fast"}]
    resources = {"resources": {"limits": {"cpu": 2, "memory": "1Gi"}, "claims": uses}}
    claims = [{"name": name, "resourceClaimTemplateName": "t"} for name in ("gpus", "nics", "spare")]
    first, second, third = read(pod(resources, limits(cpu=1, memory="1Gi"), resourceClaims=claims)).notes
    assert first == (
        "container 'c0' has devices by resource claims (DRA): 'gpus', 'nics' (request 'fast'); not known here: which devices "
        "these are, on which NUMA nodes, and whether this node has any left"
    )
    assert second.startswith(
        "the Topology Manager does not look at resource claims: their devices may be on other NUMA nodes"
    )
    assert second.endswith("CPUs or memory that a DRA driver gives are not in this plan")
    assert third == "no container uses the pod's resource claims 'spare'"
    assert read(pod(limits(cpu=2, memory="1Gi"), resourceClaims=claims[:1])).notes == (
        "no container uses the pod's resource claims 'gpus'",
    )
    assert read(pod(limits(cpu=2, memory="1Gi"))).notes == ()


def test_resource_claims_change_nothing_else() -> None:
    """They count neither for the QoS class nor as devices of device plugins."""
    resources = limits(cpu=2, memory="1Gi")
    with_claim = {"resources": {**resources["resources"], "claims": [{"name": "gpus"}]}}
    claimed = read(pod(with_claim, resourceClaims=[{"name": "gpus", "resourceClaimName": "two-gpus"}]))
    assert (claimed.pod, claimed.qos) == (read(pod(resources)).pod, QosClass.GUARANTEED)


@pytest.mark.parametrize(("amount", "millicpus"), [("0.1", 100), (0.5, 500), ("1e3m", None), ("100u", 1), (3, 3000)])
def test_quantities(amount: object, millicpus: int | None) -> None:
    if millicpus is None:
        with pytest.raises(SpecError, match="is not a quantity"):
            read(pod(limits(cpu=amount)))
    else:
        assert read(pod(limits(cpu=amount))).pod.containers[0].millicpus == millicpus


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"metadata": {}}, "kind: must be a string, found None"),
        ({"kind": "Pod"}, "spec: must be an object, found None"),
        ({"kind": "Pod", "spec": {}}, "spec.containers: must be a list, found None"),
        ({"kind": "Pod", "spec": {"containers": []}}, "spec.containers: must hold at least one container"),
        ({"kind": "Pod", "spec": {"containers": [{}]}}, "spec.containers[0].name: must be a string, found None"),
        ({"kind": "Pod", "spec": {"containers": ["c"]}}, "spec.containers[0]: must be an object, found 'c'"),
        ({"kind": "List", "items": {}}, "items: must be a list, found {}"),
        (
            pod({"resources": {"claims": [{"name": "gpu"}]}}, resourceClaims=[{"name": "gpus"}]),
            "spec.containers[0].resources.claims[0].name: must be the name of an entry of the pod's resourceClaims, found 'gpu'",
        ),
        (pod({"resources": {"claims": {}}}), "spec.containers[0].resources.claims: must be a list, found {}"),
        ({"kind": "Job", "spec": {}}, "spec.template: must be an object, found None"),
        (
            pod({"name": "c"}, {"name": "c"}),
            "spec.containers[1].name: 'c' is the name of another container already",
        ),
        (
            pod(limits(cpu="2x")),
            "spec.containers[0].resources.limits.cpu: '2x' is not a quantity like '4', '500m' or '1Gi'",
        ),
        (
            pod(limits(cpu=True)),
            "spec.containers[0].resources.limits.cpu: must be a quantity like '4', '500m' or '1Gi', found True",
        ),
        (pod(limits(memory=-1)), "spec.containers[0].resources.limits.memory: must not be negative, found -1"),
        (
            pod({"resources": {"requests": {"cpu": 3}, "limits": {"cpu": 2}}}),
            "spec.containers[0].resources.requests.cpu: must be less than or equal to the limit, 2",
        ),
        (
            pod({"resources": {"requests": {"hugepages-2Mi": "2Mi"}}}),
            "spec.containers[0].resources.requests.hugepages-2Mi: must have a limit that is the same",
        ),
        (
            pod(limits(**{"nvidia.com/gpu": "500m"})),
            "spec.containers[0].resources.limits.nvidia.com/gpu: must be a whole number, found 0.5",
        ),
        (
            pod({}, resources={"limits": {"nvidia.com/gpu": 1}}),
            "spec.resources: must be of cpu, memory and hugepages-SIZE for a whole pod, found 'nvidia.com/gpu'",
        ),
        (
            pod(limits(cpu=3), limits(cpu=3), resources={"requests": {"cpu": 5}}),
            "spec.resources.requests.cpu: must not be below the 6 that its containers request together",
        ),
        (
            pod(HALF, resources={"limits": {"cpu": 1}}),
            "spec.resources.limits.cpu: must not be below the limit of container 'c0', 2",
        ),
        (
            pod(limits(cpu=3), limits(cpu=3), resources={"limits": {"cpu": 5}}),
            "spec.resources.limits.cpu: must be less than or equal to the limit, 5",
        ),
        (pod({}, priority="high"), "spec.priority: must be a whole number, found 'high'"),
    ],
)
def test_pods_that_the_api_server_would_refuse_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(document)
    assert str(caught.value) == f"p.yaml: {message}"


KEYS = [
    "kind",
    "metadata",
    "name",
    "uid",
    "spec",
    "template",
    "items",
    "replicas",
    "containers",
    "initContainers",
    "restartPolicy",
    "resources",
    "limits",
    "requests",
    "cpu",
    "memory",
    "hugepages-2Mi",
    "a.b/c",
    "overhead",
    "priority",
    "priorityClassName",
    "nodeName",
    "annotations",
    "kubernetes.io/config.source",
    "kubernetes.io/config.mirror",
    "status",
    "phase",
]
NOISE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["Pod", "Job", "List", "1Gi", "2", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@given(NOISE, NOISE)
@settings(max_examples=300)
def test_noise_gives_a_spec_error_or_a_pod(document: object, resources: object) -> None:
    for each in (
        document,
        pod({"resources": resources}),
        {"kind": "Pod", "spec": document},
        pod({}) | {"metadata": document, "status": document},
    ):
        with contextlib.suppress(SpecError):
            parse_manifests([Value(each, "p.yaml")], pod_level_resources=True)

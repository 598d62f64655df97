"""The files of examples/monitoring agree with each other and with what the programs export."""

from __future__ import annotations

import json
import re

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from runner.controller.metrics import ControllerCounters, LoopStatus, controller_metrics
from runner.protocol.exposition import metrics_response
from tests.images.manifests import EXAMPLES as KUBERNETES
from tests.images.manifests import pod_specs, resources
from tests.support.exposition import figures
from tests.support.monitoring import EXAMPLES, THEIRS, alerts, dashboard, documents, exported, queries, rules, selected
from tests.unit.test_documents import ROOT, anchors_of, table_rows

SCHEMAS = yaml.safe_load((ROOT / "tests/data/prometheus_operator.json").read_text())
"""``openAPIV3Schema`` of the kinds' v1 in prometheus-operator 0.93.0, closed to unknown keys, without descriptions and the
pattern in Go's syntax."""
README = (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (a, b) (rate(x_total{c=~"d_e"}[5m])) > 0', {"x_total"}),
        ("x_y * on (job) group_left (name) z and on (a)\n w_v", {"x_y", "z", "w_v"}),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, names: set[str]) -> None:
    assert selected(expression) == names


@pytest.mark.parametrize("expression", [*alerts().values(), *(query for _, query in queries())])
def test_every_metric_that_is_asked_for_is_exported(expression: str) -> None:
    assert selected(expression) - exported() - THEIRS.keys() == set()


def test_a_metric_that_nobody_exports_is_noticed() -> None:
    assert selected("rate(instance_runner_vcpu_cpu_second_total[5m])") - exported()


def test_every_outcome_of_a_pass_is_counted_from_the_start() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    found = figures(
        metrics_response(controller_metrics(LoopStatus(ControllerCounters()))).text, "instance_cgroup_controller_"
    )
    passes = {name: value for name, value in found.items() if name.startswith("reconcile_passes_total")}
    outcomes = ("clean", "changed", "faulty", "frozen")
    assert passes == {f'reconcile_passes_total{{outcome="{outcome}"}}': 0 for outcome in outcomes}


@pytest.mark.parametrize("name", ["podmonitors.yaml", "rules.yaml"])
def test_each_object_is_one_that_the_operator_accepts(name: str) -> None:
    for each in documents(name):
        jsonschema.validate(each, SCHEMAS[each["kind"]])


def test_an_unknown_key_is_noticed() -> None:
    monitor = documents("podmonitors.yaml")[0]
    monitor["spec"]["podMetricsEndpoint"] = []
    with pytest.raises(jsonschema.ValidationError, match="podMetricsEndpoint"):
        jsonschema.validate(monitor, SCHEMAS["PodMonitor"])


def test_the_monitors_select_the_ports_of_the_manifests() -> None:
    found = {each["metadata"]["name"]: each["spec"] for each in documents("podmonitors.yaml")}
    controller, instance = found["instance-cgroup-controller"], found["instance-runner"]
    [daemon] = [each for each in resources("controller") if each["kind"] == "DaemonSet"]
    assert controller["selector"]["matchLabels"].items() <= daemon["spec"]["template"]["metadata"]["labels"].items()
    [pod] = pod_specs([daemon])
    probed = yaml.safe_load((KUBERNETES / "overlays/probes/pod.yaml").read_text())["spec"]
    for spec, monitor, namespace in ((pod, controller, "instance-runner"), (probed, instance, "instances")):
        assert monitor["namespaceSelector"] == {"matchNames": [namespace]}
        [endpoint] = monitor["podMetricsEndpoints"]
        assert [port["name"] for port in spec["containers"][0]["ports"]] == [endpoint["port"]]


def test_the_kustomization_has_every_file_but_the_readme() -> None:
    kustomized = yaml.safe_load((EXAMPLES / "kustomization.yaml").read_text())
    [dashboards] = kustomized["configMapGenerator"]
    named = {*kustomized["resources"], *dashboards["files"], "kustomization.yaml", "README.md"}
    assert {path.name for path in EXAMPLES.iterdir()} == named


def test_each_alert_says_what_it_means_and_is_explained() -> None:
    table = {row[0].strip("`"): row for row in table_rows(README, "| alert | it means | do |")}
    assert table.keys() == alerts().keys()
    assert len(table) > 10
    for rule in (rule for group in rules()["groups"] for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert not anchor or anchor in anchors_of(ROOT / page), rule["alert"]
        assert (ROOT / page).is_file()


def test_the_panels_of_the_dashboard_have_numbers_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_dashboard_has_every_figure_of_each_promise() -> None:
    """Panels are for what is promised, one or more of each; what instances report is chosen by node, namespace and name."""
    families = {name for _, query in queries() for name in selected(query)}
    promises = "instance_enforced disturbances pods_without_seccomp oom_kills_total frozen"
    of_an_instance = (
        "guest_ready guest_unready emulated placement_strays vcpu_run_delay_seconds_total vcpu_foreign_seconds_total "
        "guest_resets_total child_restarts_total disk_read_seconds_total network_receive_dropped_total build_info"
    )
    expected = {f"instance_cgroup_controller_{each}" for each in promises.split()}
    assert families >= expected | {f"instance_runner_{each}" for each in of_an_instance.split()}
    for title, query in queries():
        for selector in re.findall(r"instance_runner_\w+\{(.*?)\}", query):
            assert 'node=~"$node", pod_uid=~"$instance"' in selector, title


def test_the_name_of_an_instance_stands_for_its_uid() -> None:
    """As Grafana reads a variable: the series of its query as text, and the groups `text` and `value` of its expression."""
    instance = next(each for each in dashboard()["templating"]["list"] if each["name"] == "instance")
    expression = instance["regex"].strip("/").replace("(?<", "(?P<")
    labels = {"digest": "", "node": "n", "placement": "controller", "pod_uid": "3ceda12c", "reported_name": "web"}
    series = (
        "instance_runner_info{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "} 1 1700000000000"
    )
    found = re.search(expression, series)
    assert found is not None
    assert found.groupdict() == {"value": "3ceda12c", "text": "web"}


def unread(ours: object, theirs: object, place: str = "") -> list[str]:
    """Return where *theirs*, which was made of *ours* by Grafana's types, is not the same or lacks something."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key in ours for each in unread(ours[key], theirs.get(key, ...), f"{place}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for number, each in pairs for found in unread(*each, f"{place}/{number}")]
    return [] if ours == theirs else [place]


@pytest.mark.parametrize("mistake", ["", "descripton"])
def test_grafanas_schema_knows_every_key_of_the_dashboard(mistake: str) -> None:
    plugins.register_default_plugins()
    ours = dashboard()
    if mistake:
        ours["panels"][1][mistake] = "A key that there is not."
    read = json.loads(json.dumps(GrafanaDashboard.from_json(ours), cls=JSONEncoder))
    assert unread(ours, read) == ([f"/panels/1/{mistake}"] if mistake else [])


def test_the_dashboard_uses_the_variables_that_it_has() -> None:
    variables = dashboard()["templating"]["list"]
    declared = {each["name"] for each in variables}
    built_in = {"__rate_interval", "__range"}  # Grafana's own
    asked = [*(query for _, query in queries()), *(str(each["query"]) for each in variables)]
    used = {name for query in asked for name in re.findall(r"\$(\w+)", query)}
    assert used - built_in == declared - {"datasource"}

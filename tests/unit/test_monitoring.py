"""The files of examples/monitoring agree with each other and with what the programs export."""

from __future__ import annotations

import re

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

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


def test_the_dashboard_uses_the_variables_that_it_has() -> None:
    declared = {each["name"] for each in dashboard()["templating"]["list"]}
    built_in = {"__rate_interval", "__range"}  # Grafana's own
    used = {name for _, query in queries() for name in re.findall(r"\$(\w+)", query)}
    assert used - built_in == declared - {"datasource"}

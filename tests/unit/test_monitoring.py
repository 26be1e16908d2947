"""Dashboard, alert rules and scalers: what they name is exported, and the rules fire as they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from shared.rpc.edge import Edge, _attributes
from shared.telemetry.metrics import RouterMetrics, WorkerMetrics
from shared.telemetry.prometheus import PrometheusPage
from shared.telemetry.tracing import configure
from tests.support.prometheus import scrape

K8S = Path(__file__).parents[2] / "k8s" / "components"
RULES_TEST = Path(__file__).with_name("alerts_test.yaml")
# Added by whoever scrapes.
TARGET_LABELS = {"pool", "job", "namespace", "pod", "le"}
# Ours, as expressions have them.
NAMES = re.compile(r"\b(?:gen_ai|outrider|rpc|error)_\w+")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of samples and labels, of all instruments that the services have."""
    page = PrometheusPage("127.0.0.1", 0)
    telemetry = configure("outrider-test", None, page)
    try:
        router = RouterMetrics(telemetry.meter, "tiny")
        router.request_finished(1.0, "chat", "UNAVAILABLE")
        router.first_token(0.1, "chat")
        router.output_tokens(1.0, 10, "chat")
        router.admitted(0.1)
        router.placed(0.1, 0.1)
        router.round_verified("model", 4, 2)
        router.failed_over()
        router.watch_requests(lambda: 1, lambda: 1)
        router.watch_workers(lambda: {("target", "serving"): 1})
        worker = WorkerMetrics(telemetry.meter, "tiny")
        worker.step(3, 1)
        worker.prefix_hit(16)
        worker.watch_pressure(lambda: 1, lambda: 1)
        worker.transferred("worker", "nixl", 1, 0.1)
        worker.transfer_failed("store")
        worker.watch_prefix_store(lambda: {"hit": 1})
        worker.watch_engine(lambda: {"free": 1, "cached": 1, "owned": 1}, lambda: {"running": 1, "waiting": 0})
        Edge(telemetry)._duration.record(0.1, _attributes("/outrider.v1.Inference/Generate", grpc.StatusCode.OK))
        samples = scrape(page.port)
        return set(samples) | {label for series in samples.values() for labels in series for label, _ in labels}
    finally:
        telemetry.shutdown()


def expressions() -> Iterator[tuple[str, str]]:
    """Where each is, and what it says."""
    for group in yaml.safe_load((K8S / "monitoring" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for panel in json.loads((K8S / "monitoring" / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for scaler in yaml.safe_load_all((K8S / "autoscaling-keda" / "scalers.yaml").read_text()):
        for trigger in scaler["spec"]["triggers"]:
            yield f"scaler {scaler['metadata']['name']}", trigger["metadata"]["query"]
    for rules in yaml.safe_load((K8S / "autoscaling-hpa" / "adapter-rules.yaml").read_text())["rules"].values():
        for rule in rules:
            yield f"adapter rule {rule['name']['as']}", f"{rule['seriesQuery']} {rule['metricsQuery']}"


def test_what_is_named_is_exported(exported: set[str]) -> None:
    missing = [
        f"{where}: {name}" for where, text in expressions() for name in NAMES.findall(text) if name not in exported
    ]
    assert not missing


def test_a_metric_that_is_not_exported_would_be_seen(exported: set[str]) -> None:
    found = NAMES.findall('sum by (outrider_state) (rate(outrider_nothing_total{error_type!=""}[5m]))')
    assert [name for name in found if name not in exported] == ["outrider_nothing_total"]


def test_labels_that_nobody_adds_are_not_relied_on() -> None:
    """Braces and groupings hold labels of ours, or those that come with scraping."""
    for where, text in expressions():
        grouped = re.findall(r"by \(([^)<]*)\)", text)
        matched = re.findall(r"[{,]\s*(\w+)\s*[=!]~?", text)
        labels = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
        strange = {label for label in labels if not NAMES.fullmatch(label) and label not in TARGET_LABELS}
        assert not strange, where


def test_autoscalers_name_what_the_adapter_serves() -> None:
    served = yaml.safe_load((K8S / "autoscaling-hpa" / "adapter-rules.yaml").read_text())["rules"]
    names = {"Pods": {each["name"]["as"] for each in served["custom"]}}
    names["External"] = {each["name"]["as"] for each in served["external"]}
    wanted: dict[str, set[str]] = {"Pods": set(), "External": set()}
    for scaler in yaml.safe_load_all((K8S / "autoscaling-hpa" / "autoscalers.yaml").read_text()):
        for metric in scaler["spec"]["metrics"]:
            wanted[metric["type"]].add(metric[metric["type"].lower()]["metric"]["name"])
    assert wanted == names


def test_the_operator_is_given_the_same_rules() -> None:
    plain = yaml.safe_load((K8S / "monitoring" / "alerts.yaml").read_text())
    assert yaml.safe_load((K8S / "monitoring" / "prometheus-rule.yaml").read_text())["spec"] == plain


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_rules_fire_as_they_should() -> None:
    for command in (["check", "rules", str(K8S / "monitoring" / "alerts.yaml")], ["test", "rules", str(RULES_TEST)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    alerts = {
        rule["alert"] for rule in yaml.safe_load((K8S / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    }
    tested = {
        each["alertname"]
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for each in test["alert_rule_test"]
    }
    assert tested == alerts

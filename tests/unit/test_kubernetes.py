"""The manifests of k8s/: valid, and of one mind with the code; and the checks, which must be able to fail."""

from __future__ import annotations

import copy
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.manifests import name_of, of_kind, problems

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu", "gpu", "gpu-pools")
VERSIONS = ("1.32", "1.34")
# Of operators, whose schemas are theirs.
FOREIGN = {"Certificate", "Issuer", "ServiceMonitor", "PrometheusRule", "ScaledObject", "GRPCRoute", "BackendTLSPolicy"}

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@cache
def _built(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(ROOT / "k8s" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def built(overlay: str) -> list[Any]:
    """Its documents, to be changed at will."""
    return list(yaml.safe_load_all(_built(overlay)))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_wrong_with_an_overlay(overlay: str) -> None:
    assert problems(built(overlay)) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str, version: str) -> None:
    documents = built(overlay)
    for document in documents:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, version, strict=True)
    assert {each["kind"] for each in documents} >= {"Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget"}


def test_what_each_overlay_is_made_of() -> None:
    def found(overlay: str, *kinds: str) -> set[str]:
        return {name_of(each) for each in of_kind(built(overlay), *kinds)}

    assert found("cpu", "Deployment") == {"router", "draft", "prefill", "decode"}
    assert found("gpu", "Deployment") == {"router", "draft", "decode"}
    assert found("gpu-pools", "Deployment") == {"router", "draft", "prefill", "decode"}
    assert found("gpu", "ScaledObject") == {"router", "decode"}
    assert found("gpu-pools", "HorizontalPodAutoscaler") == {"router", "prefill", "decode"}
    assert found("gpu-pools", "GRPCRoute") == {"outrider"}
    # Whoever speaks to the routers for clients has to speak as they do.
    assert found("gpu-pools", "BackendTLSPolicy") == {"router"}
    for name, spoken in (("cpu", "kubernetes.io/h2c"), ("gpu-pools", "https")):
        (service,) = [each for each in of_kind(built(name), "Service") if name_of(each) == "router"]
        assert service["spec"]["ports"][0]["appProtocol"] == spoken
    # A number beside an autoscaler would undo what that has done, with every apply.
    for name, fixed in (("cpu", True), ("gpu", False), ("gpu-pools", False)):
        (decode,) = [each for each in of_kind(built(name), "Deployment") if name_of(each) == "decode"]
        assert ("replicas" in decode["spec"]) == fixed
    for overlay in ("gpu", "gpu-pools"):
        for deployment in of_kind(built(overlay), "Deployment"):
            limits = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert ("nvidia.com/gpu" in limits) == (name_of(deployment) != "router")


def test_every_component_is_used_or_tried(tmp_path: Path) -> None:
    """The one that no overlay has, in an overlay of its own."""
    used = "".join((ROOT / "k8s" / "overlays" / each / "kustomization.yaml").read_text() for each in OVERLAYS)
    components = {path.name for path in (ROOT / "k8s" / "components").iterdir()}
    assert {each for each in components if f"components/{each}\n" not in used} == {
        "model-download",
        "model-download-policy",
    }
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "cpu" / "kustomization.yaml"
    overlay.write_text(
        overlay.read_text().replace(
            "components:\n",
            "components:\n  - ../../components/model-download\n  - ../../components/model-download-policy\n",
        )
    )
    done = subprocess.run(["kubectl", "kustomize", overlay.parent], capture_output=True, text=True, check=True)
    documents = list(yaml.safe_load_all(done.stdout))
    assert problems(documents) == []
    for deployment in of_kind(documents, "Deployment"):
        (init,) = deployment["spec"]["template"]["spec"]["initContainers"]
        assert init["image"] == "outrider:latest"
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        assert "emptyDir" in volumes["models"]
        for version in VERSIONS:
            kubernetes_validate.validate(deployment, version, strict=True)


def test_the_overlay_of_the_readme(tmp_path: Path) -> None:
    """As it stands there, and with models that are fetched, as their component says."""
    (overlay,) = re.findall(r"```yaml\n(namespace:.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    component = (ROOT / "k8s" / "components" / "model-download" / "kustomization.yaml").read_text(encoding="utf-8")
    fetched = "".join(re.findall(r"^#   (.*\n)", component, re.MULTILINE))
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    mine = tmp_path / "k8s" / "overlays" / "mine" / "kustomization.yaml"
    mine.parent.mkdir()
    more = "components: [../../components/model-download, ../../components/model-download-policy, "
    for text in (overlay, overlay.replace("components: [", more) + fetched):
        mine.write_text(text)
        done = subprocess.run(["kubectl", "kustomize", mine.parent], capture_output=True, text=True, check=True)
        documents = list(yaml.safe_load_all(done.stdout))
        images = {container(documents, name)["image"] for name in ("router", "draft", "prefill", "decode")}
        assert images == {"registry.example/outrider:0.1"}
        assert "OUTRIDER_TARGET_TLS_CERT" in settings(documents)
        assert [each for each in problems(documents) if "image" not in each] == []
    assert "url: https://...\n" in done.stdout


# Mutations: each of them one of the checks has to see.


def workload(documents: list[Any], name: str) -> Any:
    (found,) = [each for each in of_kind(documents, "Deployment", "StatefulSet") if name_of(each) == name]
    return found["spec"]["template"]["spec"]


def container(documents: list[Any], name: str) -> Any:
    return workload(documents, name)["containers"][0]


def settings(documents: list[Any]) -> Any:
    (found,) = [each for each in of_kind(documents, "ConfigMap") if name_of(each).startswith("outrider-settings")]
    return found["data"]


def one(documents: list[Any], kind: str, name: str) -> Any:
    (found,) = [each for each in of_kind(documents, kind) if name_of(each) == name]
    return found


MUTATIONS: dict[str, Callable[[list[Any]], object]] = {
    "a variable that is no setting": lambda d: settings(d).update(OUTRIDER_ROUTER_NAME="x"),
    "a value that is none": lambda d: settings(d).update(OUTRIDER_TARGET_KV_TRANSFER="carrier pigeon"),
    "a required setting is gone": lambda d: settings(d).pop("OUTRIDER_ROUTER_TOKENIZER"),
    "another port": lambda d: settings(d).update(OUTRIDER_TARGET_PORT="50055"),
    "another health port": lambda d: settings(d).update(OUTRIDER_DRAFT_HEALTH_PORT="50099"),
    "another metrics port": lambda d: settings(d).update(OUTRIDER_ROUTER_METRICS_PORT="9999"),
    "another Redis": lambda d: settings(d).update(OUTRIDER_DRAFT_REDIS_URL="redis://outrider@cache:6379"),
    "another Redis port": lambda d: settings(d).update(OUTRIDER_DRAFT_REDIS_URL="redis://outrider@redis:6380"),
    "less memory than it takes": lambda d: container(d, "router")["resources"]["requests"].update(memory="256Mi"),
    "a longer drain": lambda d: settings(d).update(OUTRIDER_TARGET_DRAIN_SECONDS="600"),
    "a shorter grace": lambda d: workload(d, "router").update(terminationGracePeriodSeconds=30),
    "a longer sleep": lambda d: container(d, "draft")["lifecycle"]["preStop"]["sleep"].update(seconds=20),
    "a service that nobody knows": lambda d: container(d, "prefill").update(args=["targets"]),
    "an option that nobody knows": lambda d: container(d, "prefill").update(args=["target", "--part", "prefill"]),
    "a role that there is not": lambda d: container(d, "prefill").update(args=["target", "--role", "both-ish"]),
    "an image that nobody builds": lambda d: container(d, "draft").update(image="outsider:latest"),
    "an image without a tag": lambda d: container(d, "draft").update(image="outrider"),
    "settings of nowhere": lambda d: container(d, "draft").update(envFrom=[{"configMapRef": {"name": "other"}}]),
    "an account of nowhere": lambda d: workload(d, "draft").update(serviceAccountName="other"),
    "a volume of nowhere": lambda d: workload(d, "draft").update(volumes=workload(d, "draft")["volumes"][:-1]),
    "a Secret that nothing makes": lambda d: workload(d, "draft")["volumes"][0]["secret"].update(secretName="other"),
    "another's Secret": lambda d: workload(d, "router")["volumes"][0]["secret"].update(secretName="outrider-draft"),
    "a file that is not mounted": lambda d: settings(d).update(OUTRIDER_DRAFT_TOKEN_FILE="/run/secrets/token"),
    "no readiness": lambda d: container(d, "decode").pop("readinessProbe"),
    "a probe of no service": lambda d: container(d, "decode")["readinessProbe"]["grpc"].update(service="ready"),
    "a probe of another port": lambda d: container(d, "decode")["readinessProbe"]["grpc"].update(port=50052),
    "a death for not serving": lambda d: container(d, "decode")["livenessProbe"]["grpc"].update(service=""),
    "no time to load": lambda d: container(d, "decode")["startupProbe"].update(failureThreshold=6),
    "a Service of nothing": lambda d: one(d, "Service", "draft")["spec"].update(selector={"app": "other"}),
    "a Service to no port": lambda d: one(d, "Service", "draft")["spec"]["ports"][0].update(targetPort="http"),
    "a Service with another port": lambda d: one(d, "Service", "draft")["spec"]["ports"][0].update(port=80),
    "a Service with an address": lambda d: one(d, "Service", "router")["spec"].pop("clusterIP"),
    "a budget for nothing": lambda d: one(d, "PodDisruptionBudget", "draft")["spec"].update(
        selector={"matchLabels": {"app": "other"}}
    ),
    "a policy for nothing": lambda d: one(d, "NetworkPolicy", "draft")["spec"].update(
        podSelector={"matchLabels": {"app": "other"}}
    ),
    "a flow too few": lambda d: one(d, "NetworkPolicy", "target")["spec"]["ingress"][0]["from"].pop(0),
    "a flow too many": lambda d: one(d, "NetworkPolicy", "draft")["spec"]["egress"].append({}),
    "a port too many": lambda d: one(d, "NetworkPolicy", "router")["spec"]["ingress"][0]["ports"].append(
        {"protocol": "TCP", "port": 50061}
    ),
    "no default": lambda d: d.remove(one(d, "NetworkPolicy", "default-deny")),
    "no DNS": lambda d: d.remove(one(d, "NetworkPolicy", "dns")),
    "an address of others": lambda d: container(d, "decode").update(
        env=[{"name": "OUTRIDER_TARGET_ADVERTISE", "value": "$(POD_IP):50051"}]
    ),
    "root": lambda d: workload(d, "redis")["securityContext"].pop("runAsNonRoot"),
    "privileges": lambda d: container(d, "redis")["securityContext"].update(allowPrivilegeEscalation=True),
    "a root that can be written": lambda d: container(d, "draft")["securityContext"].pop("readOnlyRootFilesystem"),
    "a token of the cluster's": lambda d: workload(d, "draft").pop("automountServiceAccountToken"),
    "no limit": lambda d: container(d, "draft")["resources"].pop("limits"),
    "scales nothing": lambda d: one(d, "HorizontalPodAutoscaler", "decode")["spec"]["scaleTargetRef"].update(name="x"),
    "a certificate of others": lambda d: one(d, "Certificate", "outrider-draft")["spec"].update(dnsNames=["draft"]),
    "a certificate that is not made": lambda d: d.remove(one(d, "Certificate", "outrider-redis")),
    "monitors nothing": lambda d: one(d, "ServiceMonitor", "outrider")["spec"].update(
        selector={"matchLabels": {"app": "other"}}
    ),
    "no way to the collector": lambda d: d.remove(one(d, "NetworkPolicy", "telemetry")),
    "no way for nixl": lambda d: d.remove(one(d, "NetworkPolicy", "nixl")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(name: str) -> None:
    documents = copy.deepcopy(built("gpu-pools"))
    MUTATIONS[name](documents)
    assert problems(documents)


CPU_MUTATIONS: dict[str, Callable[[list[Any]], object]] = {
    "a cache as large as there is room": lambda d: settings(d).pop("OUTRIDER_TARGET_KV_CACHE_GIB"),
    "a cache beyond what is requested": lambda d: settings(d).update(OUTRIDER_DRAFT_KV_CACHE_GIB="2"),
}


@pytest.mark.parametrize("name", CPU_MUTATIONS)
def test_a_mutation_of_the_overlay_for_cpus_is_seen(name: str) -> None:
    documents = copy.deepcopy(built("cpu"))
    CPU_MUTATIONS[name](documents)
    assert problems(documents)


# Models that are fetched


@pytest.fixture
def archive(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    def make(name: str) -> tuple[str, str]:
        path = tmp_path / "pair.tar.gz"
        with tarfile.open(path, "w:gz") as packed:
            content = b"{}"
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
        return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()

    return make


def fetch(url: str, sha256: str, folder: Path) -> tuple[int, str]:
    script = ROOT / "k8s" / "components" / "model-download" / "fetch_models.py"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, script, folder],
        env={"MODELS_URL": url, "MODELS_SHA256": sha256},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_models_are_fetched(archive: Callable[[str], tuple[str, str]], tmp_path: Path) -> None:
    assert fetch(*archive("target/config.json"), tmp_path / "models") == (0, "")
    assert [str(path.relative_to(tmp_path / "models")) for path in (tmp_path / "models").rglob("*.*")] == [
        "target/config.json"
    ]


def test_models_that_are_not_what_they_should_be(archive: Callable[[str], tuple[str, str]], tmp_path: Path) -> None:
    url, sha256 = archive("target/config.json")
    status, error = fetch(url, "0" * 64, tmp_path / "models")
    assert (status, error) == (1, f"models not fetched: {url} has SHA-256 {sha256}, not {'0' * 64}\n")
    assert list((tmp_path / "models").iterdir()) == []


def test_models_that_want_to_be_elsewhere(archive: Callable[[str], tuple[str, str]], tmp_path: Path) -> None:
    status, error = fetch(*archive("../config.json"), tmp_path / "models")
    assert status == 1
    assert "outside" in error
    assert not (tmp_path / "config.json").exists()


def test_models_of_nowhere(tmp_path: Path) -> None:
    status, error = fetch((tmp_path / "nothing").as_uri(), "0" * 64, tmp_path / "models")
    assert status == 1
    assert error.startswith("models not fetched: ")
    assert error.count("\n") == 1

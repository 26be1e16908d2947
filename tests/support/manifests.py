"""Kubernetes manifests and the compose file, held to each other and to the code: what is wrong with them, in words.

Every function takes all documents of an overlay, and returns a line for each thing that is not as it should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.rpc.health import LIVE
from shared.security.identity import certificate_name
from shared.settings import ServiceSettings, SettingsError

Document = Mapping[str, Any]

SERVICES: Final[Mapping[str, type[ServiceSettings]]] = {
    "router": RouterSettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
HEALTH_SERVICES: Final = {
    "router": {"", LIVE, "outrider.v1.Inference"},
    "target": {"", LIVE, "outrider.v1.Target", "outrider.v1.Transfer"},
    "draft": {"", LIVE, "outrider.v1.Drafter"},
}
# What `outrider secrets` makes for each, and the token beside it.
SECRET_FILES: Final = {
    "outrider-router": {"token", "redis-password", "api-keys.toml", "settings.toml"},
    "outrider-target": {"token", "redis-password"},
    "outrider-draft": {"token", "redis-password"},
    "outrider-redis": {"users.acl", "password"},
}
TLS_FILES: Final = {"tls.crt", "tls.key", "ca.crt"}
# Resident, under `make soak`'s load with the demo pair, without the KV cache; rounded up.
MEASURED_GIB: Final = {"router": 0.6, "target": 0.7, "draft": 0.7}
# Beyond the drain, to end in order.
_SPARE_SECONDS = 5
# Those that anything has, and one that nothing has.
_LOOKED_AT: Final = (53, 443, 4317, 6379, 9464, 40000, 50051, 50052, 50053, 50061)
# What else a pod may reach, or be reached by.
CLIENT, MONITORING, DNS, WEB = "client", "monitoring", "dns", "web"


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet, its one container, and what it runs; `service` is "" for what is not ours."""

    name: str
    document: Document
    service: str
    settings: Mapping[str, str]

    @property
    def pod(self) -> Document:
        return self.document["spec"]["template"]["spec"]  # type: ignore[no-any-return]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.document["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]

    @property
    def container(self) -> Document:
        return self.pod["containers"][0]  # type: ignore[no-any-return]

    def port(self, name: str) -> int | None:
        """The number of a container port."""
        return next(
            (int(each["containerPort"]) for each in self.container.get("ports", ()) if each["name"] == name), None
        )

    def setting(self, name: str) -> str | None:
        """Its text, as given; flags are not looked at."""
        return self.settings.get(SERVICES[self.service].environment_name(name))


def of_kind(documents: Sequence[Document], *kinds: str) -> Iterator[Document]:
    for document in documents:
        if document["kind"] in kinds:
            yield document


def name_of(document: Document) -> str:
    return str(document["metadata"]["name"])


def workloads(documents: Sequence[Document]) -> list[Workload]:
    maps = {name_of(each): each.get("data", {}) for each in of_kind(documents, "ConfigMap")}
    found = []
    for document in of_kind(documents, "Deployment", "StatefulSet"):
        container = document["spec"]["template"]["spec"]["containers"][0]
        settings: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            settings |= maps.get(source["configMapRef"]["name"], {})
        settings |= {each["name"]: str(each.get("value", "")) for each in container.get("env", ())}
        service = container.get("args", [""])[0]
        found.append(Workload(name_of(document), document, service if service in SERVICES else "", settings))
    return found


def problems(documents: Sequence[Document]) -> list[str]:
    """Of an overlay as it is built."""
    checks = (
        _references,
        _settings,
        _commands,
        _ports,
        _probes,
        _graces,
        _selectors,
        _files,
        _restrictions,
        _memory,
        _certificates,
        _flows,
    )
    return [problem for check in checks for problem in check(documents)]


def setting_problems(environment: Mapping[str, str], service: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Of variables for one service, with its command's options."""
    known = {each.environment_name(name) for each in SERVICES.values() for name in each.model_fields}
    for variable in environment:
        if variable.startswith("OUTRIDER_") and variable not in known:
            yield f"{variable} is no setting"
    settings_class = SERVICES[service]
    names = {settings_class.environment_name(name): name for name in settings_class.model_fields}
    values: dict[str, object] = {names[key]: value for key, value in environment.items() if key in names and value}
    options = iter(arguments)
    for option in options:
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in settings_class.model_fields:
            yield f"outrider {service} has no option {option}"
        values[name] = next(options, "")
    # The file is not here; what it holds, the router's secret, is not missed.
    values.pop("config", None)
    try:
        settings_class.load(**values)
    except SettingsError as error:
        yield str(error)


def _references(documents: Sequence[Document]) -> Iterator[str]:
    """Names that others go by."""
    maps = {name_of(each) for each in of_kind(documents, "ConfigMap")}
    accounts = {name_of(each) for each in of_kind(documents, "ServiceAccount")}
    for workload in workloads(documents):
        if workload.pod.get("serviceAccountName") not in accounts:
            yield f"{workload.name} has a ServiceAccount that is not there"
        for source in workload.container.get("envFrom", ()):
            if source["configMapRef"]["name"] not in maps:
                yield f"{workload.name} has settings of a ConfigMap that is not there"
        volumes = {each["name"] for each in workload.pod.get("volumes", ())}
        volumes |= {name_of(each) for each in workload.document["spec"].get("volumeClaimTemplates", ())}
        for container in (*workload.pod["containers"], *workload.pod.get("initContainers", ())):
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes:
                    yield f"{workload.name} mounts a volume {mount['name']} that is not there"
        if workload.document["kind"] == "StatefulSet":
            services = {name_of(each) for each in of_kind(documents, "Service")}
            if workload.document["spec"]["serviceName"] not in services:
                yield f"{workload.name} is of a Service that is not there"
    scaled = {each.name for each in workloads(documents)}
    for scaler in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject"):
        if scaler["spec"]["scaleTargetRef"]["name"] not in scaled:
            yield f"{scaler['kind']} {name_of(scaler)} scales what is not there"


def _settings(documents: Sequence[Document]) -> Iterator[str]:
    for workload in workloads(documents):
        if workload.service:
            arguments = workload.container["args"][1:]
            for problem in setting_problems(workload.settings, workload.service, arguments):
                yield f"{workload.name}: {problem}"


def _commands(documents: Sequence[Document]) -> Iterator[str]:
    for workload in workloads(documents):
        image = str(workload.container["image"])
        name = image.rpartition("/")[2].partition(":")[0]
        if name not in ("outrider", "redis"):
            yield f"{workload.name} is of an image {image}, which nobody builds"
        if ":" not in image:
            yield f"{workload.name} is of an image without a tag"
        if name == "outrider" and not workload.service:
            yield f"{workload.name} runs `outrider {' '.join(workload.container.get('args', []))}`, which is no service"


def _ports(documents: Sequence[Document]) -> Iterator[str]:
    by_labels = workloads(documents)
    for workload in by_labels:
        if not workload.service:
            continue
        for name, setting in (("grpc", "port"), ("health", "health_port"), ("metrics", "metrics_port")):
            wanted = workload.setting(setting)
            if str(workload.port(name)) != wanted:
                yield f"{workload.name}: port {name} is {workload.port(name)}, and {setting} {wanted}"
        advertised = workload.setting("advertise") if workload.service != "router" else None
        if workload.service != "router" and advertised != f"$(POD_IP):{workload.port('grpc')}":
            yield f"{workload.name} advertises {advertised}, and listens on {workload.port('grpc')}"
        redis = workload.setting("redis_url") or ""
        services = {name_of(each): each for each in of_kind(documents, "Service")}
        host, _, port = re.sub(r"^\w+://(?:[^@]*@)?", "", redis).partition("?")[0].partition(":")
        if host in services and port not in {str(each["port"]) for each in services[host]["spec"]["ports"]}:
            yield f"{workload.name} looks for Redis at {redis}, where the Service has another port"
        if host not in services and "." not in host:
            yield f"{workload.name} looks for Redis at {redis}, and there is no such Service"
    for service in of_kind(documents, "Service"):
        for selected in (each for each in by_labels if _matches(service["spec"]["selector"], each.labels)):
            for port in service["spec"]["ports"]:
                number = selected.port(port["targetPort"])
                if number is None:
                    yield f"Service {name_of(service)} leads to {port['targetPort']}, which {selected.name} has not"
                elif number != port["port"]:
                    yield f"Service {name_of(service)} has port {port['port']}, and {selected.name} {number}"


def _probes(documents: Sequence[Document]) -> Iterator[str]:
    for workload in workloads(documents):
        if not workload.service:
            continue
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = workload.container.get(name, {}).get("grpc")
            if probe is None:
                yield f"{workload.name} has no {name} by gRPC"
                continue
            if str(probe["port"]) != workload.setting("health_port"):
                yield f"{workload.name}: {name} asks port {probe['port']}, and health is at another"
            if probe.get("service", "") not in HEALTH_SERVICES[workload.service]:
                yield f"{workload.name}: {name} asks for {probe['service']}, of which no health is known"
        if workload.container.get("livenessProbe", {}).get("grpc", {}).get("service") != LIVE:
            yield f"{workload.name} would be killed whenever it does not serve"
        startup = workload.container.get("startupProbe", {})
        patience = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        if workload.service != "router" and patience < 900:
            yield f"{workload.name} has {patience} s to load its model, less than 900"


def _graces(documents: Sequence[Document]) -> Iterator[str]:
    for workload in workloads(documents):
        if workload.service:
            sleep = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            drain = float(workload.setting("drain_seconds") or 30)
            grace = workload.pod.get("terminationGracePeriodSeconds", 30)
            if grace < sleep + drain + _SPARE_SECONDS:
                yield f"{workload.name} is killed after {grace} s, and drains for {drain:g} s from {sleep} s on"


def _selectors(documents: Sequence[Document]) -> Iterator[str]:
    pods = [each.labels for each in workloads(documents)]
    for document in of_kind(documents, "Service"):
        if not any(_matches(document["spec"]["selector"], labels) for labels in pods):
            yield f"Service {name_of(document)} selects nothing"
        if document["spec"].get("clusterIP") != "None":
            yield f"Service {name_of(document)} is not headless: one connection would go to one pod"
    for document in of_kind(documents, "PodDisruptionBudget"):
        if not any(_selects(document["spec"]["selector"], labels) for labels in pods):
            yield f"PodDisruptionBudget {name_of(document)} selects nothing"
    for document in of_kind(documents, "Deployment", "StatefulSet"):
        labels = document["spec"]["template"]["metadata"]["labels"]
        if not _selects(document["spec"]["selector"], labels):
            yield f"{name_of(document)} does not select its own pods"
    services = [each["metadata"].get("labels", {}) for each in of_kind(documents, "Service")]
    for document in of_kind(documents, "ServiceMonitor"):
        if not any(_selects(document["spec"]["selector"], labels) for labels in services):
            yield f"ServiceMonitor {name_of(document)} selects nothing"
    for document in of_kind(documents, "NetworkPolicy"):
        if not any(_selects(document["spec"]["podSelector"], labels) for labels in pods):
            yield f"NetworkPolicy {name_of(document)} selects nothing"


def _files(documents: Sequence[Document]) -> Iterator[str]:
    """Settings that name files, and what is mounted there."""
    for workload in workloads(documents):
        mounted: dict[str, set[str]] = {}
        secrets = {each["name"]: each["secret"] for each in workload.pod["volumes"] if "secret" in each}
        for mount in workload.container["volumeMounts"]:
            if mount["name"] in secrets:
                secret = secrets[mount["name"]]["secretName"]
                files = TLS_FILES if secret.endswith("-tls") else SECRET_FILES.get(secret)
                if files is None:
                    yield f"{workload.name} mounts the Secret {secret}, which nothing makes"
                mounted[mount["mountPath"]] = files or set()
        for name, text in _texts(workload):
            for path in re.findall(r"/run/secrets/[\w./-]+", text):
                folder, _, file = path.rpartition("/")
                if file not in mounted.get(folder, ()):
                    yield f"{workload.name}: {name} is {path}, which is not mounted"


def _texts(workload: Workload) -> Iterator[tuple[str, str]]:
    """Settings and arguments of its own, by name."""
    own = {"OUTRIDER_CONFIG"} if workload.service == "router" else set()
    for variable, value in workload.settings.items():
        if variable in own or variable.startswith(f"OUTRIDER_{workload.service.upper()}_"):
            yield variable, value
    for argument in workload.container.get("args", ()):
        yield "an argument", argument


def _restrictions(documents: Sequence[Document]) -> Iterator[str]:
    """What the restricted Pod Security Standard wants, and a read-only root."""
    for workload in workloads(documents):
        context = workload.pod.get("securityContext", {})
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            yield f"{workload.name} may run as root"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{workload.name} may call anything of the kernel's"
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield f"{workload.name} has a token of the cluster's"
        for container in (*workload.pod["containers"], *workload.pod.get("initContainers", ())):
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{workload.name} may gain privileges"
            if not own.get("readOnlyRootFilesystem"):
                yield f"{workload.name} may write to its root"
            resources = container.get("resources", {})
            if (
                "memory" not in resources.get("limits", {})
                or not {"cpu", "memory"} <= resources.get("requests", {}).keys()
            ):
                yield f"{workload.name} does not say what it takes"


def _memory(documents: Sequence[Document]) -> Iterator[str]:
    """Memory requested, against what each service was measured to take."""
    for workload in workloads(documents):
        if not workload.service:
            continue
        resources = workload.container.get("resources", {})
        requested = _gibibytes(resources.get("requests", {}).get("memory", "0Gi"))
        cache = 0.0
        if workload.service != "router" and "nvidia.com/gpu" not in resources.get("limits", {}):
            given = workload.setting("kv_cache_gib")
            if given is None:
                yield f"{workload.name} takes as much memory for KV as it finds"
                continue
            cache = float(given)
        taken = MEASURED_GIB[workload.service] + cache
        if requested < taken:
            yield f"{workload.name} requests {requested:g} GiB and takes {taken:g}"


def _gibibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([MG]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) / (1024 if unit == "Mi" else 1)


def _certificates(documents: Sequence[Document]) -> Iterator[str]:
    made = {each["spec"]["secretName"]: each["spec"].get("dnsNames", []) for each in of_kind(documents, "Certificate")}
    for workload in workloads(documents):
        for volume in workload.pod.get("volumes", ()):
            secret = volume.get("secret", {}).get("secretName", "")
            if not secret.endswith("-tls"):
                continue
            if secret not in made:
                yield f"{workload.name} mounts {secret}, which no Certificate makes"
            elif workload.service and certificate_name(workload.service, "default") not in made[secret]:  # type: ignore[arg-type]
                yield f"{workload.name} shows a certificate without {certificate_name(workload.service, 'default')}"  # type: ignore[arg-type]


# Who connects to whom


def _flows(documents: Sequence[Document]) -> Iterator[str]:
    """Connections that policies allow, and those that the services make."""
    if not any(of_kind(documents, "NetworkPolicy")):
        return
    wanted, allowed = set(_wanted_flows(documents)), set(_allowed_flows(documents))
    for source, destination, port in sorted(wanted - allowed):
        yield f"NetworkPolicies keep {source} from {destination}, port {port}"
    for source, destination, port in sorted(allowed - wanted):
        yield f"NetworkPolicies let {source} reach {destination}, port {port}, which it never does"


def _wanted_flows(documents: Sequence[Document]) -> Iterator[tuple[str, str, int]]:
    """What the code does: a router calls workers, target workers read from each other, all use Redis."""
    found = workloads(documents)
    for workload in found:
        if not workload.service:
            continue
        port = workload.port("grpc")
        assert port is not None
        callers = {"router": (), "target": ("router", "target"), "draft": ("router",)}[workload.service]
        for other in found:
            if other.service in callers:
                yield other.name, workload.name, port
            if other.name == "redis":
                yield workload.name, other.name, 6379
        if workload.service == "router":
            yield CLIENT, workload.name, port
        yield workload.name, DNS, 53
        if "initContainers" in workload.pod:
            yield workload.name, WEB, 443
        yield MONITORING, workload.name, int(workload.setting("metrics_port") or 0)
        if endpoint := workload.setting("otlp_endpoint"):
            yield workload.name, MONITORING, int(endpoint.rpartition(":")[2])
        if workload.service == "target" and workload.setting("kv_transfer") != "grpc":
            for other in found:
                if other.service == "target":
                    # nixl's own, which may be any.
                    for each in _LOOKED_AT:
                        if each >= 1024:
                            yield other.name, workload.name, each


def _allowed_flows(documents: Sequence[Document]) -> Iterator[tuple[str, str, int]]:
    policies = list(of_kind(documents, "NetworkPolicy"))
    labels = {each.name: each.labels for each in workloads(documents)}
    ends = (*labels, CLIENT, MONITORING, DNS, WEB)
    for source in ends:
        for destination in ends:
            for port in _LOOKED_AT:
                if source not in labels and destination not in labels:
                    continue
                if _may(policies, labels, source, destination, port, "Egress") and _may(
                    policies, labels, destination, source, port, "Ingress"
                ):
                    # Clients stand for anybody: who is named besides is told by name.
                    if destination == "router" and port == 50051 and source != CLIENT:
                        continue
                    yield source, destination, port


def _may(
    policies: Sequence[Document], labels: Mapping[str, Mapping[str, str]], own: str, other: str, port: int, way: str
) -> bool:
    """Whether policies let `own` talk to `other` that way. Who is not ours may do anything."""
    if own not in labels:
        return True
    rules, restricted = [], False
    for policy in policies:
        if _selects(policy["spec"]["podSelector"], labels[own]) and way in policy["spec"]["policyTypes"]:
            restricted = True
            rules += policy["spec"].get(way.lower(), [])
    if not restricted:
        return True
    peers = "to" if way == "Egress" else "from"
    for rule in rules:
        matches_port = "ports" not in rule or any(
            each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"]
        )
        if matches_port and (peers not in rule or any(_is_peer(peer, other, labels) for peer in rule[peers])):
            return True
    return False


def _is_peer(peer: Document, other: str, labels: Mapping[str, Mapping[str, str]]) -> bool:
    if "ipBlock" in peer:
        return other == WEB
    namespace = peer.get("namespaceSelector")
    if namespace is None:
        return other in labels and _selects(peer["podSelector"], labels[other])
    if other == MONITORING:
        return bool(namespace == {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}})
    return other == DNS and bool(peer.get("podSelector") == {"matchLabels": {"k8s-app": "kube-dns"}})


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    expressions = all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )
    return expressions and _matches(selector.get("matchLabels", {}), labels)


def _matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())

"""The direction of imports, and what every folder says of itself, read from the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("services", "shared")
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").is_file())
FOLDERS = sorted({path.parent for top in OURS for path in (ROOT / top).rglob("*.py")})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for top in OURS for path in sorted((ROOT / top).rglob("*.py"))}


def imports_in(source: str, package: str) -> set[str]:
    """Modules that a source names in its imports, at the top or within functions; `from a import b` names a and a.b.

    Imports that only type checkers follow (`if TYPE_CHECKING:`) do not count.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for alternative in node.orelse:
                visit(alternative)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                beginning = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*beginning, *([node.module] if node.module else [])])
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


@cache
def imports(module: str) -> frozenset[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(imports_in(path.read_text(), package))


@cache
def reachable(module: str) -> frozenset[str]:
    """Everything that importing a module imports, of ours and of others; our packages run their `__init__` too."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            todo.extend(imports(name))
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return frozenset(seen)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_imports_are_read_rightly() -> None:
    source = """
import os.path
from a.b import c as d
from . import sibling
from ..shared.thing import x
if TYPE_CHECKING:
    import never
else:
    import otherwise
def later():
    import lazily
"""
    assert imports_in(source, "p.q") == {
        *("os.path", "a.b", "a.b.c", "p.q", "p.q.sibling", "p.shared.thing", "p.shared.thing.x", "otherwise", "lazily")
    }
    assert "shared.engine.sequence" in reachable("shared.engine.scheduler")
    assert "torch" in reachable("shared.engine.engine")
    assert len(MODULES) > 50
    assert {"cli", "draft", "router", "target"} <= set(SERVICES)


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, "shared")])
def test_shared_never_imports_services(module: str) -> None:
    assert not [name for name in imports(module) if within(name, "services")]


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "cli"])
def test_services_never_import_each_other(service: str) -> None:
    others = tuple(f"services.{other}" for other in SERVICES if other != service)
    for module in (name for name in MODULES if within(name, f"services.{service}")):
        assert not [name for name in imports(module) if within(name, *others)], module


def test_of_other_services_the_cli_imports_settings_only() -> None:
    """It starts a service's server by name, in that service's own process."""
    others = tuple(f"services.{other}" for other in SERVICES if other not in ("cli", "simulator"))
    settings = tuple(f"{other}.settings" for other in others)
    for module in (name for name in MODULES if within(name, "services.cli")):
        foreign = [name for name in imports(module) if within(name, *others) and name not in others]
        assert all(within(name, *settings) for name in foreign), module


@pytest.mark.parametrize(
    "module",
    [
        "shared.engine.block_pool",
        "shared.engine.host_tier",
        "shared.engine.scheduler",
        "shared.engine.sequence",
        "shared.prefix.block_hash",
        "shared.worker.messages",
        *(
            name
            for name in MODULES
            if within(name, "services.router", "services.cli", "shared.rpc", "shared.telemetry")
        ),
        *(name for name in MODULES if within(name, "shared.prefix", "shared.redis", "shared.registry")),
    ],
)
def test_imports_no_torch(module: str) -> None:
    assert not [name for name in reachable(module) if within(name, "torch", "safetensors")]


@pytest.mark.parametrize(
    "module",
    ["shared.engine.block_pool", "shared.engine.host_tier", "shared.engine.scheduler", "shared.engine.sequence"],
)
def test_what_decides_imports_neither_numbers_nor_wires(module: str) -> None:
    assert not [
        name for name in reachable(module) if within(name, "numpy", "transformers", "grpc", "redis", "outrider")
    ]


@pytest.mark.parametrize(
    "module",
    [
        f"shared.engine.{name}"
        for name in (
            *("runner", "kv_pool", "model", "linear", "fingerprint"),
            *("attention.batch", "attention.grouping", "attention.paged"),
        )
    ],
)
def test_what_computes_knows_no_queues(module: str) -> None:
    assert not [name for name in imports(module) if within(name, "shared.engine.engine", "shared.engine.loop")]
    assert "shared.engine.scheduler.Scheduler" not in imports(module)


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("shared.engine", ("shared.engine", "shared.sampling", "shared.prefix.block_hash", "shared.settings")),
        ("shared.sampling", ("shared.sampling",)),
        ("shared.copying", ("shared.copying", "shared.policy", "shared.sampling")),
        ("shared.drafting", ("shared.drafting", "shared.copying", "shared.policy", "shared.sampling")),
        (
            "shared.self_drafting",
            (
                "shared.self_drafting",
                "shared.copying",
                "shared.drafting",
                "shared.engine",
                "shared.policy",
                "shared.sampling",
                "shared.prefix.block_hash",
                "shared.settings",
            ),
        ),
        (
            "shared.training",
            ("shared.training", "shared.self_drafting", "shared.engine", "shared.models", "shared.settings"),
        ),
        ("shared.prefix", ("shared.prefix", "shared.redis")),
        ("shared.redis", ("shared.redis",)),
        ("shared.registry", ("shared.registry", "shared.redis")),
        ("shared.rpc", ("shared.rpc", "shared.telemetry", "shared.settings")),
        ("shared.security", ("shared.security", "shared.rpc", "shared.settings")),
        ("shared.telemetry", ("shared.telemetry", "shared.settings")),
        ("shared.models", ("shared.models",)),
        ("services.simulator", ("services.simulator", "shared.policy")),
        ("shared.policy", ("shared.policy",)),
        ("services.router.text", ("services.router.text", "shared")),
        ("services.router.clients", ("services.router.clients", "services.router.text", "shared")),
        ("services.router.workers", ("services.router.workers", "shared")),
    ],
)
def test_folders_import_what_they_say(folder: str, allowed: tuple[str, ...]) -> None:
    for module in (name for name in MODULES if within(name, folder)):
        ours = [name for name in imports(module) if within(name, *OURS)]
        parents = {package.rpartition(".")[0] for package in allowed}
        assert all(within(name, *allowed) or name in parents for name in ours), module


@pytest.mark.parametrize("folder", FOLDERS, ids=[str(folder.relative_to(ROOT)) for folder in FOLDERS])
def test_every_folder_says_what_it_is_for(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.is_file()
    assert (ast.get_docstring(ast.parse(init.read_text())) or "").strip()


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert (ast.get_docstring(ast.parse(MODULES[module].read_text())) or "").strip()

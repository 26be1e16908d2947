"""The container stack: it serves as a local one does, whatever happens to its parts; make test-compose."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import yaml

from tests.support.containers import (
    IMAGE,
    PROJECT,
    ROOT,
    Containers,
    Load,
    ask,
    compose_command,
    references,
    running_containers,
)

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

SERVICES = ("redis", "draft", "prefill", "decode", "router")
WORKERS = ("draft", "prefill", "decode")

# What Triton compiles when it first runs on a GPU, as it does; a driver with these names stands in for the device's.
_COMPILES = r"""
set -e
cd /tmp
include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
echo "$DRIVER" | gcc -shared -fPIC -o libcuda.so.1 -x c -
gcc /nvidia/driver.c -O3 -shared -fPIC -Wno-psabi -o cuda_utils.so -l:libcuda.so.1 -L. -I/nvidia/include -I"$include"
LD_LIBRARY_PATH=. python3 -c 'import cuda_utils; print(*sorted(set(dir(cuda_utils)) & {"launch", "load_binary"}))'
id -u
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected() -> Mapping[int, Sequence[int]]:
    return await references()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def containers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Containers]:
    folder = tmp_path_factory.mktemp("containers")
    async with running_containers(folder) as running:
        yield running
    assert running.of() == []
    for found in (running.engine.networks, running.engine.volumes):
        assert found.list(filters={"label": [f"com.docker.compose.project={PROJECT}"]}) == []


@pytest.fixture
def load(containers: Containers, expected: Mapping[int, Sequence[int]]) -> Load:
    return Load(containers, expected)


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


# What is there


async def test_it_comes_up_healthy(containers: Containers) -> None:
    counts = {service: len(containers.of(service)) for service in SERVICES}
    assert counts == {"redis": 1, "draft": 1, "prefill": 2, "decode": 2, "router": 1}


async def test_containers_may_do_no_more_than_they_need(containers: Containers) -> None:
    for container in containers.of():
        host, config = container.attrs["HostConfig"], container.attrs["Config"]
        user = config["User"].partition(":")[0]
        assert user.isdigit(), container.name
        assert int(user) > 0, container.name
        assert host["ReadonlyRootfs"], container.name
        assert host["CapDrop"] == ["ALL"], container.name
        assert "no-new-privileges:true" in host["SecurityOpt"], container.name
        assert host["Memory"] > 0, container.name
        published = {port for port, hosts in container.attrs["NetworkSettings"]["Ports"].items() if hosts}
        assert published == ({"50051/tcp"} if "router" in container.name else set()), container.name


async def test_an_image_for_cpus_holds_no_compiler(containers: Containers) -> None:
    asked = "for each in cc gcc g++ clang ld pip make; do command -v $each; done; id -u"
    run = containers.engine.containers.run
    said = await in_thread(lambda: run(IMAGE, ["-c", asked], entrypoint="sh", remove=True))
    assert said == b"10001\n"
    labels = containers.engine.images.get(IMAGE).labels
    assert labels["org.opencontainers.image.version"] == (ROOT / "protos" / "VERSION").read_text().strip()


async def test_an_image_for_gpus_compiles_what_triton_asks_for(containers: Containers) -> None:
    assert await in_thread(_compiled_for_gpus, containers) == b"launch load_binary\n10001\n"


def _compiled_for_gpus(containers: Containers) -> Any:
    """What `_COMPILES` says, in what an image for GPUs is laid upon, on the base of the image that is tested."""
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    nvidia = Path(triton.origin).parent / "backends" / "nvidia"
    names = set(re.findall(r"\bcu[A-Z]\w*(?=\()", (nvidia / "driver.c").read_text()))
    base = containers.engine.images.get(IMAGE).labels["org.opencontainers.image.base.name"]
    command = ["docker", "build", "--quiet", "--target=system", f"--build-arg=BASE={base}", "--build-arg=EXTRAS=nixl"]
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    built = subprocess.run([*command, ROOT], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    image = built.stdout.strip()
    try:
        return containers.engine.containers.run(
            image,
            ["-c", _COMPILES],
            entrypoint="sh",
            user="10001:10001",
            environment={"DRIVER": "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)},
            volumes={str(nvidia): {"bind": "/nvidia", "mode": "ro"}},
            read_only=True,
            tmpfs={"/tmp": "exec,mode=1777"},
            network_disabled=True,
            remove=True,
        )
    finally:
        containers.engine.images.remove(image)


async def test_compose_takes_the_file(containers: Containers) -> None:
    """All of it, the monitoring profile as well."""
    text = await in_thread(containers.compose, "--profile", "monitoring", "config")
    assert set(yaml.safe_load(text)["services"]) >= {*SERVICES, "collector", "jaeger", "prometheus", "grafana"}
    assert compose_command()


# That it serves


async def test_seeded_text_is_that_of_a_local_stack(containers: Containers, load: Load) -> None:
    async with load.running():
        await load.more(2 * len(load.expected))


async def test_who_shows_no_key_is_refused(containers: Containers) -> None:
    async with containers.client() as stub:
        for key in (None, "outrider-wrong"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(stub, 0, key)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_plain_text_is_refused(containers: Containers) -> None:
    async with grpc.aio.insecure_channel(containers.address) as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await channel.channel_ready()


# Faults, each under load


@pytest.mark.parametrize("service", [*WORKERS, "redis"])
async def test_one_is_killed(containers: Containers, load: Load, service: str) -> None:
    async with load.running():
        await load.more(8)
        await in_thread(containers.of(service)[0].kill)
        await load.more(24)
        # An engine does not start again what was killed by hand.
        await in_thread(containers.of(service)[0].start)
        await containers.until_healthy()
        await load.more(8)


@pytest.mark.parametrize("service", [*WORKERS, "redis"])
async def test_one_is_paused(containers: Containers, load: Load, service: str) -> None:
    async with load.running():
        await load.more(8)
        container = containers.of(service)[0]
        await in_thread(container.pause)
        await asyncio.sleep(5.0)
        await in_thread(container.unpause)
        await load.more(24)
    await containers.until_healthy()


async def test_the_router_is_killed(containers: Containers, load: Load) -> None:
    """Its streams break off; the workers do not care, and new ones are served as soon as it is back."""
    async with load.running():
        await load.more(8)
        load.forgiven = True
        await in_thread(containers.of("router")[0].kill)
        await in_thread(containers.of("router")[0].start)
        await containers.until_healthy()
        await load.more(8)
        load.forgiven = False
        await load.more(8)
    assert set(load.errors) <= {grpc.StatusCode.UNAVAILABLE}


async def test_a_decode_worker_is_cut_from_its_network(containers: Containers, load: Load) -> None:
    (network,) = [each for each in containers.engine.networks.list() if each.name.endswith("_inside")]
    container = containers.of("decode")[0]
    async with load.running():
        await load.more(8)
        await in_thread(network.disconnect, container)
        await load.more(24)
        aliases = [container.id[:12], "decode"]
        await in_thread(lambda: network.connect(container, aliases=aliases))
        await load.more(8)
    await containers.until_healthy()


async def test_redis_is_restarted(containers: Containers, load: Load) -> None:
    async with load.running():
        await load.more(8)
        await in_thread(containers.of("redis")[0].restart)
        await load.more(24)
    await containers.until_healthy()


async def test_every_service_is_made_anew(containers: Containers, load: Load) -> None:
    async with load.running():
        await load.more(8)
        for service in SERVICES:
            load.forgiven = service == "router"
            before = {each.id for each in containers.of(service)}
            await in_thread(containers.compose, "up", "--detach", "--no-deps", "--force-recreate", service)
            assert before.isdisjoint(each.id for each in containers.of(service))
            await containers.until_healthy()
            await load.more(8)


async def test_more_workers_serve_as_soon_as_they_are_there(containers: Containers, load: Load) -> None:
    async with load.running():
        for count in (3, 2):
            await in_thread(containers.compose, "up", "--detach", "--no-deps", "--scale", f"decode={count}", "decode")
            await containers.until_healthy()
            assert len(containers.of("decode")) == count
            await load.more(16)


async def test_certificates_are_renewed(containers: Containers, load: Load) -> None:
    async with load.running():
        await load.more(8)
        await in_thread(containers.make_secrets)
        # Connections that stand go on; this worker makes all of its own anew.
        await in_thread(containers.of("decode")[0].restart)
        await containers.until_healthy()
        await load.more(16)

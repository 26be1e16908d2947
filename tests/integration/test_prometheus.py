"""What Prometheus reads of services, and who cannot keep it from that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from outrider.v1 import inference_pb2, inference_pb2_grpc

from services.cli.ports import free_ports
from shared.rpc.channel import connect
from shared.settings import StartupError
from shared.telemetry import prometheus
from shared.telemetry.metrics import RouterMetrics
from shared.telemetry.prometheus import PrometheusPage
from shared.telemetry.tracing import configure
from tests.support.prometheus import scrape
from tests.support.service import running_stack, wait_until_idle, worker_state


def test_the_instruments_under_their_names_with_their_buckets() -> None:
    page = PrometheusPage("127.0.0.1", 0)
    telemetry = configure("outrider-test", None, page)
    try:
        metrics = RouterMetrics(telemetry.meter, "tiny")
        metrics.first_token(0.03, "chat")
        metrics.round_verified("model", 3, 2)
        samples = scrape(page.port)
        buckets = samples["gen_ai_server_time_to_first_token_seconds_bucket"]
        below = {dict(labels)["le"]: count for labels, count in buckets.items()}
        assert (below["0.02"], below["0.04"], below["+Inf"]) == (0, 1, 1)
        accepted = samples["outrider_acceptance_accepted_total"]
        assert {dict(labels)["outrider_draft_source"] for labels in accepted} == {"model"}
        assert {dict(labels)["outrider_position"]: count for labels, count in accepted.items()} == {"0": 1, "1": 1}
        (info,) = samples["target_info"]
        assert dict(info)["service_name"] == "outrider-test"
    finally:
        telemetry.shutdown()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", page.port))


def test_who_connects_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.1)
    page = PrometheusPage("127.0.0.1", 0)
    telemetry = configure("outrider-test", None, page)
    RouterMetrics(telemetry.meter, "tiny").admitted(0.1)
    try:
        silent = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(3)]
        assert "target_info" in scrape(page.port)
        for connection in silent:
            connection.close()
    finally:
        telemetry.shutdown()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"metrics_port {port} of 127.0.0.1 cannot be listened on"):
            PrometheusPage("127.0.0.1", port)


async def test_each_service_of_a_stack_has_its_own() -> None:
    names = ("router", "target-0", "draft")
    ports = dict(zip(names, free_ports("127.0.0.1", len(names)), strict=True))
    environment = {
        name: {f"OUTRIDER_{name.partition('-')[0].upper()}_METRICS_PORT": str(port)} for name, port in ports.items()
    }
    request = inference_pb2.GenerateRequest(text="def main():\n", max_tokens=16, temperature=0.0)
    request.speculation.num_draft_tokens = 2
    async with running_stack(environment) as stack:
        async with connect(stack.router_address) as channel:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60):
                pass
        await wait_until_idle(stack)
        seen = {name: await asyncio.to_thread(scrape, port) for name, port in ports.items()}
        state = {name: await worker_state(stack, name) for name in names[1:]}
    (count,) = seen["router"]["gen_ai_server_request_duration_seconds_count"].values()
    assert count == 1
    calls = {
        (labels["rpc_method"], labels["rpc_response_status_code"]): value
        for labels, value in series(seen["router"], "rpc_server_call_duration_seconds_count")
    }
    assert calls == {("outrider.v1.Inference/Generate", "OK"): 1}
    workers = {
        (labels["outrider_worker_kind"], labels["outrider_state"]): value
        for labels, value in series(seen["router"], "outrider_workers")
        if value
    }
    assert workers == {("target", "serving"): 1, ("draft", "serving"): 1}
    for name in names[1:]:
        blocks = {labels["outrider_state"]: value for labels, value in series(seen[name], "outrider_kv_blocks")}
        # Also of a worker that has been idle since: not what its last step left.
        assert blocks["owned"] == state[name].owned_blocks == 0
        assert blocks["free"] + blocks["cached"] == state[name].total_blocks
        assert [value for _, value in series(seen[name], "outrider_kv_usage")] == [0.0]


def series(
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str
) -> Iterator[tuple[dict[str, str], float]]:
    for labels, value in samples[name].items():
        yield dict(labels), value


def test_readers_that_say_little_are_as_many_as_they_may_be_and_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_WHOLE_SECONDS", 1.0)
    page = PrometheusPage("127.0.0.1", 0)
    telemetry = configure("outrider-test", None, page)
    RouterMetrics(telemetry.meter, "tiny").admitted(0.1)
    with ExitStack() as closing:
        closing.callback(telemetry.shutdown)
        slow = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(7)]
        for connection in slow:
            closing.enter_context(connection)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert "target_info" in scrape(page.port)
        # However each goes on saying a little, it has no longer for it.
        for connection in slow:
            assert hung_up(connection)


def hung_up(connection: socket.socket) -> bool:
    """Whether it ends, while it says one byte more each tenth of a second."""
    connection.settimeout(0.1)
    for _ in range(200):
        try:
            connection.sendall(b"x")
            return connection.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            return True
    return False

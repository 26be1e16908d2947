"""What a collector sees of a request: one connected trace through router, drafter and target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from outrider.v1 import inference_pb2

from services.cli.stack import Stack
from services.simulator.step_log import read_step_log
from tests.support.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.service import collect, generate, inference, request, running_stack, wait_until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT_SPAN = "00f067aa0ba902b7"
METHOD = "outrider.v1.Inference/Generate"
EXPORT_SECONDS = 30.0
ERROR = 2


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def step_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target-0") / "steps.jsonl"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(receiver: OtlpReceiver, step_log: Path) -> AsyncIterator[Stack]:
    names = {"router": "ROUTER", "draft": "DRAFT", "target-0": "TARGET"}
    environment = {
        name: {
            f"OUTRIDER_{service}_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        for name, service in names.items()
    }
    environment["target-0"]["OUTRIDER_TARGET_STEP_LOG"] = str(step_log)
    async with running_stack(environment) as running:
        yield running


def metadata(trace_id: str) -> tuple[tuple[str, str], ...]:
    """The W3C context of a client that traces."""
    return (("traceparent", f"00-{trace_id}-{CLIENT_SPAN}-01"),)


def of_trace(receiver: OtlpReceiver, trace_id: str) -> list[ReceivedSpan]:
    return [span for span in receiver.spans if span.trace_id == trace_id]


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> list[str]:
    return sorted(f"{span.service}: {span.name}" for span in spans if span.parent_id == parent.span_id)


def check_connected(spans: list[ReceivedSpan]) -> ReceivedSpan:
    """One tree under the client's span, each span within a known one; returns the router's."""
    [root] = [span for span in spans if span.parent_id == CLIENT_SPAN]
    assert (root.service, root.name) == ("outrider-router", METHOD)
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    assert [span.name for span in spans if span is not root and span.parent_id not in ids] == []
    assert all(0 < span.start_ns <= span.end_ns for span in spans)
    return root


async def test_one_connected_trace_for_a_request(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with inference(stack) as stub:
        made = request("def f(x):\n", gamma=3, max_tokens=24, temperature=0, ignore_eos=True)
        answer = await collect(stub.Generate(made, metadata=metadata(trace_id)))
    num_rounds = answer.usage.rounds
    assert num_rounds > 1

    def complete(seen: OtlpReceiver) -> bool:
        names = [span.name for span in of_trace(seen, trace_id)]
        rounds = all(names.count(name) >= num_rounds for name in ("round", "draft", "verify"))
        return rounds and "prefill" in names and METHOD in names

    await asyncio.to_thread(receiver.wait_for, complete, EXPORT_SECONDS)
    spans = of_trace(receiver, trace_id)
    root = check_connected(spans)
    assert root.attributes["rpc.response.status_code"] == "OK"
    assert children(spans, root) == ["outrider-router: generate", "outrider-router: tokenize"]
    [generate] = [span for span in spans if span.name == "generate"]
    assert generate.attributes["gen_ai.usage.output_tokens"] == 24
    of_generate = children(spans, generate)
    assert of_generate.count("outrider-router: place") == of_generate.count("outrider-target: prefill") == 1

    rounds = sorted((span for span in spans if span.name == "round"), key=lambda span: span.start_ns)
    assert [span.attributes["outrider.round"] for span in rounds] == list(range(1, len(rounds) + 1))
    verified = [span for span in rounds if span.attributes["outrider.num_draft_tokens"]]
    assert len(verified) == num_rounds
    for span in verified:
        assert children(spans, span) == ["outrider-draft: draft", "outrider-target: verify"]
    assert sum(int(str(span.attributes["outrider.num_accepted"])) for span in verified) == answer.usage.accepted_tokens


async def test_the_trace_of_a_cancelled_stream_arrives_ended(stack: Stack, receiver: OtlpReceiver) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with inference(stack) as stub:
        made = request("def f(x):\n", gamma=3, max_tokens=1000, temperature=0, ignore_eos=True)
        call = stub.Generate(made, metadata=metadata(trace_id))
        num_chunks = 0
        async for _ in call:
            num_chunks += 1
            if num_chunks == 5:
                break
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
    await wait_until_idle(stack)

    def ended(seen: OtlpReceiver) -> bool:
        spans = of_trace(seen, trace_id)
        known = {span.span_id for span in spans} | {CLIENT_SPAN}
        services = {span.service for span in spans}
        return METHOD in {span.name for span in spans} and len(services) == 3 and known >= {s.parent_id for s in spans}

    await asyncio.to_thread(receiver.wait_for, ended, EXPORT_SECONDS)
    spans = of_trace(receiver, trace_id)
    root = check_connected(spans)
    [generate] = [span for span in spans if span.name == "generate"]
    for span in (root, generate):
        assert span.attributes["outrider.cancelled"] is True
        assert span.events == ("cancelled",)
        assert (span.status, span.status_message) == (ERROR, "cancelled")
    assert root.attributes["rpc.response.status_code"] == "CANCELLED"
    assert {span.service for span in spans} == {"outrider-router", "outrider-draft", "outrider-target"}


async def test_a_worker_writes_its_steps_down(stack: Stack, step_log: Path) -> None:
    prompt, num_output = list(range(200, 237)), 6
    before = len(read_step_log(step_log))
    async with inference(stack) as stub:
        plain = inference_pb2.Speculation(enabled=False)
        await generate(stub, prompt, max_tokens=num_output, temperature=0, ignore_eos=True, speculation=plain)
    await wait_until_idle(stack)
    first, *others = read_step_log(step_log)[before:]
    size = len(prompt)
    assert (first.tokens, first.prefill_tokens, first.prefill_attended) == (size, size - 1, size * (size + 1) // 2)
    # The token drawn last is never computed.
    assert [(step.tokens, step.prefill_tokens) for step in others] == [(1, 0)] * (num_output - 1)
    assert [step.context_tokens for step in others] == [size + 1 + i for i in range(num_output - 1)]
    assert all(step.seconds > 0 and step.sequences == 1 for step in (first, *others))
    assert all(after.time >= step.end - 1e-3 for step, after in pairwise((first, *others)))


@pytest.mark.parametrize("name", ["gen_ai.server.time_to_first_token", "gen_ai.server.request.duration"])
async def test_histograms_have_exemplars_that_lead_to_traces(stack: Stack, receiver: OtlpReceiver, name: str) -> None:
    trace_id = f"{name.count('e'):032x}"
    async with inference(stack) as stub:
        made = request("def g(x):\n", max_tokens=4, temperature=0, ignore_eos=True)
        await collect(stub.Generate(made, metadata=metadata(trace_id)))

    def exemplars(receiver: OtlpReceiver) -> set[str]:
        found = [metric for _, metric in receiver.metrics if metric.name == name]
        points = [point for metric in found for point in metric.histogram.data_points]
        return {exemplar.trace_id.hex() for point in points for exemplar in point.exemplars}

    await asyncio.to_thread(receiver.wait_for, lambda receiver: trace_id in exemplars(receiver), EXPORT_SECONDS)

"""`make bench-rounds`: where the time of a round goes, from the spans of the three processes.

One stream with a fixed γ in turns with γ = 1 and plain decoding, every request traced. A draft step is what each token
behind the first adds; verifying is a plain step of this run, and what γ more tokens add to it by the measurement at
warm-up. What is left is what a round takes for being one over a network, and tracing.

With `--inside` the draft model is in the target worker, where a round has no spans: it is held against plain steps and
rounds of one draft token, as they are seen by the client.

python -m tests.benchmarks.rounds --pair synthetic --gamma 4
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.table import Table

from services.cli.stack import Stack, StackSettings
from shared.policy.shape import Shape
from shared.policy.step_costs import StepCosts
from shared.settings import StartupError
from shared.telemetry.attributes import NUM_DRAFT_TOKENS
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.load import OFF, Mode, run_load
from tests.benchmarks.machine import this_machine
from tests.benchmarks.measurement import PROMPT_TOKENS, check_undisturbed
from tests.benchmarks.model_pair import PAIR_NAMES, Pair, load_pair
from tests.benchmarks.worker_info import worker_info
from tests.support.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.service import COPYING_NOTHING, MODEL_ALONE, inference

_NUM_TOKENS = 128
_WARM_UPS = 2
_EXPORT_SECONDS = 30.0
_SERVICES = {"router": "ROUTER", "draft": "DRAFT", "target-0": "TARGET"}


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a round, one behind the other; `steps`: seconds of it that are steps alone."""

    name: str
    seconds: float
    steps: float = 0.0


def drafting_seconds(spans: Iterable[ReceivedSpan], gamma: int) -> float:
    """Median over the proposals of γ draft tokens. Raises BenchmarkError if there were none."""
    drafts = [each for each in spans if each.name == "draft" and each.attributes.get(NUM_DRAFT_TOKENS) == gamma]
    if not drafts:
        raise BenchmarkError(f"no proposal of {gamma} draft tokens was traced")
    return median(draft.end_ns - draft.start_ns for draft in drafts) / 1e9


def parts_of(spans: Iterable[ReceivedSpan], gamma: int, draft_step: float, verify_step: float) -> list[Part]:
    """Medians over the rounds of γ draft tokens that another one followed, in seconds.

    Raises BenchmarkError if there were none.
    """
    spans = list(spans)
    inside: dict[str, dict[str, ReceivedSpan]] = defaultdict(dict)
    requests: dict[str, list[ReceivedSpan]] = defaultdict(list)
    for span in spans:
        if span.name == "round":
            requests[span.parent_id].append(span)
        elif span.name in ("draft", "verify"):
            inside[span.parent_id][span.name] = span
    stretches: dict[str, list[int]] = defaultdict(list)
    for rounds in requests.values():
        for this, following in pairwise(sorted(rounds, key=lambda span: span.start_ns)):
            found = inside[this.span_id]
            if found.keys() != {"draft", "verify"} or this.attributes.get(NUM_DRAFT_TOKENS) != gamma:
                continue
            draft, verify = found["draft"], found["verify"]
            stretches["router to draft worker"].append(draft.start_ns - this.start_ns)
            stretches["drafting"].append(draft.end_ns - draft.start_ns)
            stretches["draft worker to router to target worker"].append(verify.start_ns - draft.end_ns)
            stretches["verifying"].append(verify.end_ns - verify.start_ns)
            stretches["target worker to router"].append(this.end_ns - verify.end_ns)
            stretches["router, to the next round"].append(following.start_ns - this.end_ns)
    if not stretches:
        raise BenchmarkError(f"no round of {gamma} draft tokens was traced")
    steps = {"drafting": gamma * draft_step, "verifying": verify_step}
    return [Part(name, median(values) / 1e9, steps.get(name, 0.0)) for name, values in stretches.items()]


async def _measure(pair: Pair, gamma: int, num_requests: int) -> list[Part]:
    with otlp_receiver() as receiver:
        environment = {
            name: {f"OUTRIDER_{service}_OTLP_ENDPOINT": receiver.endpoint} for name, service in _SERVICES.items()
        }
        environment["draft"] |= MODEL_ALONE
        settings = StackSettings(
            target=str(pair.target), draft=str(pair.draft), port=0, dtype="bfloat16", environment=environment
        )
        modes = Mode(True, Shape(gamma)), Mode(True, Shape(1))
        async with Stack(settings) as stack, inference(stack) as stub:
            for _ in range(_WARM_UPS):
                await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, modes[0])
            before = len(receiver.named("round"))
            plain_steps = []
            for _ in range(num_requests):
                for mode in modes:
                    await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, mode)
                plain = await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, OFF)
                plain_steps.append((plain.seconds - plain.ttft_seconds[0]) / (_NUM_TOKENS - 1))
            target = await _costs(stack)
            check_undisturbed(stack)
        await asyncio.to_thread(receiver.wait_for, lambda _: _complete(receiver), _EXPORT_SECONDS)
    rounds = {span.span_id for span in receiver.named("round")[before:]}
    spans = [span for span in receiver.spans if span.name != "round" or span.span_id in rounds]
    verify_step = median(plain_steps) + target.seconds(gamma + 1) - target.seconds(1)
    draft_step = (drafting_seconds(spans, gamma) - drafting_seconds(spans, 1)) / (gamma - 1)
    return parts_of(spans, gamma, draft_step, verify_step)


async def _measure_inside(pair: Pair, gamma: int, num_requests: int) -> list[Part]:
    settings = StackSettings(
        target=str(pair.target),
        draft=str(pair.draft),
        num_drafts=0,
        port=0,
        dtype="bfloat16",
        environment={"target-0": COPYING_NOTHING},
    )
    modes = {0: OFF, 1: Mode(True, Shape(1)), gamma: Mode(True, Shape(gamma))}
    seconds: dict[int, list[float]] = {each: [] for each in modes}
    async with Stack(settings) as stack, inference(stack) as stub:
        for turn in range(_WARM_UPS + num_requests):
            for each, mode in modes.items():
                load = await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, mode)
                if turn >= _WARM_UPS:
                    seconds[each].append((load.seconds - load.ttft_seconds[0]) / (load.rounds or _NUM_TOKENS - 1))
        target = await _costs(stack)
        check_undisturbed(stack)
    return parts_inside({each: median(its) for each, its in seconds.items()}, gamma, target)


def parts_inside(rounds: Mapping[int, float], gamma: int, costs: StepCosts) -> list[Part]:
    """`rounds`: seconds of those of so many draft tokens, 0, 1 and γ."""

    def verifying(num_draft_tokens: int) -> float:
        return rounds[0] + costs.seconds(num_draft_tokens + 1) - costs.seconds(1)

    draft_step = (rounds[gamma] - verifying(gamma) - (rounds[1] - verifying(1))) / (gamma - 1)
    steps = {"drafting": gamma * draft_step, "verifying": verifying(gamma)}
    rest = rounds[gamma] - sum(steps.values())
    return [*(Part(name, each, each) for name, each in steps.items()), Part("around them", rest)]


def _complete(receiver: OtlpReceiver) -> bool:
    """Whether the last spans of every round are here; plain steps have some of the same name."""
    rounds = {span.span_id for span in receiver.named("round")}
    return bool(rounds) and rounds <= {span.parent_id for span in receiver.named("verify")}


async def _costs(stack: Stack) -> StepCosts:
    """The target worker's."""
    info = await worker_info(stack, "target-0")
    return StepCosts([(cost.num_tokens, cost.seconds) for cost in info.step_costs])


def _shown(parts: Sequence[Part], title: str) -> Table:
    table = Table(title=title)
    for heading in ("part of a round", "ms", "of it steps", "beyond them"):
        table.add_column(heading, justify="left" if heading == "part of a round" else "right")
    total = Part("together", sum(part.seconds for part in parts), sum(part.steps for part in parts))
    for part in (*parts, total):
        beyond = part.seconds - part.steps
        steps = f"{part.steps * 1e3:.2f}" if part.steps else "-"
        table.add_row(
            part.name, f"{part.seconds * 1e3:.2f}", steps, f"{beyond * 1e3:.2f}", end_section=part is parts[-1]
        )
    return table


def main() -> None:
    """Exit status 1, with one line on stderr, if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", choices=PAIR_NAMES, default="synthetic", help="Which models; default synthetic.")
    parser.add_argument("--gamma", type=int, default=4, help="Draft tokens of every round, at least 2; default 4.")
    parser.add_argument("--inside", action="store_true", help="The draft model inside the target worker.")
    parser.add_argument("--requests", type=int, default=10, help="How many, one after another; default 10.")
    options = parser.parse_args()
    if options.gamma < 2:
        parser.error(f"--gamma is {options.gamma}: what a draft step takes is seen from 2 on")
    try:
        measuring = _measure_inside if options.inside else _measure
        parts = asyncio.run(measuring(load_pair(options.pair), options.gamma, options.requests))
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench-rounds: {error}")
    console = Console()
    console.print(_shown(parts, f"{options.pair} pair, one stream, γ = {options.gamma}: medians"))
    console.print(str(this_machine()), highlight=False)


if __name__ == "__main__":
    main()

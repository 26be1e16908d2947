"""`make bench-rounds`: where the time of a round goes, from the spans of the three processes.

One stream with a fixed γ in turns with γ = 1 and plain decoding, every request traced. A draft step is what each token
behind the first adds; verifying is a plain step, and what the tokens behind the first add to its time. Both are held
against the rounds of the same turn, for memory's speed wanders within a run, and medians of that are shown.
What is left is what a round takes for being one over a network, and tracing.

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

_NUM_TOKENS = 48
_WARM_UPS = 2
_EXPORT_SECONDS = 30.0
_SERVICES = {"router": "ROUTER", "draft": "DRAFT", "target-0": "TARGET"}


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a round, one behind the other; `steps`: seconds of it that are steps alone."""

    name: str
    seconds: float
    steps: float = 0.0


Stretches = Mapping[str, Sequence[float]]
"""By name, one behind the other, the seconds that each round took for it."""


def requests_of(spans: Iterable[ReceivedSpan], gamma: int) -> list[Stretches]:
    """For each request, in order of time, its rounds of γ draft tokens that another one followed."""
    inside: dict[str, dict[str, ReceivedSpan]] = defaultdict(dict)
    requests: dict[str, list[ReceivedSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name == "round":
            requests[span.parent_id].append(span)
        elif span.name in ("draft", "verify"):
            inside[span.parent_id][span.name] = span
    found = (_stretches(rounds, inside, gamma) for rounds in requests.values())
    return [stretches for stretches in found if stretches]


def _stretches(
    rounds: Sequence[ReceivedSpan], inside: Mapping[str, Mapping[str, ReceivedSpan]], gamma: int
) -> Stretches:
    """Of one request's rounds; `inside`: the workers' spans by round and name."""
    stretches: dict[str, list[float]] = defaultdict(list)
    for this, following in pairwise(rounds):
        found = inside[this.span_id]
        if found.keys() != {"draft", "verify"} or this.attributes.get(NUM_DRAFT_TOKENS) != gamma:
            continue
        draft, verify = found["draft"], found["verify"]
        for name, nanoseconds in (
            ("router to draft worker", draft.start_ns - this.start_ns),
            ("drafting", draft.end_ns - draft.start_ns),
            ("draft worker to router to target worker", verify.start_ns - draft.end_ns),
            ("verifying", verify.end_ns - verify.start_ns),
            ("target worker to router", this.end_ns - verify.end_ns),
            ("router, to the next round", following.start_ns - this.end_ns),
        ):
            stretches[name].append(nanoseconds / 1e9)
    return stretches


def parts_of(
    rounds: Sequence[Stretches], single: Sequence[Stretches], plain: Sequence[float], gamma: int
) -> list[Part]:
    """Medians over the turns of a run: each has a request with rounds of γ draft tokens, one with a `single` one in
    each round, and seconds of `plain` steps.

    Raises BenchmarkError if not every turn has all three.
    """
    if not len(rounds) == len(single) == len(plain) > 0:
        raise BenchmarkError(f"{len(plain)} turns, but {len(rounds)} of {gamma} and {len(single)} of 1 draft token")
    spent, spent_on_one = ([{name: median(its[name]) for name in its} for its in each] for each in (rounds, single))
    turns = list(zip(spent, spent_on_one, plain, strict=True))
    steps = {
        "drafting": [gamma / (gamma - 1) * (these["drafting"] - one["drafting"]) for these, one, _ in turns],
        # A second row is read with the first.
        "verifying": [step + these["verifying"] - one["verifying"] for these, one, step in turns],
    }
    parts = []
    for name in spent[0]:
        seconds = median(these[name] for these in spent)
        own = steps.get(name)
        beyond = 0.0 if own is None else median(these[name] - its for these, its in zip(spent, own, strict=True))
        parts.append(Part(name, seconds, 0.0 if own is None else seconds - beyond))
    return parts


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
            plain_steps = []
            for _ in range(num_requests):
                for mode in modes:
                    await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, mode)
                plain = await run_load(stub, [pair.prompts(PROMPT_TOKENS)], _NUM_TOKENS, OFF)
                plain_steps.append((plain.seconds - plain.ttft_seconds[0]) / (_NUM_TOKENS - 1))
            check_undisturbed(stack)
        await asyncio.to_thread(receiver.wait_for, lambda _: _complete(receiver), _EXPORT_SECONDS)
    rounds, single = requests_of(receiver.spans, gamma)[_WARM_UPS:], requests_of(receiver.spans, 1)
    return parts_of(rounds, single, plain_steps, gamma)


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
    parser.add_argument("--requests", type=int, default=25, help="How many, one after another; default 25.")
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

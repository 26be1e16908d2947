"""`make bench-sources`: who drafts best for which text, and whether the policy knows.

One stream of the demo target, by prose (docstrings), code and text that repeats itself (code that is begun once more),
at temperature 0 and 1. Every way of drafting in turns by the same prompts, each as a tenant of its own (what one
generated another could copy), and plain decoding twice, so that one sees what the machine's noise makes of the same
thing, in a stack that has everything at once: a draft worker with its model and copies, and a target with a head and
copies. Further heads have a stack each, and so have a target with the draft model inside and one that does nothing but
copy.

python -m tests.benchmarks.sources --turns 8
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.v1 import inference_pb2, inference_pb2_grpc
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from services.cli.stack import Stack, StackSettings
from shared.models import DEMO_HEADS, DEMO_TARGET
from shared.settings import StartupError
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.machine import this_machine
from tests.support.service import generate, inference

_NUM_TOKENS = 128
_PROMPT_TOKENS = 160
_REPEATED_TOKENS = 48
# Of a table that no terminal shows.
_WIDTH = 140
_MODEL, _SUFFIX = inference_pb2.DRAFT_SOURCE_MODEL, inference_pb2.DRAFT_SOURCE_SUFFIX
_TARGET = inference_pb2.DRAFT_SOURCE_TARGET


@dataclass(frozen=True, slots=True)
class Way:
    """A way of drafting: who may, and so many tokens a round, or what pays."""

    name: str
    sources: tuple[inference_pb2.DraftSource, ...] = ()
    gamma: int | None = None
    num_nodes: int | None = None


_OFF, _OFF_AGAIN = Way("off", gamma=0), Way("off, again", gamma=0)
WAYS = [
    _OFF,
    Way("model, 4", (_MODEL,), 4),
    Way("model, tree of 10", (_MODEL,), 4, 10),
    Way("suffix, 8", (_SUFFIX,), 8),
    Way("model and suffix, 4", (_MODEL, _SUFFIX), 4),
    _OFF_AGAIN,
    Way("head, 3", (_TARGET,), 3),
    Way("head, tree of 10", (_TARGET,), 3, 10),
    Way("model and suffix, what pays", (_MODEL, _SUFFIX)),
    Way("head, what pays", (_TARGET,)),
    Way("all, what pays"),
]
WITH_A_HEAD = [way for way in WAYS if way.gamma == 0 or way.sources == (_TARGET,)]
INSIDE = [
    _OFF,
    Way("model inside, 4", (_TARGET,), 4),
    _OFF_AGAIN,
    Way("model inside, tree of 10", (_TARGET,), 4, 10),
    Way("model inside, what pays", (_TARGET,)),
    Way("model inside and copies, what pays"),
]
COPYING = [
    _OFF,
    Way("copies in the target, 8", (_SUFFIX,), 8),
    _OFF_AGAIN,
    Way("copies in the target, tree of 16", (_SUFFIX,), 8, 16),
    Way("copies in the target, what pays", (_SUFFIX,)),
]


@dataclass(slots=True)
class Cell:
    """What a way brought on one kind of text at one temperature: the seconds of each turn, and the sums of the rest."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, usage: inference_pb2.Usage, seconds: float) -> None:
        self.seconds.append(seconds)
        self.num_tokens += usage.output_tokens - 1
        self.rounds += usage.rounds
        self.accepted += usage.accepted_tokens
        for counts, name in ((self.drafted_at, "drafted"), (self.accepted_at, "accepted")):
            values = [getattr(position, name) for position in usage.acceptance_by_position]
            counts += [0] * (len(values) - len(counts))
            for i, value in enumerate(values):
                counts[i] += value

    @property
    def rate(self) -> float:
        """Tokens a second behind the first one."""
        return self.num_tokens / sum(self.seconds)

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    def by_position(self, count: int) -> list[float]:
        """Share accepted of the rounds that got so far."""
        shares, before = [], self.rounds
        for drafted, accepted in zip(self.drafted_at[:count], self.accepted_at, strict=False):
            shares.append(accepted / max(1, min(drafted, before)))
            before = accepted
        return shares


Texts = Callable[[], list[int]]
"""Draws the next prompt."""


def texts_of(kind: str, seed: int) -> Texts:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TARGET, model_max_length=sys.maxsize)
    sources = [path.read_text() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    generator = random.Random(seed)
    if kind == "prose":
        sources = ["\n\n".join(_docstrings(source)) for source in sources]
    num_characters = 8 * _PROMPT_TOKENS
    sources = [source for source in sources if len(source) > 2 * num_characters]

    def draw() -> list[int]:
        source = generator.choice(sources)
        start = generator.randrange(len(source) - num_characters)
        tokens: list[int] = tokenizer(source[start : start + num_characters]).input_ids
        if kind != "repetitive":
            return tokens[:_PROMPT_TOKENS]
        own = tokens[: _PROMPT_TOKENS - _REPEATED_TOKENS]
        return [*own, *tokenizer("\n\n# once more:\n").input_ids, *own[:_REPEATED_TOKENS]]

    return draw


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


async def measure(
    settings: StackSettings, ways: Sequence[Way], turns: int, on_turn: Callable[[str], None]
) -> dict[str, Cell]:
    """Cells by "text at temperature: way"; of the first turn nothing counts."""
    cells: dict[str, Cell] = {}
    keys = ",".join(f"{_key(way)}={_key(way)}" for way in ways)
    settings = replace(settings, environment={"router": {"OUTRIDER_ROUTER_API_KEYS": keys}})
    async with Stack(settings) as stack, inference(stack) as stub:
        for kind in ("prose", "code", "repetitive"):
            for temperature in (0.0, 1.0):
                draw = texts_of(kind, seed=1)
                gc.freeze()  # or a full collection, of a heap with torch in it, falls into somebody's time
                for turn in range(turns + 1):
                    on_turn(f"{kind} at {temperature:g}: turn {turn} of {turns}")
                    order, prompt = ways if turn % 2 else list(reversed(ways)), draw()
                    for way in order:
                        usage, seconds = await _run(stub, prompt, temperature, way)
                        if turn:
                            cells.setdefault(f"{kind} at {temperature:g}: {way.name}", Cell()).add(usage, seconds)
        restarted = [name for name, process in stack.processes.items() if process.restarts]
        if restarted:
            raise BenchmarkError(f"died meanwhile: {', '.join(restarted)}")
    return cells


def _key(way: Way) -> str:
    return way.name.replace(" ", "-").replace(",", "")


async def _run(
    stub: inference_pb2_grpc.InferenceAsyncStub, prompt: list[int], temperature: float, way: Way
) -> tuple[inference_pb2.Usage, float]:
    began = time.perf_counter()
    answer = await generate(
        stub, prompt, gamma=way.gamma, num_nodes=way.num_nodes, sources=way.sources, max_tokens=_NUM_TOKENS,
        temperature=temperature, ignore_eos=True, api_key=_key(way),
    )  # fmt: skip
    return answer.usage, time.perf_counter() - began - answer.usage.time_to_first_token_seconds


def render(cells: dict[str, Cell]) -> Table:
    """`× off`: how many times as many tokens a second as plain decoding, whose two runs count as one, by the sums of
    all turns; `median`: of the turns' own ratios."""
    columns = ("text", "way", "tokens/s", "× off", "median", "rounds", "tokens a round", "accepted by position")
    table = Table(*columns, box=None)
    for name, cell in cells.items():
        where, _, way = name.rpartition(": ")
        runs = (cells[f"{where}: {each.name}"].seconds for each in (_OFF, _OFF_AGAIN))
        plain = [(first + again) / 2 for first, again in zip(*runs, strict=True)]
        times = sum(plain) / sum(cell.seconds)
        median = statistics.median(off / seconds for off, seconds in zip(plain, cell.seconds, strict=True))
        shares = " ".join(f"{share:.2f}" for share in cell.by_position(4))
        table.add_row(
            where, way, f"{cell.rate:.0f}", f"{times:.2f}", f"{median:.2f}", f"{cell.rounds}",
            f"{cell.tokens_per_round:.2f}", shares,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="Prompts of each kind; default 12.")
    parser.add_argument("--heads", type=Path, nargs="*", default=[], help="Further heads, by folder.")
    parser.add_argument("--json", type=Path, default=Path("build/bench-sources.json"), help="Where every number goes.")
    options = parser.parse_args()
    console = Console(stderr=True)
    found: dict[str, dict[str, Cell]] = {}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        stacks = {"all": (StackSettings(port=0, head=str(DEMO_HEADS / "eagle3")), WAYS)}
        stacks["inside"] = StackSettings(port=0, num_drafts=0), INSIDE
        stacks["copies"] = StackSettings(port=0, draft=None), COPYING
        for head in [DEMO_HEADS / "medusa", *options.heads]:
            stacks[head.name] = StackSettings(port=0, draft=None, head=str(head)), WITH_A_HEAD
        for name, (settings, ways) in stacks.items():
            found[name] = asyncio.run(measure(settings, ways, options.turns, console.print))
            Console(width=None if sys.stdout.isatty() else _WIDTH).print(name, render(found[name]), "")
            numbers = {stack: {cell: asdict(its) for cell, its in cells.items()} for stack, cells in found.items()}
            options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    except (BenchmarkError, StartupError) as error:
        sys.exit(f"bench-sources: {error}")
    Console().print(str(this_machine()))


if __name__ == "__main__":
    main()

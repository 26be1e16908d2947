"""What many requests at once do to streams that run, and how long they wait themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Final

from services.simulator.cluster import Pools
from services.simulator.outcomes import quantiles
from services.simulator.workload import Request
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools import interference
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import Setup
from tests.benchmarks.pools.streams import serve_beside_streams
from tests.benchmarks.pools.trace import Served

NUM_STREAMS: Final = 8
NUM_REQUESTS: Final = 24
PROMPT_TOKENS: Final = 128
SECONDS_BETWEEN: Final = 15.0
"""From one burst to the next."""

SETUPS: Final = tuple(
    Setup(f"1 both, {most:,} a step", Pools(num_both=1), num_threads=2, max_batch_tokens=most)
    for most in (2048, 512, 128)
)

_STREAM_PROMPT = 64
# Cut off in time; none gets so far.
_STREAM_TOKENS = 4096
_OUTPUT = 16
# Until all streams run, and until the first burst.
_ALL_RUN_SECONDS = 2.0
_LEAD_SECONDS = 5.0

COMPARED: Final[Numbers] = {
    f"{what}, all of the time": interference.COMPARED[what] for what in ("gap p50", "gap p99")
} | {"TTFT of bursts, mean": interference.COMPARED["TTFT of prompts, mean"]}
"""The simulator does not tell whose gaps these are, and when: those of streams before and between bursts are in them,
and those of the bursts' own tokens."""


async def measure_bursts(pair: Pair, num_bursts: int, on_step: OnStep) -> list[Run]:
    """Serves the same trace with each setup. Raises as `serve_beside_streams` does."""
    requests = trace(num_bursts)
    what = f"{NUM_STREAMS} streams and {num_bursts} bursts"
    end = requests[-1].time + SECONDS_BETWEEN
    return await serve_beside_streams(SETUPS, pair, requests, NUM_STREAMS, end, what, on_step)


def trace(num_bursts: int) -> list[Request]:
    """Streams at once, then the bursts, one after another."""
    times = (_LEAD_SECONDS + SECONDS_BETWEEN * number for number in range(num_bursts))
    bursts = [Request(time, PROMPT_TOKENS, _OUTPUT) for time in times for _ in range(NUM_REQUESTS)]
    return [Request(0.0, _STREAM_PROMPT, _STREAM_TOKENS)] * NUM_STREAMS + bursts


def numbers_of(runs: Sequence[Run]) -> dict[str, float]:
    """Of the streams: seconds from token to token, before the first burst and while one waits for its first tokens. Of
    the bursts: TTFT. Raises BenchmarkError if there is nothing of one of these."""
    before: list[float] = []
    during: list[float] = []
    ttfts: list[float] = []
    for run in runs:
        streams, bursts = run.served[:NUM_STREAMS], run.served[NUM_STREAMS:]
        spans = _waits(bursts)
        for each in streams:
            for token, following in pairwise(each.token_times):
                if any(began < following and token < ended for began, ended in spans):
                    during.append(following - token)
                elif token >= _ALL_RUN_SECONDS and following <= spans[0][0]:
                    before.append(following - token)
        ttfts += [each.token_times[0] - each.request.time for each in bursts]
    if not before or not during:
        raise BenchmarkError(f"{len(before)} tokens of streams before the first burst, and {len(during)} beside one")
    gap_p50, gap_p99 = quantiles(during, (0.5, 0.99))
    ttft_p50, ttft_p99 = quantiles(ttfts, (0.5, 0.99))
    return {
        "gap quiet": quantiles(before, (0.5,))[0],
        "gap p50": gap_p50,
        "gap p99": gap_p99,
        "gap max": max(during),
        "TTFT p50": ttft_p50,
        "TTFT p99": ttft_p99,
    }


def _waits(bursts: Sequence[Served]) -> list[tuple[float, float]]:
    """When each burst came, and when all of it had their first tokens."""
    by_time = groupby(bursts, key=lambda each: each.request.time)
    return [(began, max(each.token_times[0] for each in burst)) for began, burst in by_time]

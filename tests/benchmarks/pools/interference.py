"""What long prompts do to streams that run: on one worker, in chunks, and on a worker of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from services.simulator.cluster import Pools
from services.simulator.outcomes import Outcomes, quantiles, weighted_quantiles
from services.simulator.workload import Request
from tests.benchmarks.measurement import OnStep
from tests.benchmarks.model_pair import Pair
from tests.benchmarks.pools.run import Numbers, Run
from tests.benchmarks.pools.setup import APART, Setup
from tests.benchmarks.pools.streams import serve_beside_streams

NUM_STREAMS: Final = 8
PROMPT_TOKENS: Final = 1500
SECONDS_BETWEEN: Final = 5.0
"""From one prompt to the next, whatever became of the one before."""

UNCHUNKED = Setup("1 both, whole prompts", Pools(num_both=1), num_threads=2, max_batch_tokens=2048)
CHUNKED = Setup("1 both, chunks of 128", Pools(num_both=1), num_threads=2, max_batch_tokens=128)
SETUPS = (UNCHUNKED, CHUNKED, APART)

_STREAM_PROMPT = 64
# Cut off in time; none gets so far.
_STREAM_TOKENS = 4096
_PROMPT_OUTPUT = 4
# Until all streams run.
_LEAD_SECONDS = 3.0


def _gaps(several: Sequence[Outcomes]) -> Counter[float]:
    return sum((each.inter_token for each in several), Counter[float]())


COMPARED: Final[Numbers] = {
    "gap p50": lambda several: weighted_quantiles(_gaps(several), (0.5,))[0],
    "gap p99": lambda several: weighted_quantiles(_gaps(several), (0.99,))[0],
    "TTFT of prompts, mean": lambda several: fmean(
        ttft for each in several for place, ttft in zip(each.order, each.ttft, strict=True) if place >= NUM_STREAMS
    ),
}
"""Gaps of prompts' few tokens count as well here: the simulator does not tell them apart."""


async def measure_interference(pair: Pair, num_prompts: int, on_step: OnStep) -> list[Run]:
    """Serves the same trace with each setup. Raises as `serve_beside_streams` does."""
    requests = trace(num_prompts)
    what = f"{NUM_STREAMS} streams and {num_prompts} prompts"
    end = requests[-1].time + SECONDS_BETWEEN
    return await serve_beside_streams(SETUPS, pair, requests, NUM_STREAMS, end, what, on_step)


def trace(num_prompts: int) -> list[Request]:
    """Streams at once, then the prompts, one after another."""
    streams = [Request(0.0, _STREAM_PROMPT, _STREAM_TOKENS)] * NUM_STREAMS
    times = (_LEAD_SECONDS + SECONDS_BETWEEN * number for number in range(num_prompts))
    return streams + [Request(time, PROMPT_TOKENS, _PROMPT_OUTPUT) for time in times]


def numbers_of(runs: Sequence[Run]) -> dict[str, float]:
    """Of the streams, since the first prompt came: seconds from token to token, over all of them, and tokens a second
    of all together. Of the prompts: TTFT."""
    gaps: list[float] = []
    ttfts: list[float] = []
    num_tokens, seconds = 0, 0.0
    for run in runs:
        streams, prompts = run.served[:NUM_STREAMS], run.served[NUM_STREAMS:]
        first = prompts[0].request.time
        times = [[time for time in each.token_times if time >= first] for each in streams]
        gaps += [after - before for each in times for before, after in pairwise(each)]
        ttfts += [each.token_times[0] - each.request.time for each in prompts]
        num_tokens += sum(map(len, times))
        seconds += max(each[-1] for each in times) - first
    p50, p99 = quantiles(gaps, (0.5, 0.99))
    return {
        "gap p50": p50,
        "gap p99": p99,
        "gap max": max(gaps),
        "tokens/s": num_tokens / seconds,
        "TTFT mean": fmean(ttfts),
        "TTFT max": max(ttfts),
    }

"""The prefix cache: time to first token of a long prompt, cold and when its prefix has been there before."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.v1 import inference_pb2_grpc

from tests.benchmarks.load import ON, run_stream
from tests.benchmarks.prompts import Prompts

PREFIX_TOKENS = 1000
_SUFFIX_TOKENS = 16
# Enough for a few rounds: the prefix is reused beside speculation, not instead of it.
_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """One prefix, sent twice with different suffixes of one length.

    `cached_tokens` is what the second request found, `cacheable_tokens` what the prefix's full blocks
    hold.
    """

    cold_ttft_seconds: float
    warm_ttft_seconds: float
    cached_tokens: int
    cacheable_tokens: int

    @property
    def speedup(self) -> float:
        return self.cold_ttft_seconds / self.warm_ttft_seconds


async def measure_prefix(
    stub: inference_pb2_grpc.InferenceAsyncStub, prompts: Prompts, block_size: int
) -> PrefixResult:
    """Sends a fresh prefix twice, one request after the other, with speculation on."""
    prefix = prompts(PREFIX_TOKENS)
    cold, warm = [await run_stream(stub, prefix + prompts(_SUFFIX_TOKENS), _OUTPUT_TOKENS, ON) for _ in range(2)]
    return PrefixResult(
        cold_ttft_seconds=cold.ttft_seconds,
        warm_ttft_seconds=warm.ttft_seconds,
        cached_tokens=warm.usage.cached_tokens,
        cacheable_tokens=PREFIX_TOKENS // block_size * block_size,
    )

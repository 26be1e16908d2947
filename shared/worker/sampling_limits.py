"""What sampling parameters may be: as inference.proto tells clients, and held to wherever parameters come in."""

from __future__ import annotations

from shared.rpc.checks import check_count, check_range, check_token_id
from shared.sampling.params import SamplingParams

_MAX_TEMPERATURE = 100.0
_MAX_REPETITION_PENALTY = 10.0
_MAX_ABS_PENALTY = 2.0
_MAX_ABS_LOGIT_BIAS = 100.0
_MAX_LOGIT_BIAS_ENTRIES = 1024
_MAX_LOGPROBS = 20


def check_sampling(params: SamplingParams, vocab_size: int, message: str = "") -> None:
    """Raises InvalidArgument, with the field's name behind that of its `message`. Lengths and what stops a sequence
    are not looked at."""
    prefix = f"{message}." if message else ""
    check_range(f"{prefix}temperature", params.temperature, 0.0, _MAX_TEMPERATURE)
    check_range(f"{prefix}top_p", params.top_p, 0.0, 1.0, low_excluded=True)
    check_range(f"{prefix}min_p", params.min_p, 0.0, 1.0)
    check_range(
        f"{prefix}repetition_penalty", params.repetition_penalty, 0.0, _MAX_REPETITION_PENALTY, low_excluded=True
    )
    check_range(f"{prefix}presence_penalty", params.presence_penalty, -_MAX_ABS_PENALTY, _MAX_ABS_PENALTY)
    check_range(f"{prefix}frequency_penalty", params.frequency_penalty, -_MAX_ABS_PENALTY, _MAX_ABS_PENALTY)
    check_count(f"{prefix}logit_bias", params.logit_bias, _MAX_LOGIT_BIAS_ENTRIES, "entries")
    for token_id, bias in params.logit_bias.items():
        check_token_id(f"{prefix}logit_bias key", token_id, vocab_size)
        check_range(f"{prefix}logit_bias[{token_id}]", bias, -_MAX_ABS_LOGIT_BIAS, _MAX_ABS_LOGIT_BIAS)
    if params.logprobs is not None:
        check_range(f"{prefix}logprobs", params.logprobs, 0, min(_MAX_LOGPROBS, vocab_size))

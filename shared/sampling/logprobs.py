"""The log-probabilities that are reported to clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.sampled import TokenLogprobs


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """What the target says of chosen tokens: log_softmax of raw logits, at temperature 1, unfiltered.

    `logits` [R, V] of any float dtype; entry i of the result is of token `token_ids[i]` in row `rows[i]`,
    with the `num_top[i]` likeliest tokens of that row (all V if V is less). One device-to-host copy.
    """
    logprobs = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    values, ids = logprobs.topk(min(max(num_top), logprobs.shape[1]))
    # float64 holds float32 and token ids exactly, so that one copy brings all.
    width = values.shape[1]
    return [
        TokenLogprobs(line[0], tuple((int(line[1 + width + i]), line[1 + i]) for i in range(min(top, width))))
        for line, top in zip(torch.cat((own.double(), values.double(), ids.double()), 1).tolist(), num_top, strict=True)
    ]

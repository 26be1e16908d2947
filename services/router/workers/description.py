"""What a worker says of itself, looked at before the router counts on it."""

from __future__ import annotations

import math

from outrider.v1 import worker_pb2

_COUNTS = ("vocab_size", "max_context", "block_size", "num_blocks", "max_batch_tokens")


def check_description(info: worker_pb2.WorkerInfo) -> None:
    """Raises ValueError, naming field, value and limit, for what no worker is: it would be divided by, or looked up."""
    for name in _COUNTS:
        if (value := getattr(info, name)) < 1:
            raise ValueError(f"its {name} is {value}, not at least 1")
    if not info.step_costs:
        raise ValueError("its step_costs are none, not at least one")
    num_before = 0
    for cost in info.step_costs:
        if cost.num_tokens <= num_before:
            raise ValueError(f"its step_costs have {cost.num_tokens} tokens behind {num_before}, not more")
        if not 0 < cost.seconds < math.inf:
            raise ValueError(f"its step_costs have {cost.seconds} s for {cost.num_tokens} tokens, not more than 0")
        num_before = cost.num_tokens

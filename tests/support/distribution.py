"""The distribution of short outputs: exactly, by transformers' own logits and filters, and as samples show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Below which a cell's count is not near enough to normal: such cells are counted together.
LEAST_EXPECTED = 10.0

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Filters:
    """A request's sampling filters."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def fields(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def warpers(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same as transformers has them: token ids and logits in, logits out."""
        warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers  # type: ignore[no-any-return]


def exact(target: Path, prompt: Sequence[int], num_tokens: int, filters: Filters) -> list[Array]:
    """P(t1, t2), P(t2, t3), ..., each [V, V], of tokens behind the prompt: what precedes the two is summed over."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    paths, weights = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    unseen, cache = paths, DynamicCache(config=model.config)
    pairs: list[Array] = []
    size = model.config.vocab_size
    for position in range(num_tokens):
        with torch.inference_mode():
            logits = model(input_ids=unseen, past_key_values=cache, use_cache=True).logits[:, -1]
            conditional = filters.warpers()(paths, logits).double().softmax(-1)
        joint = weights[:, None] * conditional
        if position > 0:
            both = torch.zeros(size, size, dtype=torch.float64).index_add_(0, paths[:, -1], joint)
            pairs.append(both.numpy())
        # Many filters leave few of them.
        before, tokens = joint.nonzero(as_tuple=True)
        weights = joint[before, tokens]
        unseen = tokens[:, None]
        paths = torch.cat([paths[before], unseen], 1)
        if position < num_tokens - 1:
            cache.batch_select_indices(before)
    return pairs


def least_p_value(samples: NDArray[np.int64], pairs: Sequence[Array]) -> float:
    """Of the tests of all neighbouring tokens in `samples` `[N, num_tokens]` against `exact`."""
    found = []
    for position, probabilities in enumerate(pairs):
        counts = np.zeros(probabilities.shape)
        np.add.at(counts, (samples[:, position], samples[:, position + 1]), 1)
        found.append(p_value(counts, probabilities))
    return min(found)


def p_value(observed: Array, probabilities: Array) -> float:
    """Pearson's chi-square test; cells that expect too little are counted as one."""
    expected = probabilities * observed.sum()
    assert not observed[probabilities == 0].any(), "a token came that the filters exclude"
    small = expected < LEAST_EXPECTED
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < LEAST_EXPECTED:
        # Too little even together: the likeliest cell can take it.
        likeliest = int(expected[:-1].argmax())
        observed[likeliest] += observed[-1]
        expected[likeliest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))

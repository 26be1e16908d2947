"""Draft tokens of several steps, drawn on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.packed import pack, unpack
from shared.sampling.coupled import argmax
from shared.sampling.filters import Filters, adjusts
from shared.sampling.noise import noise_key, noise_of
from shared.sampling.rejection import draw, likeliest
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens


def draw_ahead(
    rows: Sequence[SampleRows],
    num_steps: int,
    vocab_size: int,
    device: torch.device,
    mass: float = 0.98,
    max_entries: int = 512,
    generator: torch.Generator | None = None,
) -> DraftDraws | None:
    """Draws of `proposer.draw` for so many steps of these sequences; None where logits change with what was drawn, or
    a sequence grows a tree."""
    if any(sequence.num_children or adjusts(sequence) for sequence in rows):
        return None
    return DraftDraws(rows, num_steps, vocab_size, device, mass, max_entries, generator)


class DraftDraws:
    """What `proposer.draw` draws of sequences with one row each: by the target's noise, whose keys for all steps are on
    the device from the beginning, or from truncated distributions, which stay there till the end."""

    def __init__(
        self,
        rows: Sequence[SampleRows],
        num_steps: int,
        vocab_size: int,
        device: torch.device,
        mass: float,
        max_entries: int,
        generator: torch.Generator | None,
    ) -> None:
        self._mass, self._max_entries, self._generator = mass, max_entries, generator
        self._coupled = [i for i, sequence in enumerate(rows) if sequence.params.coupled]
        self._others = [i for i, sequence in enumerate(rows) if not sequence.params.coupled]
        seeded = [place for place, i in enumerate(self._coupled) if not rows[i].params.greedy]
        self._places = {
            name: torch.tensor(places, dtype=torch.int64, device=device)
            for name, places in (("coupled", self._coupled), ("others", self._others), ("seeded", seeded))
        }
        keys = [
            [_key(rows[self._coupled[place]], step) for place in seeded] for step in range(num_steps if seeded else 0)
        ]
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device)
        # Those of greedy sequences alone would not be used.
        self._filters = {
            name: Filters([rows[i].params for i in members], vocab_size, device)
            for name, members in (("coupled", self._coupled if seeded else []), ("others", self._others))
        }
        self._tokens: list[Tensor] = []
        self._packed: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        parts = []
        if self._coupled:
            parts.append(self._draw_coupled(self._part("coupled", logits)))
        if self._others:
            parts.append(self._draw_others(self._part("others", logits)))
        tokens = parts[0]
        if len(parts) > 1:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            for name, part in zip(("coupled", "others"), parts, strict=True):
                tokens.index_copy_(0, self._places[name], part)
        self._tokens.append(tokens)
        return tokens

    def take(self) -> list[list[SampledTokens]]:
        packed = iter(torch.stack(self._packed).cpu().numpy() if self._packed else ())
        steps = []
        for tokens in torch.stack(self._tokens).tolist():
            drawn = [SampledTokens((token,)) for token in tokens]
            if self._others:
                for i, each in zip(self._others, unpack(next(packed)), strict=True):
                    drawn[i] = each
            steps.append(drawn)
        return steps

    def _draw_coupled(self, logits: Tensor) -> Tensor:
        if len(self._keys) == 0:
            return argmax(logits)
        scores = self._filters["coupled"].logprobs(logits.float())
        noise = noise_of(self._keys[len(self._tokens)], logits.shape[1])
        return argmax(scores.index_add(0, self._places["seeded"], noise))

    def _draw_others(self, logits: Tensor) -> Tensor:
        logprobs = self._filters["others"].logprobs(logits.float())
        ids, probs = likeliest(logprobs, self._mass, self._max_entries)
        tokens = ids.gather(1, draw(probs, self._generator).unsqueeze(1))
        self._packed.append(pack(tokens, ids, probs))
        return tokens.squeeze(1)

    def _part(self, name: str, logits: Tensor) -> Tensor:
        """The rows of those."""
        places = self._places[name]
        return logits if len(places) == len(logits) else logits[places]


def _key(sequence: SampleRows, step: int) -> int:
    """Of the noise by which it draws then."""
    params = sequence.params
    assert params.seed is not None  # one that is coupled, and not greedy
    return noise_key(params.seed, params.sequence_index, len(sequence.token_ids) + step)

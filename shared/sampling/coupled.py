"""Coupled sampling: target and drafter draw with the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.sampling.filters import adjusts, narrows, sampling_logprobs, sampling_scores
from shared.sampling.noise import noise_key, noise_of
from shared.sampling.rows import SampleRows

Likeliest = tuple[list[list[int]], list[list[float]]]
"""Of each row ids, best first, and, by a softmax of all, logprobs; not finite where there are fewer."""


class Coupling(Protocol):
    """Kernels for scores [R, V] float32 in the CPU's memory, of each row the `noise_key` and the temperature that they
    are still to be divided by; that is 0 for those of greedy sequences."""

    def draw(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float]) -> Tensor:
        """See `draw_coupled`."""

    def likeliest(self, scores: Tensor, keys: Sequence[int], temperatures: Sequence[float], most: int) -> Likeliest:
        """See `likeliest_coupled`."""


_kernels: Coupling | None = None


def couple_by(kernels: Coupling | None) -> None:
    """From now on that is done on the CPU by these."""
    global _kernels
    _kernels = kernels


def draw_coupled(logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """Each row's token [R] int64 from raw `logits` [R, V], for sequences that are all greedy or seeded: where its
    coupled score is largest. Raises as `coupled_scores`.

    A batch that is greedy throughout, with nothing that changes logits, is its argmax and no more.
    """
    if all(sequence.params.greedy and not adjusts(sequence) for sequence in rows):
        return argmax(logits)
    if _kernels is not None and logits.device.type == "cpu":
        return _kernels.draw(*_scores(logits, rows))
    return argmax(coupled_scores(sampling_logprobs(logits, rows), rows))


def likeliest_coupled(logits: Tensor, rows: Sequence[SampleRows], most: int) -> Likeliest:
    """Of each row so many of the largest coupled scores, at most V: what the owner of `logits` [R, V] would draw there.
    Raises as `coupled_scores`."""
    if _kernels is not None and logits.device.type == "cpu":
        return _kernels.likeliest(*_scores(logits, rows), most)
    # On CPUs torch normalises all of them in half the time that `logsumexp` takes.
    best, ids = coupled_scores(sampling_scores(logits, rows), rows).log_softmax(1).topk(most)
    return ids.tolist(), best.tolist()


def coupled_scores(logprobs: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """logprobs + noise [R, V] float32, of whose rows the largest is drawn; for greedy sequences `logprobs`.

    `logprobs` [R, V] as `sampling_logprobs` gives them. Adding Gumbel noise makes the argmax a draw from
    the distribution (Gumbel 1954; Maddison et al. 2014), and drawing with the same noise from two similar
    distributions mostly gives the same token. A row's noise is that of the position which it predicts.
    Raises ValueError for a sampled sequence that has no seed.
    """
    device, (keys, temperatures) = logprobs.device, _noises(rows)
    seeded = [i for i, temperature in enumerate(temperatures) if temperature > 0]
    if not seeded:
        return logprobs
    noise = noise_of(torch.tensor([keys[i] for i in seeded], device=device), logprobs.shape[1])
    if len(seeded) == len(keys):
        return noise.add_(logprobs)
    return logprobs.index_add(0, torch.tensor(seeded, device=device), noise)


def argmax(values: Tensor) -> Tensor:
    """Of each row of `values` [R, V], the first place of its largest [R] int64.

    NumPy finds it six times as fast as torch on a CPU.
    """
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return torch.from_numpy(values.numpy().argmax(1))
    return values.argmax(1)


def _scores(logits: Tensor, rows: Sequence[SampleRows]) -> tuple[Tensor, list[int], list[float]]:
    """What kernels take: what they can do themselves is left to them."""
    keys, temperatures = _noises(rows)
    if any(narrows(sequence.params) or adjusts(sequence) for sequence in rows):
        return sampling_scores(logits, rows), keys, [float(temperature > 0) for temperature in temperatures]
    return logits if logits.dtype == torch.float32 else logits.float(), keys, temperatures


def _noises(rows: Sequence[SampleRows]) -> tuple[list[int], list[float]]:
    """Of each row the `noise_key` and the temperature, both 0 where that is greedy."""
    keys: list[int] = []
    temperatures: list[float] = []
    for sequence in rows:
        params, num_rows = sequence.params, sequence.num_rows
        temperatures += [0.0 if params.greedy else params.temperature] * num_rows
        if params.greedy:
            keys += [0] * num_rows
            continue
        if params.seed is None:
            raise ValueError(f"params.seed is None at temperature {params.temperature}: coupled sampling needs one")
        # In a tree many rows predict the same position.
        depths, base = sequence.depths, len(sequence.token_ids)
        by_depth = {depth: noise_key(params.seed, params.sequence_index, base + depth) for depth in set(depths)}
        keys += [by_depth[depth] for depth in depths]
    return keys, temperatures

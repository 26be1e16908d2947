"""Coupled sampling: target and drafter draw with the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.filters import adjusts, sampling_logprobs, sampling_scores
from shared.sampling.kernels import Likeliest, kernels_for, scores_for_kernels, temperatures_of
from shared.sampling.noise import noise_key, noise_of
from shared.sampling.rows import SampleRows


def draw_coupled(logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """Each row's token [R] int64 from raw `logits` [R, V], for sequences that are all greedy or seeded: where its
    coupled score is largest. Raises as `coupled_scores`.

    A batch that is greedy throughout, with nothing that changes logits, is its argmax and no more.
    """
    if all(sequence.params.greedy and not adjusts(sequence) for sequence in rows):
        return argmax(logits)
    kernels = kernels_for(logits)
    if kernels is not None:
        keys, (scores, temperatures) = _keys(rows), scores_for_kernels(logits, rows)
        return kernels.draw(scores, keys, temperatures)
    return argmax(coupled_scores(sampling_logprobs(logits, rows), rows))


def likeliest_coupled(logits: Tensor, rows: Sequence[SampleRows], most: int) -> Likeliest:
    """Of each row so many of the largest coupled scores, at most V: what the owner of `logits` [R, V] would draw there.
    Raises as `coupled_scores`."""
    kernels = kernels_for(logits)
    if kernels is not None:
        keys, (scores, temperatures) = _keys(rows), scores_for_kernels(logits, rows)
        return kernels.likeliest(scores, keys, temperatures, most)
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
    device, keys = logprobs.device, _keys(rows)
    seeded = [i for i, temperature in enumerate(temperatures_of(rows)) if temperature > 0]
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


def _keys(rows: Sequence[SampleRows]) -> list[int]:
    """Of each row the `noise_key`; 0 for those of greedy sequences."""
    keys: list[int] = []
    for sequence in rows:
        params = sequence.params
        if params.greedy:
            keys += [0] * sequence.num_rows
            continue
        if params.seed is None:
            raise ValueError(f"params.seed is None at temperature {params.temperature}: coupled sampling needs one")
        # In a tree many rows predict the same position.
        depths, base = sequence.depths, len(sequence.token_ids)
        by_depth = {depth: noise_key(params.seed, params.sequence_index, base + depth) for depth in set(depths)}
        keys += [by_depth[depth] for depth in depths]
    return keys

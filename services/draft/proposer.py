"""Drawing draft tokens, so that the target can verify them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.packed import pack, unpack
from shared.sampling.branching import branch
from shared.sampling.coupled import draw_coupled
from shared.sampling.filters import sampling_logprobs
from shared.sampling.rejection import draw as draw_index
from shared.sampling.rejection import truncate
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import SampledTokens


def draw(
    logits: Tensor,
    rows: Sequence[SampleRows],
    mass: float = 0.98,
    max_entries: int = 512,
    generator: torch.Generator | None = None,
) -> list[SampledTokens]:
    """One draft token for each sequence, or for those that grow a tree what may follow each of their rows.

    `logits` [R, V]: the draft model's, raw, of any float dtype: one row for each sequence whose proposal is empty (what
    is drafted so far stands in `token_ids`), and the `num_rows` of each that grows a tree, which is greedy or seeded.
    Greedy and seeded sequences draw with the noise that the target will use, and have no candidates. The others draw
    from their filtered distribution truncated to the fewest entries that hold `mass`, at most `max_entries`, with
    random numbers from `generator` or else torch's global one; `candidates` is that truncated distribution.
    Raises ValueError if the number of rows is another.
    """
    num_rows = sum(sequence.num_rows for sequence in rows)
    if len(logits) != num_rows:
        raise ValueError(f"logits has {len(logits)} rows where the sequences have {num_rows}")
    num_growing = sum(sequence.num_children > 0 for sequence in rows)
    if rows and num_growing == len(rows):
        return [SampledTokens((), children=children) for children in branch(logits, rows)]
    if num_growing:
        return _draw_and_branch(logits, rows, mass, max_entries, generator)
    coupled = [i for i, sequence in enumerate(rows) if sequence.params.coupled]
    if len(coupled) == len(rows):
        return [SampledTokens((token,)) for token in draw_coupled(logits, rows).tolist()]

    drawn: dict[int, SampledTokens] = {}
    if coupled:
        tokens = draw_coupled(logits[torch.tensor(coupled, device=logits.device)], [rows[i] for i in coupled])
        drawn.update((i, SampledTokens((token,))) for i, token in zip(coupled, tokens.tolist(), strict=True))
        others = [i for i in range(len(rows)) if i not in drawn]
        logits = logits[torch.tensor(others, device=logits.device)]
    else:
        others = list(range(len(rows)))
    ids, probs = truncate(sampling_logprobs(logits, [rows[i] for i in others]), mass, max_entries)
    tokens = ids.gather(1, draw_index(probs, generator).unsqueeze(1))
    drawn.update(zip(others, unpack(pack(tokens, ids, probs).cpu().numpy()), strict=True))
    return [drawn[i] for i in range(len(rows))]


def _draw_and_branch(
    logits: Tensor, rows: Sequence[SampleRows], mass: float, max_entries: int, generator: torch.Generator | None
) -> list[SampledTokens]:
    """`draw` where some of the sequences grow trees and others do not."""
    growing, drawing = ([each for each in rows if bool(each.num_children) == grows] for grows in (True, False))
    row_ids: dict[bool, list[int]] = {True: [], False: []}
    first_row = 0
    for sequence in rows:
        row_ids[bool(sequence.num_children)] += range(first_row, first_row + sequence.num_rows)
        first_row += sequence.num_rows
    branched = iter(branch(logits[torch.tensor(row_ids[True], device=logits.device)], growing))
    others = logits[torch.tensor(row_ids[False], device=logits.device)]
    drawn = iter(draw(others, drawing, mass, max_entries, generator))
    return [SampledTokens((), children=next(branched)) if sequence.num_children else next(drawn) for sequence in rows]

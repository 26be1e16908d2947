"""Drawing draft tokens, so that the target can verify them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.sampling.coupled import draw_coupled
from shared.sampling.filters import sampling_logprobs
from shared.sampling.rejection import draw as draw_index
from shared.sampling.rejection import truncate
from shared.sampling.rows import SampleRows
from shared.sampling.sampled import Candidates, SampledTokens


def draw(
    logits: Tensor,
    rows: Sequence[SampleRows],
    mass: float = 0.98,
    max_entries: int = 512,
    generator: torch.Generator | None = None,
) -> list[SampledTokens]:
    """One draft token for each sequence.

    `logits` [R, V]: the draft model's, raw, of any float dtype, one row for each of R sequences, whose
    proposals are empty (what is drafted so far stands in `token_ids`). Greedy and seeded sequences draw
    with the noise that the target will use, and have no candidates. The others draw from their filtered
    distribution truncated to the fewest entries that hold `mass`, at most `max_entries`, with random
    numbers from `generator` or else torch's global one; `candidates` is that truncated distribution.
    Raises ValueError if the number of rows is another.
    """
    if len(logits) != len(rows):
        raise ValueError(f"logits has {len(logits)} rows for {len(rows)} sequences")
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
    index = draw_index(probs, generator).unsqueeze(1)
    # One copy to the host: int32 holds token ids, and float32 by its bits.
    token, count = ids.gather(1, index).int(), (probs > 0).sum(1, keepdim=True).int()
    packed = torch.cat((token, count, ids.int(), probs.view(torch.int32)), 1).cpu().numpy()
    probs_at = 2 + ids.shape[1]
    for i, line in zip(others, packed, strict=True):
        size = int(line[1])
        candidates = Candidates(size, line[2 : 2 + size].tobytes(), line[probs_at : probs_at + size].tobytes())
        drawn[i] = SampledTokens((int(line[0]),), candidates=candidates)
    return [drawn[i] for i in range(len(rows))]

"""The request's own filters: from raw logits to the distribution that is served."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.sampling.params import SamplingParams
from shared.sampling.rows import SampleRows
from shared.sampling.token_counts import TokenCounts

# On CPU a nucleus is looked for among so many likeliest tokens before the whole row is sorted.
_NUCLEUS_WIDTH = 1024


class _Entries:
    """Sparse (row, token id, value) triples of a `[R, V]` tensor, gathered on the host.

    They are kept in arrays because these extend one another by a plain copy.
    """

    def __init__(self) -> None:
        self.rows = array("q")
        self.ids = array("q")
        self.values = array("f")

    def add(self, row: int, ids: array[int], values: array[float]) -> None:
        self.rows.extend(array("q", [row]) * len(ids))
        self.ids.extend(ids)
        self.values.extend(values)

    def add_all(self, row: int, ids: array[int], value: float) -> None:
        self.add(row, ids, array("f", [value]) * len(ids))

    def located(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Offsets [E] into flattened `logits` and values [E] on its device; None if there are none.

        Ids beyond the vocabulary are dropped: a draft model's may be smaller than the target's.
        """
        if not self.ids:
            return None
        vocab_size = logits.shape[1]
        ids = torch.frombuffer(self.ids, dtype=torch.int64)
        offsets = torch.frombuffer(self.rows, dtype=torch.int64) * vocab_size + ids
        values = torch.frombuffer(self.values, dtype=torch.float32)
        inside = ids < vocab_size
        return offsets[inside].to(logits.device), values[inside].to(logits.device)


def adjusts(rows: SampleRows) -> bool:
    """Whether `adjust_logits` changes any logits of this sequence."""
    params = rows.params
    return (
        params.penalised
        or bool(params.logit_bias)
        or (len(rows.token_ids) - rows.num_prompt_tokens < params.min_tokens and bool(params.stop_token_ids))
    )


def narrows(params: SamplingParams) -> bool:
    """Whether only some tokens are left of the distribution that such a sequence is drawn from."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def adjust_logits(logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """Applies penalties, logit bias and min_tokens to every row as if tokens had come one by one.

    `logits` [R, V] of any float dtype, R the sum of `num_rows`; returns [R, V] float32, which is `logits`
    itself if it is float32 and nothing applies, and never writes to `logits`. A row has the draft tokens of
    its lineage in its history. In this order:

    - repetition penalty r (Keskar et al. 2019, as in transformers): logits of tokens in prompt or output
      are divided by r if positive, else multiplied;
    - presence and frequency penalty (OpenAI API): logit − presence · [count > 0] − frequency · count, count
      being the token's occurrences in the output;
    - logit bias: added;
    - min_tokens: stop tokens get −inf while the output is shorter.
    """
    scores = logits.float()
    if not any(map(adjusts, rows)):
        return scores
    penalties: list[_Penalties] = []
    biased, stopped = _Entries(), _Entries()
    first_row = 0
    for sequence in rows:
        if adjusts(sequence):
            params = sequence.params
            if params.penalised:
                penalties.append(_penalties(sequence, first_row, scores.shape[1]))
            bias_ids = array("q", params.logit_bias.keys())
            bias_values = array("f", params.logit_bias.values())
            stop_ids = array("q", sorted(params.stop_token_ids))
            for j, depth in enumerate(sequence.depths):
                biased.add(first_row + j, bias_ids, bias_values)
                if len(sequence.token_ids) + depth - sequence.num_prompt_tokens < params.min_tokens:
                    stopped.add_all(first_row + j, stop_ids, -math.inf)
        first_row += sequence.num_rows

    scores = scores.clone() if scores is logits else scores
    flat = scores.view(-1)
    if penalties:
        offsets, divisors, subtracted = (torch.cat(parts).to(scores.device) for parts in zip(*penalties, strict=True))
        old = flat[offsets]
        # A divisor near 0 must not make infinities, whose differences are not numbers.
        divided = torch.where(old > 0, old / divisors, old * divisors).clamp_(max=torch.finfo(torch.float32).max)
        flat[offsets] = divided - subtracted
    if (at := biased.located(scores)) is not None:
        offsets, biases = at
        flat.index_add_(0, offsets, biases)
    if (at := stopped.located(scores)) is not None:
        offsets, values = at
        flat[offsets] = values
    return scores


class _Penalties(NamedTuple):
    """What penalties do to entries [E] of flattened logits: `offsets` int64, each once; `divisors` and then
    `subtracted` float32. On the host."""

    offsets: Tensor
    divisors: Tensor
    subtracted: Tensor


def _penalties(sequence: SampleRows, first_row: int, vocab_size: int) -> _Penalties:
    """The penalties of one sequence, whose first row of logits is `first_row`.

    Every row has an entry for each distinct token of the sequence and its draft; where a draft token is yet
    to come it changes nothing. Each count is made whole before it is used: a row gets the same bits
    whether its tokens were drafted or are known.
    """
    params, num_rows, draft = sequence.params, sequence.num_rows, sequence.proposal.token_ids
    counts = sequence.token_counts or TokenCounts(sequence.token_ids, sequence.num_prompt_tokens)
    num_known = len(counts.ids)
    new_slots: dict[int, int] = {}
    draft_slots = []
    for token in draft:
        slot = counts.slot(token)
        draft_slots.append(new_slots.setdefault(token, num_known + len(new_slots)) if slot is None else slot)
    ids = torch.cat([_int64(counts.ids), _int64(array("q", new_slots))])
    output_counts = torch.zeros(num_rows, len(ids), dtype=torch.int64)
    output_counts[:, :num_known] = _int64(counts.output_counts)
    if draft:
        lineage = sequence.proposal.lineage
        drafted = [(row, draft_slots[i]) for row in range(num_rows) for i in lineage(sequence.first_row + row)]
        output_counts.index_put_(tuple(torch.tensor(drafted).T), torch.tensor(1), accumulate=True)
    # Ids beyond the vocabulary are dropped: a draft model's may be smaller than the target's.
    inside = ids < vocab_size
    known = torch.arange(len(ids)) < num_known
    ids, known, output_counts = ids[inside], known[inside], output_counts[:, inside]
    in_output = output_counts > 0
    offsets = torch.arange(first_row, first_row + num_rows).unsqueeze(1) * vocab_size + ids
    divisors = torch.where(known | in_output, params.repetition_penalty, 1.0)
    subtracted = in_output * params.presence_penalty + output_counts * params.frequency_penalty
    return _Penalties(offsets.view(-1), divisors.float().view(-1), subtracted.float().view(-1))


def _int64(values: array[int]) -> Tensor:
    """The array as a tensor that shares its memory."""
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def sampling_logprobs(logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """Log-probabilities that each row's token is drawn with: float32 [R, V], −inf outside the filters.

    `logits` [R, V] of any float dtype is adjusted (`adjust_logits`), then filtered by temperature, top_k,
    top_p (Holtzman et al. 2020) and min_p (Nguyen et al. 2024), in this order and with the meaning they
    have in transformers. Tokens tied with the least likely one kept are kept too, so that the outcome
    hangs on no sorting order. Greedy rows hold their adjusted logits: rounding in a softmax could tie the
    two likeliest tokens.
    """
    return _filters(logits, rows).logprobs(adjust_logits(logits, rows))


def sampling_scores(logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    """The same but for a constant of each row, for who makes a softmax of it all the same."""
    if all(sequence.params.greedy and not adjusts(sequence) for sequence in rows):
        return logits.float()
    return _filters(logits, rows).scores(adjust_logits(logits, rows))


def _filters(logits: Tensor, rows: Sequence[SampleRows]) -> Filters:
    params = [sequence.params for sequence in rows for _ in range(sequence.num_rows)]
    return Filters(params, logits.shape[1], logits.device)


class Filters:
    """Temperature, top_k, top_p, min_p and the softmax of R rows: what they take is put on the device once, for steps
    whose rows are the same sequences'."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        sampled = [i for i, row in enumerate(params) if not row.greedy]
        self._sampled = _Rows.of(sampled, len(params), device)
        if len(sampled) < len(params):
            params = [params[i] for i in sampled]
        # Rounding must not hang on who else is there: what is cut off is counted from the likeliest token down.
        self._shifts = any(row.temperature != 1.0 or narrows(row) for row in params)
        self._temperatures: Tensor | None = None
        if any(row.temperature != 1.0 for row in params):
            self._temperatures = column([row.temperature for row in params])
        chosen = [i for i, row in enumerate(params) if 0 < row.top_k < vocab_size]
        self._of_top_k = _Rows.of(chosen, len(params), device)
        if chosen:
            self._most_k = max(params[i].top_k for i in chosen)
            self._ranks = column([params[i].top_k - 1 for i in chosen], torch.int64)
        chosen = [i for i, row in enumerate(params) if row.top_p < 1.0]
        self._of_top_p = _Rows.of(chosen, len(params), device)
        if chosen:
            self._top_p = column([params[i].top_p for i in chosen])
        chosen = [i for i, row in enumerate(params) if row.min_p > 0.0]
        self._of_min_p = _Rows.of(chosen, len(params), device)
        if chosen:
            # p < min_p · max p, in logarithms; the normaliser is on both sides.
            self._margins = column([math.log(params[i].min_p) for i in chosen])

    def logprobs(self, scores: Tensor) -> Tensor:
        """As `sampling_logprobs` of adjusted logits [R, V] float32."""
        return self._of_sampled(scores, lambda some: self._filtered(some).log_softmax(1))

    def scores(self, scores: Tensor) -> Tensor:
        """As `sampling_scores`."""
        return self._of_sampled(scores, self._filtered)

    def _of_sampled(self, scores: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return scores if self._sampled is None else self._sampled.replace(scores, change)

    def _filtered(self, scores: Tensor) -> Tensor:
        """Rows that are sampled, but for a constant of each."""
        if self._shifts:
            # Divided by a low temperature, large logits would overflow, too.
            scores = scores - scores.amax(1, keepdim=True)
        if self._temperatures is not None:
            scores = scores / self._temperatures
        if self._of_top_k is not None:
            scores = self._of_top_k.replace(
                scores, lambda some: _cut(some, some.topk(self._most_k).values.gather(1, self._ranks))
            )
        if self._of_top_p is not None:
            scores = self._of_top_p.replace(scores, lambda some: _cut(some, _nucleus_floor(some, self._top_p)))
        if self._of_min_p is not None:
            scores = self._of_min_p.replace(scores, lambda some: _cut(some, some.amax(1, keepdim=True) + self._margins))
        return scores


class _Rows(NamedTuple):
    """Some of the rows of scores, at least one; `places`: which, None for all."""

    places: Tensor | None

    @classmethod
    def of(cls, chosen: list[int], num_rows: int, device: torch.device) -> _Rows | None:
        """None for none."""
        if not chosen:
            return None
        return cls(None if len(chosen) == num_rows else torch.tensor(chosen, device=device))

    def replace(self, scores: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`scores` [R, V] with these rows changed; no copy is made where all are."""
        if self.places is None:
            return change(scores)
        return scores.index_copy(0, self.places, change(scores[self.places]))


def _cut(scores: Tensor, floor: Tensor) -> Tensor:
    """`scores` [N, V] with everything below its row's `floor` [N, 1] at −inf."""
    return scores.masked_fill(scores < floor, -math.inf)


def _nucleus_floor(scores: Tensor, top_p: Tensor) -> Tensor:
    """The least score [N, 1] among the fewest likeliest tokens of `scores` [N, V], of which the largest is 0 in each
    row, that hold `top_p` [N, 1]."""
    # `logsumexp` adds up a single row in as many parts as there are threads.
    normaliser = -scores.log_softmax(1).amax(1, keepdim=True)
    # A whole sort is slow on CPU and seldom needed; elsewhere, asking whether it is would cost a wait.
    if scores.device.type != "cpu" or scores.shape[1] <= _NUCLEUS_WIDTH:
        return _floor_among(scores.sort(dim=1, descending=True).values, normaliser, top_p)
    likeliest = scores.topk(_NUCLEUS_WIDTH).values
    floor = _floor_among(likeliest, normaliser, top_p)
    short = ((likeliest - normaliser).exp().sum(1, keepdim=True) < top_p).squeeze(1).nonzero().squeeze(1)
    if len(short):
        likeliest = scores[short].sort(dim=1, descending=True).values
        floor[short] = _floor_among(likeliest, normaliser[short], top_p[short])
    return floor


def _floor_among(likeliest: Tensor, normaliser: Tensor, top_p: Tensor) -> Tensor:
    """The last of `likeliest` [N, K], best first, that the nucleus takes in."""
    mass = (likeliest - normaliser).exp().cumsum(1)
    # A token is in while those before it hold less than top_p; the first always is.
    return likeliest.gather(1, (mass[:, :-1] < top_p).sum(1, keepdim=True))

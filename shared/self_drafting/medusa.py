"""Medusa heads: each guesses a token further on, from what the target saw last (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.sampling.sampled import SampledTokens
from shared.self_drafting.accepted import kept_tokens
from shared.self_drafting.drafter import Growing


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHead(nn.Module):
    """`num_blocks` residual blocks, and logits from them."""

    def __init__(self, hidden: int, num_blocks: int, vocab_size: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(hidden) for _ in range(num_blocks)))
        self.out = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., vocab_size]`."""
        logits: Tensor = self.out(self.blocks(x))
        return logits


class Medusa:
    """Drafts with heads on the target's last hidden state, behind its norm: the first head's token follows the one that
    the target itself draws from it."""

    source = "medusa"
    uses_kv = False

    def __init__(self, heads: List[MedusaHead], dtype: torch.dtype) -> None:
        """`dtype`: of the heads."""
        self._heads = heads
        self._dtype = dtype
        # What the target saw last, `[hidden]`, before it drew the sequence's last token.
        self._hidden: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()
        # Of the sequences that draft now, and by row: the logits of every head that was needed.
        self._drafting: dict[Sequence, int] = {}
        self._stacked = torch.empty(0)
        self._logits: dict[int, Tensor] = {}

    @property
    def most_steps(self) -> int:
        return len(self._heads)

    def observe(
        self, plan: StepPlan, captured: Tensor | None, sampled: List[SampledTokens], followed: Collection[Sequence]
    ) -> None:
        assert captured is not None
        self._drafting, self._logits = {}, {}
        for item in plan.scheduled:
            if item.sequence not in followed:
                self._hidden.pop(item.sequence, None)
        if not followed:
            return
        kept = [each for each in kept_tokens(plan, sampled) if each.item.num_rows and each.item.sequence in followed]
        if kept:
            last = captured[:, 0].index_select(0, torch.tensor([each.places[-1] for each in kept]).to(captured.device))
            self._hidden.update(zip((each.item.sequence for each in kept), last.unbind(), strict=True))

    def keeps_up(self, sequence: Sequence) -> bool:
        return False

    def num_lacking(self, sequence: Sequence) -> int:
        return 0

    def follow(self, sequences: List[Sequence]) -> None:
        """The target's last state is all it needs."""

    def ready(self, sequence: Sequence) -> bool:
        return sequence in self._hidden

    def begin(self, sequences: List[Sequence]) -> Tensor:
        self._drafting = {sequence: i for i, sequence in enumerate(sequences)}
        self._stacked = torch.stack([self._hidden[sequence] for sequence in sequences])
        self._logits = {}
        return self._of_head(0)

    def extend(self, growing: List[Growing]) -> Tensor:
        """What head d guesses is the same behind all tokens of that depth."""
        depths = [depth for each in growing for depth in each.proposal.depths[each.first_row :]]
        rows = [self._drafting[each.sequence] for each in growing for _ in range(each.num_new)]
        return torch.stack([self._of_head(depth)[row] for depth, row in zip(depths, rows, strict=True)])

    @torch.inference_mode()
    def _of_head(self, depth: int) -> Tensor:
        """`[S, vocab_size]` of the sequences that draft now."""
        if depth not in self._logits:
            self._logits[depth] = self._heads[depth](self._stacked.to(self._dtype))
        return self._logits[depth]

"""One sequence as an engine knows it: its tokens, how far their KV is computed, and in which blocks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Tokens
from dataclasses import replace
from enum import Enum, auto

from shared.engine.kv_import import KVImport
from shared.sampling.draft_tree import DraftTree
from shared.sampling.params import SamplingParams
from shared.sampling.proposal import EMPTY_PROPOSAL, Proposal
from shared.sampling.sampled import SampledTokens
from shared.sampling.token_counts import TokenCounts


class Finish(Enum):
    """Why a sequence ended."""

    STOPPED = auto()
    LENGTH = auto()


class Sequence:
    """Tokens known, and a counter that must catch up with them: no prefill phase and no decode phase.

    `token_ids` are the committed tokens; in a drafter they go on with its own draws, and only the first
    `num_committed` are committed. `proposal` holds draft tokens to verify behind them. `num_steps` is how
    often the sequence may still sample before its owner must speak again; with none left its KV is only
    computed up to `num_wanted_tokens`; `draws_on`: between them its owner has nothing to say. `token_counts` counts
    `token_ids` where the request has penalties. A drafter that grows a `tree` has it in `proposal`, as far as it is
    computed or to be computed, and samples the `num_children` likeliest tokens behind each row from `first_row` on.
    `moves`: from which to which position KV is to move before anything more is computed. `kv_import` is what comes
    from another worker, to begin with.
    """

    def __init__(
        self,
        token_ids: Tokens[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        root_hash: bytes,
        *,
        drafting: bool = False,
        num_steps: int = 0,
    ) -> None:
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.params = params
        self.token_counts = TokenCounts(self.token_ids, num_prompt_tokens) if params.penalised else None
        self.root_hash = root_hash
        self.drafting = drafting
        self.num_steps = num_steps
        self.num_committed = len(self.token_ids)
        self.num_wanted_tokens = 0
        self.draws_on = False
        self.proposal: Proposal = EMPTY_PROPOSAL
        self.first_row = 0
        self.tree: DraftTree | None = None
        self.moves: list[tuple[int, int]] = []
        self.forks: list[Sequence] = []
        self.kv_import: KVImport | None = None
        self.finish: Finish | None = None
        self._foreseen: SamplingParams | None = None
        self._num_foreseen = 0
        # Kept by the scheduler.
        self.arrival = 0
        self.last_step = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before the owner must speak again; 0 when idle."""
        if self.num_steps > 0:
            return len(self.token_ids) + len(self.proposal) - self.num_computed_tokens
        return max(0, self.num_wanted_tokens - self.num_computed_tokens)

    @property
    def awaits_import(self) -> bool:
        """Whether its KV is on the way: until it is here, or will not come, nothing of it is computed."""
        return self.kv_import is not None and not self.kv_import.ended

    @property
    def num_rows(self) -> int:
        """Rows of logits that a sampling step needs: one for each draft token, one for what follows."""
        return 1 + len(self.proposal) - self.first_row

    @property
    def num_children(self) -> int:
        """How many tokens that may follow each row it samples, in place of one that does; 0 where it grows no tree."""
        return 0 if self.tree is None else self.tree.num_children

    @property
    def drawn_by(self) -> SamplingParams:
        """How its next step draws: by `params`, or by noise of its own where that was foreseen."""
        if self._foreseen is not None and len(self.token_ids) < self._num_foreseen:
            return self._foreseen
        return self.params

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens it may have."""
        return self.params.max_tokens - (len(self.token_ids) - self.num_prompt_tokens)

    @property
    def num_drawn(self) -> int:
        """A drafter's draws behind the committed tokens."""
        return len(self.token_ids) - self.num_committed

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens, draft tokens included, at positions start <= position < end."""
        if end <= len(self.token_ids):
            return self.token_ids[start:end]
        known = len(self.token_ids)
        return self.token_ids[start:] + list(self.proposal.token_ids[max(0, start - known) : end - known])

    def advance(self, sampled: SampledTokens) -> SampledTokens:
        """Takes the outcome of a sampling step; returns it cut behind a stop token or at max_tokens.

        Positions of rejected draft tokens fall back out of `num_computed_tokens`. A tree grows by what may follow its
        rows, and has more computed, in one more step, until it has grown.
        """
        if self.tree is not None:
            self.num_steps -= 1
            self.tree.take(sampled.children)
            following = self.tree.advance()
            if following is not None:
                self._compute_tree(*following)
            return sampled
        before = len(self.token_ids)
        tokens = sampled.token_ids
        if not self.drafting:
            tokens = self._until_finish(tokens)
        self.token_ids += tokens
        if self.token_counts is not None:
            self.token_counts.add(tokens)
        self.num_computed_tokens = before + min(sampled.num_accepted, len(tokens))
        self.num_steps -= 1
        self.proposal = EMPTY_PROPOSAL
        if not self.drafting:
            self.num_committed = len(self.token_ids)
        if len(tokens) == len(sampled.token_ids):
            return sampled
        logprobs = None if sampled.logprobs is None else sampled.logprobs[: len(tokens)]
        return SampledTokens(tokens, min(sampled.num_accepted, len(tokens)), logprobs)

    def foresee(self, num_tokens: int) -> None:
        """A drafter is to look at the noise by which the next `num_tokens` are drawn, which unseeded sequences then
        have of their own (`drawn_by`).

        These tokens are drawn by it whatever comes of the draft: how much of that is verified depends on how likely
        its tokens are, so on the noise, and if others were drawn anew, those it favours would come more often.
        """
        if self.params.coupled:
            return
        if self._foreseen is None:
            self._foreseen = replace(self.params, seed=secrets.randbits(64))
        self._num_foreseen = max(self._num_foreseen, len(self.token_ids) + num_tokens)

    def commit(self, base_length: int, token_ids: Tokens[int]) -> None:
        """Tells a drafter what was committed behind its first `base_length` tokens.

        Draws that agree keep their KV, and if all of `token_ids` was drawn already, the draws behind it
        remain as the beginning of the next proposal. Of a tree the line that agrees keeps its KV, short of the last
        token, which the next draw needs.
        """
        path = self._take_path(token_ids)
        known = self.token_ids[base_length : base_length + len(token_ids)]
        agreeing = len(known)
        for i, (drawn, committed) in enumerate(zip(known, token_ids, strict=False)):
            if drawn != committed:
                agreeing = i
                break
        if agreeing < len(token_ids):
            if self.token_counts is not None:
                self.token_counts.remove(self.token_ids[base_length + agreeing :])
                self.token_counts.add(token_ids[agreeing:])
            self.token_ids[base_length + agreeing :] = token_ids[agreeing:]
            self.num_computed_tokens = min(self.num_computed_tokens, base_length + agreeing)
        self.num_committed = base_length + len(token_ids)
        if path:
            self.moves += [(base_length + row - 1, base_length + i) for i, row in enumerate(path) if row != i + 1]
            self.num_computed_tokens = base_length + len(path)

    def drop_draws(self) -> None:
        """Gives a drafter's draws behind the committed tokens up."""
        drawn = self.token_ids[self.num_committed :]
        if self.token_counts is not None:
            self.token_counts.remove(drawn)
        del self.token_ids[self.num_committed :]
        self.num_computed_tokens = min(self.num_computed_tokens, self.num_committed - bool(drawn))

    def grow(self, tree: DraftTree) -> None:
        """Has a new tree of a drafter's grow."""
        self.tree, self.draws_on = tree, True
        self._compute_tree(EMPTY_PROPOSAL, 0)

    def _compute_tree(self, proposal: Proposal, first_row: int) -> None:
        """Has as much of it computed, and what may follow its rows from that one on sampled."""
        self.proposal, self.first_row, self.num_steps = proposal, first_row, 1

    def _take_path(self, token_ids: Tokens[int]) -> list[int]:
        """Gives a drafter's tree up; the rows of those of its tokens that are computed and agree with what was
        committed behind it, but for the last."""
        tree, num_computed = self.proposal, self.num_computed_tokens - len(self.token_ids)
        # With nothing behind them the next draw needs the last token's logits once more.
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - (not token_ids))
        self.proposal, self.first_row, self.tree = EMPTY_PROPOSAL, 0, None
        path = [0]
        rows = {
            (parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True), 1)
        }
        for token in token_ids[:-1]:
            row = rows.get((path[-1], token))
            if row is None or row > num_computed:
                break
            path.append(row)
        return path[1:]

    def _until_finish(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        room = self.num_tokens_left
        for i, token in enumerate(tokens[:room]):
            if token in self.params.stop_token_ids:
                self.finish = Finish.STOPPED
                return tokens[: i + 1]
        if len(tokens) >= room:
            self.finish = Finish.LENGTH
        return tokens[:room]

"""Drafting in the shadow of plain decoding, to learn what it would bring."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.v1 import worker_pb2

from services.router.workers.draft_link import DraftLane
from shared.policy.drafting import Drafting
from shared.policy.shape import Shape


class Scout:
    """Has the drafter propose what the target decodes meanwhile, and compares: nobody waits for it.

    For sequences whose target and drafter draw with the same noise (`SamplingParams.coupled`), and for no others: with
    these a draft token is accepted exactly if it is what the target draws. Tokens that it leaves out count as not
    accepted. A proposal that fails ends the scouting.
    """

    def __init__(self, draft: DraftLane, drafting: Drafting) -> None:
        self._draft = draft
        self._drafting = drafting
        # The proposal asked for, behind so many committed tokens.
        self._proposing: asyncio.Task[worker_pb2.Proposal | None] | None = None
        self._position = 0

    @classmethod
    def sent(cls, draft: DraftLane, drafting: Drafting) -> Scout | None:
        """One, if the sequence is to scout."""
        return cls(draft, drafting) if drafting.num_scouting_rounds > 0 else None

    def advance(self, token_ids: Sequence[int], traceparent: str) -> bool:
        """To be called at each result of plain decoding, with the committed tokens. Returns whether there is more to
        come."""
        if self._proposing is not None:
            self._compare(token_ids)
        if self._proposing is None and self._drafting.num_scouting_rounds > 0:
            self._position = len(token_ids)
            proposal = self._draft.propose(list(token_ids), Shape(self._drafting.num_scouting_tokens), traceparent)
            self._proposing = asyncio.create_task(proposal)
        return self._proposing is not None

    def end(self) -> None:
        """Gives up a proposal that is still to come. Safe to call again."""
        if self._proposing is not None:
            self._proposing.cancel()
            self._proposing = None

    def _compare(self, token_ids: Sequence[int]) -> None:
        """Takes the proposal in, once it is there and so are the tokens it is about."""
        assert self._proposing is not None
        if not self._proposing.done():
            return
        proposal = self._proposing.result()
        if proposal is None:
            self._proposing = None
            self._drafting.num_scouting_rounds = 0
            return
        num_wanted = self._drafting.num_scouting_tokens
        num_drafted = min(len(proposal.token_ids), num_wanted)
        drawn = token_ids[self._position : self._position + num_drafted]
        if len(drawn) < num_drafted:
            return
        self._proposing = None
        agree = [draft == own for draft, own in zip(proposal.token_ids, drawn, strict=False)]
        self._drafting.observe_in_shadow(num_wanted, agree.index(False) if False in agree else num_drafted)

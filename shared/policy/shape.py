"""What a round drafts for each sequence."""

from __future__ import annotations

from typing import Final, NamedTuple

TREE_WIDTH: Final = 8
"""Of a tree that grows, a step of the drafter computes so many tokens at most."""


class Shape(NamedTuple):
    """`num_draft_tokens`: γ steps of the drafter. They find a chain of so many tokens, or where `num_nodes` is more
    than that, a token tree of so many. Of 0 tokens: plain decoding."""

    num_draft_tokens: int
    num_nodes: int = 0

    @property
    def is_tree(self) -> bool:
        return self.num_nodes > self.num_draft_tokens

    @property
    def num_verified(self) -> int:
        """Draft tokens that the target computes."""
        return max(self)

    @property
    def num_step_rows(self) -> int:
        """Tokens that each of the drafter's steps behind the first computes."""
        return min(self.num_nodes, TREE_WIDTH) if self.is_tree else 1

    @property
    def branching(self) -> float:
        """Tokens for each step of the drafter; 1 of a chain."""
        return self.num_verified / self.num_draft_tokens

    def as_chain(self) -> Shape:
        """The chain of as many steps."""
        return Shape(self.num_draft_tokens)

    def cut_to(self, num_draft_tokens: int) -> Shape:
        """Of so many steps at most, and as many tokens for each; plain where that is none."""
        if min(num_draft_tokens, self.num_draft_tokens) <= 0:
            return PLAIN
        if num_draft_tokens >= self.num_draft_tokens:
            return self
        cut = Shape(num_draft_tokens, self.num_nodes * num_draft_tokens // self.num_draft_tokens)
        return cut if cut.is_tree else cut.as_chain()


PLAIN = Shape(0)

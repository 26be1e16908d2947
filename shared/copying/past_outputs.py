"""What was generated for a tenant before, as far as there is room: its next output may be much the same."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from shared.copying.suffix_index import Match, SuffixIndex


class PastOutputs:
    """Outputs by tenant, never looked up for another. Those that matched nothing for longest go first."""

    def __init__(self) -> None:
        self._by_tenant: dict[bytes, SuffixIndex] = {}
        # Of each output its tenant and length, the least recently used first.
        self._outputs: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._text_ids = itertools.count()
        self.num_tokens = 0

    def add(self, tenant: bytes, token_ids: Sequence[int]) -> None:
        """Keeps an output; one without tokens is none."""
        if not token_ids:
            return
        text_id = next(self._text_ids)
        self._by_tenant.setdefault(tenant, SuffixIndex()).extend(text_id, token_ids)
        self._outputs[text_id] = (tenant, len(token_ids))
        self.num_tokens += len(token_ids)

    def trim(self, most_tokens: int) -> None:
        """Forgets outputs until no more than so many tokens are left."""
        while self.num_tokens > most_tokens:
            text_id, (tenant, length) = self._outputs.popitem(last=False)
            self.num_tokens -= length
            index = self._by_tenant[tenant]
            index.drop(text_id)
            if not len(index):
                del self._by_tenant[tenant]

    def matches(self, tenant: bytes, tail: Sequence[int], shortest: int = 0) -> list[Match]:
        """Where the tenant's outputs go on behind what `tail` ends with."""
        index = self._by_tenant.get(tenant)
        found = [] if index is None else index.matches(tail, shortest)
        for match in found:
            self._outputs.move_to_end(match.text_id)
        return found

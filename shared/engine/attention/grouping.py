"""Which sequences of a step attend together: padded to one another where that is cheaper than apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

# Scoring one query against a cached position costs so much of what gathering the position costs.
_QUERY_COST = 0.25


def group_sequences(
    queries: Sequence[int] | Indices, contexts: Sequence[int] | Indices, launch_positions: float, max_positions: int
) -> list[Indices]:
    """Splits sequences 0 to S - 1 into groups that are each padded to their longest; every group is ascending.

    Sequence i has `queries[i]` new tokens over `contexts[i]` positions of KV. A group of B costs what gathering
    B times its longest context costs, and as much again for every `1 / _QUERY_COST` of its longest query.
    Sequences start out with those whose contexts lie within a factor of 2 and queries within a factor of 4;
    groups next to each other merge where padding costs less than another group does, which is what gathering
    `launch_positions` costs. A group gathers at most `max_positions` positions, unless a single sequence does.
    """
    query, context = np.asarray(queries, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
    # Contexts first: most steps hold decodes and verifications of a few tokens, which may merge with each other.
    size_class = np.ceil(np.log2(context)) * 64 + np.ceil(np.log2(query) / 2)
    classes = [np.flatnonzero(size_class == value) for value in np.unique(size_class)]
    merged = classes[:1]
    for members in classes[1:]:
        both = np.concatenate([merged[-1], members])
        apart = _cost(query, context, merged[-1]) + _cost(query, context, members) + launch_positions
        if _cost(query, context, both) <= apart:
            merged[-1] = both
        else:
            merged.append(members)
    return [part for members in merged for part in _split(members, context, max_positions)]


def _cost(query: Indices, context: Indices, members: Indices) -> float:
    """Cost of a group in gathered positions."""
    return float(len(members) * context[members].max() * (1 + _QUERY_COST * query[members].max()))


def _split(members: Indices, context: Indices, max_positions: int) -> list[Indices]:
    """Parts of a group that each gather at most `max_positions`, sequences of like contexts together."""
    if len(members) * context[members].max() <= max_positions:
        return [np.sort(members)]
    parts = []
    left = members[np.argsort(context[members], kind="stable")]
    while len(left):
        size = max(1, max_positions // int(context[left[-1]]))
        parts.append(np.sort(left[-size:]))
        left = left[:-size]
    return parts

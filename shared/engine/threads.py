"""How many CPU threads a model is worth."""

from __future__ import annotations

from typing import Final

# Of weights, which a core reads in about a millisecond. That is also what a token takes of a core outside its step: in
# the router, in gRPC and at whoever reads it. A thread for less makes steps hardly shorter, and has them wait, as all
# threads of a step wait for each other, whenever one of them shares its core with that.
_BYTES_FOR_A_THREAD: Final = 16 << 20


def num_threads_for(weight_bytes: int, most: int) -> int:
    """Threads, at most so many, for a model whose weights have so many bytes."""
    return min(most, max(1, weight_bytes // _BYTES_FOR_A_THREAD))

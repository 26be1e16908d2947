"""What steps and rounds take beyond what their sizes say: transport, waiting, contexts, a busy machine."""

from __future__ import annotations

# How much a measurement counts against those before it, once there are a few.
_WEIGHT = 0.1
_NUM_PRIOR = 4.0
# The most that a measurement is believed to be off, as a share of the expected time. So the estimate is near
# the median: a step that took ten times as long moves it no further than one that was a little slow.
_MOST_ERROR = 0.12


class Overhead:
    """Seconds beyond those expected, by load and γ (0: plain decoding). Loads count alike within a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._counts: dict[tuple[int, int], float] = {}

    def seconds(self, load: int, gamma: int) -> float:
        """What was learnt for this load and γ, else for the nearest; 0 before anything was."""
        key = (load.bit_length(), gamma)
        if key not in self._seconds:
            if not self._seconds:
                return 0.0
            key = min(self._seconds, key=lambda seen: (abs(seen[0] - key[0]), abs(seen[1] - gamma)))
        return self._seconds[key]

    def observe(self, load: int, gamma: int, expected: float, seconds: float, weight: float) -> None:
        """What should have taken `expected` seconds took `seconds`. `weight`, in (0, 1], is its say: what many
        see of the same step counts once."""
        key = (load.bit_length(), gamma)
        known = self._seconds.get(key, self.seconds(load, gamma))
        count = self._counts[key] = self._counts.get(key, 0.0) + weight
        error = seconds - expected - known
        most = _MOST_ERROR * expected
        self._seconds[key] = known + weight * max(_WEIGHT, 1 / (count + _NUM_PRIOR)) * min(max(error, -most), most)

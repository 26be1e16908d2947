"""How long a worker that owes results has sent nothing."""

from __future__ import annotations

# Placement and failover wait at least so long, and so many times what the worker's longest step should take.
_OVERDUE_SECONDS, _OVERDUE_STEPS = 3.0, 4.0
_HUNG_SECONDS, _HUNG_STEPS = 8.0, 8.0
# With no other worker to move to, waiting costs nothing but time.
_SOLE_HUNG_SECONDS, _SOLE_HUNG_STEPS = 60.0, 16.0


class Silence:
    """A worker answers each of its steps, if only by a sign of life: silence is measured against one step.

    Time is counted in ticks of the router's own event loop: while that stands still, or cannot read what has come,
    nobody is silent.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def heard(self) -> None:
        """Something came."""
        self.seconds = 0.0

    def tick(self, seconds: float, owed: bool) -> None:
        """So much time has passed; `owed` says whether anything is to come."""
        self.seconds = self.seconds + seconds if owed else 0.0

    def overdue(self, step_seconds: float) -> bool:
        """Longer than a step takes: place nothing there. `step_seconds`: what the worker's longest should take."""
        return self.seconds > max(_OVERDUE_SECONDS, _OVERDUE_STEPS * step_seconds)

    def hung(self, step_seconds: float, sole: bool) -> bool:
        """So long that it is given up; later if it is the `sole` worker."""
        seconds, steps = (_SOLE_HUNG_SECONDS, _SOLE_HUNG_STEPS) if sole else (_HUNG_SECONDS, _HUNG_STEPS)
        return self.seconds > max(seconds, steps * step_seconds)

"""What a worker's steps cost, made up."""

from __future__ import annotations

from shared.policy.step_costs import StepCosts


def flat(seconds: float = 0.01) -> StepCosts:
    """Eight rows cost what one does, and from there on each as much again."""
    return StepCosts([(1, seconds), (8, seconds), (80, 10 * seconds)])

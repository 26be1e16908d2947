"""Model checkpoints that come with the project: `demo/` holds the demo pair, heads for its target, and its trainer.

Imports nothing else of ours.
"""

from __future__ import annotations

from pathlib import Path

DEMO_TARGET = Path(__file__).parent / "demo" / "target"
DEMO_DRAFT = Path(__file__).parent / "demo" / "draft"
DEMO_HEADS = Path(__file__).parent / "demo" / "heads"
"""A folder for each kind."""

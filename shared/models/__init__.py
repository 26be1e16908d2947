"""Model checkpoints that come with the project: `demo/` holds the demo pair and its trainer.

Imports nothing else of ours.
"""

from __future__ import annotations

from pathlib import Path

DEMO_TARGET = Path(__file__).parent / "demo" / "target"
DEMO_DRAFT = Path(__file__).parent / "demo" / "draft"

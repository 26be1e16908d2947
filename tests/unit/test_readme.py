"""What the README says of settings is what the settings are."""

from __future__ import annotations

from pathlib import Path

from services.cli.settings_table import settings_table

README = Path(__file__).parents[2] / "README.md"


def test_the_settings_table_is_up_to_date() -> None:
    assert settings_table().strip() in README.read_text(encoding="utf-8")

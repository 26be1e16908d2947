"""The README's table of settings: `python -m services.cli.settings_table` prints it."""

from __future__ import annotations

from services.cli.options import default_text
from services.draft.settings import DraftSettings
from services.router.settings import RouterSettings
from services.target.settings import TargetSettings
from shared.settings import ServiceSettings

SETTINGS: tuple[type[ServiceSettings], ...] = (RouterSettings, TargetSettings, DraftSettings)


def settings_table() -> str:
    """Every setting of every service as a Markdown table; those that services share stand once."""
    services: dict[tuple[str, str, str], list[str]] = {}
    for settings_class in SETTINGS:
        for name, field in settings_class.model_fields.items():
            row = (name, default_text(field), field.description or "")
            services.setdefault(row, []).append(settings_class.service)
    rows = ["| setting | of | default | what it is |", "| --- | --- | --- | --- |"]
    for (name, default, description), of in services.items():
        shown = default if default in ("required", "unset") else f"`{default}`"
        rows.append(f"| `{name}` | {'all' if len(of) == len(SETTINGS) else ', '.join(of)} | {shown} | {description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_table())

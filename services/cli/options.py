"""Command-line options made from a settings class, so that no setting is written down twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.settings import ServiceSettings


def command_from_settings(settings_class: type[ServiceSettings], run: Callable[[ServiceSettings], None]) -> Any:
    """A typer command that takes every field of `settings_class` as an option and calls `run` with the settings.

    Options are passed on as text: the settings class alone judges them, so that a wrong value reads the
    same wherever it came from. The command raises SettingsError.
    """

    def command(**flags: object) -> None:
        run(settings_class.load(**flags))

    parameters = [_parameter(name, field) for name, field in settings_class.model_fields.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def default_text(field: FieldInfo) -> str:
    """A field's default for people: "required", "unset", or the value."""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default in ({}, []):
        return "unset"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    option: Any
    if field.annotation is bool:
        # All are off by default; what a file turns on the environment turns off.
        option = typer.Option(flag, help=field.description, show_default=default_text(field))
    else:
        option = typer.Option(flag, help=field.description, show_default=default_text(field), metavar="VALUE")
    kind = bool if field.annotation is bool else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )

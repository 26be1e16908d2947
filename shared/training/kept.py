"""What a training keeps in its folder, to go on from when it is broken off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shared.settings import StartupError

SAMPLES = "samples.pt"
STATE = "training.pt"
_NEW = ".new"


class Kept:
    """A file of a training's folder, that of `identity`; at any instant it is whole, or not there."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity

    def write(self, state: Mapping[str, Any]) -> None:
        new = self._path.with_name(self._path.name + _NEW)
        torch.save({"identity": self._identity, **state}, new)
        new.replace(self._path)

    def read(self, take_up: Callable[[Mapping[str, Any]], None]) -> None:
        """Has what is there, if anything is, taken up. Raises StartupError if it is of another training, or damaged:
        whatever `take_up` raises."""
        if not self._path.is_file():
            return
        try:
            state = torch.load(self._path, weights_only=True)
            if state["identity"] != self._identity:
                raise ValueError(f"it is of {state['identity']}, not of {self._identity}")
            take_up(state)
        except Exception as error:  # whatever is wrong with a file
            reason = " ".join(str(error).split())[:200]
            raise StartupError(f"{self._path} cannot be gone on from ({reason}): move it away to begin anew") from error


def claim(folder: Path) -> None:
    """Takes the folder for a training, made if it is not there. Raises StartupError if it cannot be written to, or
    holds anything but what one was begun with: what was made there before is not lost."""
    new = folder / f"{STATE}{_NEW}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / STATE).is_file() and any(each not in _files(folder) for each in folder.iterdir()):
            raise StartupError(f"folder {folder} is not empty, and nothing was begun there: name another")
        new.touch()
        new.unlink()
    except OSError as error:
        raise StartupError(f"folder {folder} cannot be written to: {error.strerror}") from error


def forget(folder: Path) -> None:
    """The training in that folder is over."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [folder / f"{name}{suffix}" for name in (SAMPLES, STATE) for suffix in ("", _NEW)]

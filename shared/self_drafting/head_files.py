"""Files of a head: its config and its weights, from a local folder or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from shared.engine.source import cannot_be_loaded, check_source
from shared.settings import StartupError

_CONFIG = "config.json"
_MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_EAGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# In the order in which they are looked for.
_WEIGHTS = (*_MEDUSA_WEIGHTS, *_EAGLE_WEIGHTS)


class HeadFiles:
    """`config` as it stands, empty where there is none (a Medusa's says nothing that its weights do not), and
    `weights` by name."""

    def __init__(self, source: str) -> None:
        """Raises StartupError with one clear line."""
        check_source(source)
        self.source = source
        folder = Path(source)
        try:
            if not folder.is_dir():
                folder = Path(snapshot_download(source, allow_patterns=[_CONFIG, *_WEIGHTS]))
            self.config: dict[str, Any] = {}
            if (folder / _CONFIG).is_file():
                self.config = json.loads((folder / _CONFIG).read_text())
                if not isinstance(self.config, dict):
                    raise ValueError(f"{_CONFIG} holds no object")
            self.weights = _read(folder)
        except Exception as error:
            # The hub client, json, safetensors and pickle share no exception class.
            raise self.error(cannot_be_loaded(source, " ".join(str(error).split())[:300])) from error

    def error(self, why: str) -> StartupError:
        return StartupError(f"head {self.source} {why}")


def remove_weights(folder: Path) -> None:
    """Of any head that is there: another is about to be written."""
    for name in _WEIGHTS:
        (folder / name).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, Tensor]:
    if all(any((folder / name).is_file() for name in names) for names in (_MEDUSA_WEIGHTS, _EAGLE_WEIGHTS)):
        raise ValueError("it has weights of two heads, a Medusa's and another's")
    for name in _WEIGHTS:
        path = folder / name
        if not path.is_file():
            continue
        if path.suffix == ".safetensors":
            return load_file(path)
        # Tensors alone: of a pickle nothing is executed.
        weights: Any = torch.load(path, map_location="cpu", weights_only=True)
        named = isinstance(weights, dict) and all(
            isinstance(key, str) and isinstance(each, Tensor) for key, each in weights.items()
        )
        if not named:
            raise ValueError(f"{name} holds something else than weights by name")
        for key, each in weights.items():
            # What repeats a few numbers would be laid out in full.
            if each.nbytes > each.untyped_storage().nbytes():
                raise ValueError(f"{name} holds less of {key} than its shape, {[*each.shape]}, says")
        return dict(weights)
    raise ValueError(f"it has none of {', '.join(_WEIGHTS)}")

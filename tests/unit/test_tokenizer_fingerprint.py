"""The fingerprint against its own definition, and the errors of tokenizers that cannot be loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from shared.engine.tokenizer_fingerprint import (
    TokenizerLoadError,
    load_tokenizer,
    tokenizer_fingerprint,
    vocabulary_fingerprint,
)
from shared.settings import StartupError
from tests.support.models import DEMO_DRAFT, DEMO_TARGET


def _copy(tmp_path: Path) -> Path:
    """The demo target's tokenizer alone."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(DEMO_TARGET / name, tmp_path / name)
    return tmp_path


def test_the_bytes_that_are_hashed() -> None:
    expected = hashlib.sha256(b"\x01\0\0\0\x07\0\0\0a" + b"\x02\0\0\0\x00\x01\0\0" + "é".encode()).hexdigest()
    assert vocabulary_fingerprint({"é": 256, "a": 7}) == expected
    assert vocabulary_fingerprint({"a": 7, "é": 256}) == expected


def test_token_borders_and_ids_count() -> None:
    fingerprints = {
        vocabulary_fingerprint(vocabulary)
        for vocabulary in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"ab": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {})
    }
    assert len(fingerprints) == 6


def test_the_demo_pair_agrees() -> None:
    assert tokenizer_fingerprint(str(DEMO_TARGET)) == tokenizer_fingerprint(str(DEMO_DRAFT))


def test_one_changed_token_is_told_apart(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    assert tokenizer_fingerprint(str(folder)) == tokenizer_fingerprint(str(DEMO_TARGET))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<|one more|>"])
    tokenizer.save_pretrained(folder)
    assert tokenizer_fingerprint(str(folder)) != tokenizer_fingerprint(str(DEMO_TARGET))


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "path/or/hub-name", "not a name"])
def test_what_is_no_model_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(StartupError, match=f"^there is no model folder {source}$"):
        tokenizer_fingerprint(source)


@pytest.mark.parametrize("damage", ["no tokenizer", "no json", "wrong json"])
def test_what_cannot_be_loaded_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    folder = _copy(tmp_path)
    if damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "no json":
        (folder / "tokenizer.json").write_bytes(b"\xff{")
    else:
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "none"}}))
    with pytest.raises(TokenizerLoadError) as caught:
        tokenizer_fingerprint(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)

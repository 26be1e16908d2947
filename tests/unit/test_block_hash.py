"""Block hashes: their bytes are a contract between processes, machines and versions."""

from __future__ import annotations

import array
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shared.prefix.block_hash import hash_blocks, root_hash

# Computed once with coreutils sha256sum over printf'd bytes, never by this code.
GOLDEN_ROOT = "a4e0ced43c1f414f653058f0945232c217c72b37f9b4d667ea08a670044e7991"
GOLDEN_BLOCKS = [
    "e50d15dc47456c03e75ddb8fb7bad4e8519d94a18394fc8f97e3f83a4abcafc2",
    "8712b23e983b24246678397d7ea65be510e64cbae80360bbf52ce204b6ec439c",
]

REPOSITORY = Path(__file__).resolve().parents[2]


def test_golden_vectors() -> None:
    root = root_hash("model-a", b"salt")
    assert root.hex() == GOLDEN_ROOT
    blocks = hash_blocks([1, 2, 3, 4_294_967_295, 0, 256, 65536, 7, 8], 4, root)
    assert [block.hex() for block in blocks] == GOLDEN_BLOCKS


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_same_in_another_process_whatever_its_hash_seed(hash_seed: str) -> None:
    script = """
import json
from shared.prefix.block_hash import hash_blocks, root_hash
blocks = hash_blocks([1, 2, 3, 4_294_967_295, 0, 256, 65536, 7, 8], 4, root_hash("model-a", b"salt"))
print(json.dumps([block.hex() for block in blocks]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == GOLDEN_BLOCKS


def test_growing_sequence_hashes_only_new_blocks_to_the_same_names() -> None:
    generator = random.Random(5)
    tokens = [generator.randrange(2**32) for _ in range(203)]
    root = root_hash("m", b"")
    whole = hash_blocks(tokens, 16, root)
    assert len(whole) == 203 // 16
    known: list[bytes] = []
    for length in range(len(tokens) + 1):
        known = hash_blocks(tokens[:length], 16, root, known)
        assert known == whole[: length // 16]
    # The known hashes are taken over, not computed again: made-up ones come back, and chain on.
    made_up = [bytes([i]) * 32 for i in range(3)]
    grown = hash_blocks(tokens[:64], 16, root, made_up)
    assert grown[:3] == made_up
    assert grown[3] == hashlib.sha256(made_up[2] + array.array("I", tokens[48:64]).tobytes()).digest()


def test_a_name_depends_on_all_that_stands_before_it() -> None:
    tokens = list(range(64))
    root = root_hash("m", b"")
    reference = hash_blocks(tokens, 16, root)
    for changed in range(64):
        other = hash_blocks([*tokens[:changed], 99, *tokens[changed + 1 :]], 16, root)
        same = [a == b for a, b in zip(reference, other, strict=True)]
        assert same == [block < changed // 16 for block in range(4)]


def test_models_and_tenants_never_share_a_name() -> None:
    roots = {
        root_hash(fingerprint, salt)
        for fingerprint, salt in [("ab", b""), ("a", b"b"), ("", b"ab"), ("ab", b"\0"), ("a", b""), ("ä", b"")]
    }
    assert len(roots) == 6
    names = {name for root in roots for name in hash_blocks(range(32), 16, root)}
    assert len(names) == 12


def test_less_than_a_block_has_no_name() -> None:
    root = root_hash("m", b"")
    assert hash_blocks([], 16, root) == []
    assert hash_blocks([1] * 15, 16, root) == []


def test_parents_are_not_changed() -> None:
    parents: list[bytes] = []
    hash_blocks(range(32), 16, root_hash("m", b""), parents)
    assert parents == []


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_id_outside_uint32_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=r"token_ids: block 1 holds an id outside \[0, 2\^32\)"):
        hash_blocks([1, 2, 3, token_id], 2, root_hash("m", b""))


def test_wrong_arguments_are_refused() -> None:
    root = root_hash("m", b"")
    with pytest.raises(ValueError, match="block_size 0 is below 1"):
        hash_blocks([1], 0, root)
    with pytest.raises(ValueError, match="root has 4 bytes, not 32"):
        hash_blocks([1], 1, b"root")
    with pytest.raises(ValueError, match="parents holds 2 hashes, but token_ids only 1 full blocks"):
        hash_blocks([1, 2, 3], 2, root, [root, root])

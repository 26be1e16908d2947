"""Fetches an archive of models into a folder, if it is what it should be: run by a pod before its service starts.

python fetch_models.py FOLDER, with MODELS_URL (a .tar, packed or not) and MODELS_SHA256 in the environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_SILENT_SECONDS = 60.0


def fetch(url: str, sha256: str, folder: Path) -> None:
    """Raises OSError if it cannot be had, ValueError if it is something else."""
    archive = folder / ".archive"
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_SILENT_SECONDS) as response, archive.open("wb") as file:
            while chunk := response.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != sha256.lower():
            raise ValueError(f"{url} has SHA-256 {digest.hexdigest()}, not {sha256}")
        with tarfile.open(archive) as packed:
            for member in packed:
                _unpack(packed, member, folder.resolve())
    except tarfile.TarError as error:
        raise ValueError(f"{url} is no archive: {error}") from error
    finally:
        archive.unlink(missing_ok=True)


def _unpack(packed: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Raises ValueError for what is neither file nor folder, or would lie elsewhere."""
    path = (folder / member.name).resolve()
    if not path.is_relative_to(folder):
        raise ValueError(f"{member.name!r} would lie outside of {folder}")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    content = packed.extractfile(member) if member.isfile() else None
    if content is None:
        raise ValueError(f"{member.name!r} is neither file nor folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)


if __name__ == "__main__":
    try:
        fetch(os.environ["MODELS_URL"], os.environ["MODELS_SHA256"], Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"models not fetched: {error}")

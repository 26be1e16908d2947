"""What the image installs beside the project itself, and what of that it leaves out again.

python3 .ci/dependencies.py cpu,nixl               requirements, one a line, of the project and these extras
python3 .ci/dependencies.py --leave-out FOLDER     removes from a virtual environment what no service ever reads
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

_PACKAGES = "lib/python*/site-packages"
_LEFT_OUT = (
    # Of Intel's runtime: what speaks to its GPUs, and what is for its debuggers and linkers.
    "lib/libomptarget*",
    "lib/libur_*",
    "lib/lib*_debug*",
    "lib/*.dbg",
    "lib/*.a",
    "include",
    "share",
    # To compile against, and tests.
    f"{_PACKAGES}/torch/include",
    f"{_PACKAGES}/torch/share",
    f"{_PACKAGES}/torch/test",
    f"{_PACKAGES}/torch/lib/*.a",
    f"{_PACKAGES}/numpy/*/tests",
    f"{_PACKAGES}/sympy/*/tests",
    f"{_PACKAGES}/sympy/*/*/tests",
    f"{_PACKAGES}/networkx/*/tests",
    f"{_PACKAGES}/networkx/*/*/tests",
    # nixl's part for mixtures of experts.
    f"{_PACKAGES}/nixl_ep_*",
)


def requirements(extras: str) -> list[str]:
    """Of the pyproject.toml in this folder."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    found: list[str] = list(project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"])
    for extra in filter(None, extras.split(",")):
        found += project["project"]["optional-dependencies"][extra]
    return found


def leave_out(environment: Path) -> None:
    """Raises nothing for what is not there: extras bring different things."""
    for pattern in _LEFT_OUT:
        for path in environment.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--leave-out", folder]:
            leave_out(Path(folder))
        case [extras]:
            print(*requirements(extras), sep="\n")
        case []:
            print(*requirements(""), sep="\n")
        case _:
            sys.exit(__doc__)

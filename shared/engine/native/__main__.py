"""`python -m shared.engine.native`: compiles the kernels for this machine; `... ahead`: for every CPU, beside the
sources, where they are found without a compiler. Exits with 1 and one line if it cannot."""

from __future__ import annotations

import sys

from shared.engine.native.build import CannotBuild, build, build_ahead


def main() -> None:
    try:
        for path in build_ahead() if sys.argv[1:] == ["ahead"] else [build()]:
            print(path)
    except CannotBuild as error:
        sys.exit(f"kernels cannot be compiled: {error}")


main()

"""Whether advisories are known of any version that CI runs: exit status 1 if so.

Where the database of advisories is not reached, as behind an index of one's own, that is said, and nothing more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def main() -> None:
    # All versions are given: nothing is to be resolved, and so nothing installed.
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(_CONSTRAINTS), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format=json", "--progress-spinner=off"], capture_output=True, text=True, check=False
    )
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except ValueError:
        print(f"audit: nothing was audited: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        return
    for each in dependencies:
        for advisory in each.get("vulns", ()):
            fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"audit: {each['name']} {each['version']}: {advisory['id']}, mended in {fixed}")
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    print(f"audit: {len(dependencies) - len(skipped)} of {len(dependencies)} packages audited")
    if skipped:
        print(f"audit: the database of advisories, as it is reached from here, does not know: {', '.join(skipped)}")
    sys.exit(int(any(each.get("vulns") for each in dependencies)))


if __name__ == "__main__":
    main()

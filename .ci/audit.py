"""Audits what is installed against the advisories of PyPI, where those can be reached; part of `make lint`.

Fails on an advisory that a release already fixes. One without a fix is printed: nobody here can act on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable

PROBE = "https://pypi.org/pypi/jinja2/3.1.2/json"
"""A release that has advisories: an index that shows none for it does not carry any."""
TIMEOUT_SECONDS = 5.0


def has_advisories(address: str = PROBE) -> bool:
    """Whether an index answers that knows advisories."""
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as found:
            return bool(json.load(found).get("vulnerabilities"))
    except (OSError, ValueError):
        return False


def audit() -> str:
    """The report of pip-audit, as JSON."""
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner=off", "-f", "json"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def main(reachable: Callable[[], bool] = has_advisories, report: Callable[[], str] = audit) -> int:
    """Print what was found; 1 where something has to be upgraded."""
    if not reachable():
        print("dependencies are not audited: no index with advisories can be reached")
        return 0
    try:
        dependencies = json.loads(report())["dependencies"]
    except ValueError:
        print("dependencies are not audited: pip-audit broke off")
        return 1
    has_fix = False
    for dependency in dependencies:
        for found in dependency.get("vulns", ()):
            fixed = ", ".join(found["fix_versions"])
            has_fix = has_fix or bool(fixed)
            remedy = f"fixed in {fixed}" if fixed else "no release fixes it"
            print(f"{dependency['name']} {dependency['version']}: {found['id']}, {remedy}")
    num_audited = sum("vulns" in dependency for dependency in dependencies)
    print(f"{num_audited} dependencies audited")
    return int(has_fix)


if __name__ == "__main__":
    sys.exit(main())

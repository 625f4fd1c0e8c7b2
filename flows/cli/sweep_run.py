"""Process of one run of a sweep: `python -m rheostat.flows.cli.sweep_run PID train …`.

The process ends when the process PID, which is the sweep, ends for any reason.
"""

import sys

from rheostat.infra.runner import die_with_parent


def main() -> int:
    """Train one run of a sweep. The command line contains the id of the sweep's process and the arguments of `rheostat
    train`. Return the exit code."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    from rheostat.flows.cli.app import main as rheostat  # takes a second, in which the sweep may end

    return rheostat(words)


if __name__ == "__main__":
    sys.exit(main())

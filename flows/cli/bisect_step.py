"""Child process that runs one step of a bisection: `python -m rheostat.flows.cli.bisect_step PID`, with the step as
JSON on its standard input.

The process exits when the process PID, which runs the bisection, exits for any reason. The name and the message of an
error are written to standard output as JSON, and everything else to standard error.
"""

import json
import os
import sys
from typing import Final, cast

from rheostat.flows.cli.options import Verbosity, log_progress
from rheostat.flows.cli.prefect_api import run_flow, set_defaults
from rheostat.infra.errors import RheostatError
from rheostat.infra.runner import die_with_parent

VERBOSITY: Final = "RHEOSTAT_BISECT_VERBOSITY"
"""Name of the environment variable with which `rheostat bisect` passes its `Verbosity` to this process."""


def main() -> int:
    """Run one step of a bisection, and return the exit code."""
    die_with_parent(int(sys.argv[1]))
    set_defaults()
    log_progress(quiet=True, verbosity=cast(Verbosity, os.environ.get(VERBOSITY, "normal")))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # code of the user may print
    from rheostat.flows.bisect import run_step
    from rheostat.tasks.forks.bisection import BisectionStep

    try:
        run_flow(run_step(BisectionStep.model_validate_json(sys.stdin.read())))
    except RheostatError as error:
        with answers:
            json.dump([type(error).__name__, str(error)], answers)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

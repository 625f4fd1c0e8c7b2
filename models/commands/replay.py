"""Replay of stored episodes in new environments: `python -m rheostat.models.commands.replay`.

Reads a `ReplayWork` as JSON on stdin. Prints the differences from the stored episodes, or the error in one line with
exit code 2. It runs in a separate process because flows may not import code that loads tokenizers.
"""

import contextlib
import json
import os
import sys

from pydantic import TypeAdapter

from rheostat.infra.errors import BadInput
from rheostat.infra.runner import die_with_parent
from rheostat.models.environments.replay import replay
from rheostat.models.records.replays import Difference, ReplayWork


def main() -> int:
    """Run the replay command: read a `ReplayWork` from stdin and write the differences from the stored episodes to
    stdout. Returns the exit code."""
    die_with_parent(os.getppid())
    answer = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; stdout must contain only the answer
        error, differences = "", list[Difference]()
        try:
            differences = replay(TypeAdapter(ReplayWork).validate_json(sys.stdin.read()))
        except BadInput as refused:
            error = " ".join(str(refused).split())
    with answer:
        answer.write(json.dumps({"error": error, "differences": [each.model_dump() for each in differences]}) + "\n")
    return 2 if error else 0


if __name__ == "__main__":
    sys.exit(main())

"""Server of a policy for OpenAI clients: `python -m rheostat.models.commands.serve_policy WORK`.

WORK is a `PolicyServerWork` as JSON. It contains no key. The command prints the address and serves until it is stopped.
It is a separate program because flows may not import code that loads models.
"""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Final

from rheostat.infra.errors import RheostatError
from rheostat.infra.processes.watch import ended_by_signals
from rheostat.infra.terminal import write, write_error
from rheostat.models.config.policy_server import PolicyServerWork

POLL_SECONDS: Final = 1.0


def serve(work: PolicyServerWork) -> None:
    """Serve a policy until the process is interrupted. Raises the error with which the engine fails."""
    from rheostat.models.agents.server import PolicyDoor

    configured = os.environ.get(work.key_variable)
    key = configured or secrets.token_urlsafe(32)
    served = PolicyDoor(work.server, work.directory, port=work.port, key=key)
    with contextlib.closing(served), contextlib.suppress(KeyboardInterrupt):
        lines = [
            f"{work.directory.name} running at {served.door.url} (stop with Ctrl-C)",
            f"export OPENAI_BASE_URL={served.door.url}",
            f"export OPENAI_API_KEY={'$' + work.key_variable if configured else key}",
        ]
        write("\n".join(lines))
        while True:
            time.sleep(POLL_SECONDS)
            served.check()


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 after an interrupt, 2 for wrong input, 1 if the engine fails."""
    try:
        with ended_by_signals("rheostat: interrupted"):
            serve(PolicyServerWork.model_validate_json(arguments[0]))
    except RheostatError as error:
        write_error(f"rheostat: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a thread may still be sampling, and torch would abort the process while the interpreter ends

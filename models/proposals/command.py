"""Proposal of a job for a data file and a policy: `python -m rheostat.models.proposals.command`.

Reads a `ProposalRequest` as JSON on stdin. Prints `{"error": "", "proposal": {…}}`, or the error in one line with exit
code 2. It runs in a separate process because flows may not import code that loads tokenizers.
"""

import contextlib
import json
import os
import sys

from rheostat.infra.errors import BadInput
from rheostat.models.config.proposals import ProposalRequest


def main() -> int:
    """Read a request (`ProposalRequest`, JSON) from stdin and write the proposed job or the error to stdout. Returns
    the exit code."""
    answer = os.fdopen(os.dup(1), "w")
    proposal, error = None, ""
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; stdout must contain only the answer
        from rheostat.models.proposals.job import propose_job

        try:
            request = ProposalRequest.model_validate_json(sys.stdin.read())
            proposal = propose_job(request).model_dump(mode="json")
        except BadInput as found:
            error = " ".join(str(found).split())
    with answer:
        answer.write(json.dumps({"error": error, "proposal": proposal}) + "\n")
    return 2 if error else 0


if __name__ == "__main__":
    sys.exit(main())

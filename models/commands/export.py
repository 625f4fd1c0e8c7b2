"""Export of a policy, or of a merge of policies, as one directory: `python -m rheostat.models.commands.export`.

Reads an `ExportWork` or a `MergeWork` as JSON on stdin. Prints `{"error": ""}`, or the error in one line with exit code
2. It runs in a separate process because flows may not import code that loads models.
"""

import contextlib
import json
import os
import sys

from pydantic import TypeAdapter

from rheostat.infra.errors import BadInput
from rheostat.models.records.merges import MergeWork
from rheostat.models.records.work import ExportWork


def export(work: ExportWork | MergeWork) -> None:
    """Write a policy into one directory: merge its adapter into the base weights, write a merge of policies, or
    copy the directory if there is nothing to merge."""
    import torch

    from rheostat.models.denoising.pipeline import is_pipeline
    from rheostat.models.modeling.directory import copy_directory, write_merged
    from rheostat.models.modeling.weighted_sum import write_merge

    if isinstance(work, MergeWork):
        write_merge(work)
        return
    if is_pipeline(work.base):
        from rheostat.models.denoising.policy import write_merged_pipeline

        write_merged_pipeline(work.base, work.adapter, work.target, dtype=getattr(torch, work.dtype or "float32"))
        return
    if work.adapter is None and work.dtype is None:
        copy_directory(work.base, work.target)
        return
    dtype = getattr(torch, work.dtype or "float32")
    write_merged(work.base, work.adapter, work.target, dtype=dtype)


def main() -> int:
    """Run the export command: read a work record from stdin and write a line with the result to stdout. Returns the
    exit code."""
    answer = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; stdout must contain only the answer
        error = ""
        try:
            export(TypeAdapter[ExportWork | MergeWork](ExportWork | MergeWork).validate_json(sys.stdin.read()))
        except BadInput as found:
            error = " ".join(str(found).split())
    with answer:
        answer.write(json.dumps({"error": error}) + "\n")
    return 2 if error else 0


if __name__ == "__main__":
    sys.exit(main())

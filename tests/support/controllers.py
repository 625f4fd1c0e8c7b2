"""Jobs of several controllers, and faults in them."""

import signal

from tests.support.jobs import RAISE, CommandResult, Fault, Job

WITHIN_SECONDS = 30
"""Upper bound in seconds for stopping a controller, far below the wait of a controller for its stopped worker."""

HANG = Fault("rollout", "begin", "generate .*iteration=1", signal=signal.SIGSTOP)

FAIL = Fault("rollout", "begin", "generate .*iteration=1", signal=RAISE)

TWO_SHARDS = ("iterations=1", "rollout.shard_prompts=3", "evaluation.problems=4")


def names_the_cause(job: Job, ended: CommandResult) -> bool:
    """Return whether both planted faults happened and the job's last line names the one that was raised."""
    told = ended.output.splitlines()[-1]
    assert (job.struck(), ended.code) == (2, 1), ended.output
    return told.startswith("rheostat: ") and "RuntimeError: planted fault at generate" in told

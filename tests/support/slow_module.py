"""A reward whose import takes longer than any test. A file in the job's directory shows that the import began."""

import os
import time
from pathlib import Path

Path(os.environ["RHEOSTAT_FAULTS"], "importing").touch()
time.sleep(3600)


def reward(prompt: str, completion: str, answer: str) -> float:
    """Never run, because the import does not end."""
    return 0.0

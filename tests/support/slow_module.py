"""A reward whose import takes longer than any test; that it began is seen in the job's directory."""

import os
import time
from pathlib import Path

Path(os.environ["RHEOSTAT_FAULTS"], "importing").touch()
time.sleep(3600)


def reward(prompt: str, completion: str, answer: str) -> float:
    """Nobody gets here."""
    return 0.0

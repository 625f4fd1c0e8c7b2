"""Files of JSON Lines."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_json_lines(path: Path, rows: Iterable[object]) -> Path:
    """Write a line of JSON for each row, and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

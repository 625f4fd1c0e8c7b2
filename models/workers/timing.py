"""How long the parts of a piece of work took."""

import time


class StageTimer:
    """Seconds by name, each since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """Say what the time since the last lap went to; a name may come again."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

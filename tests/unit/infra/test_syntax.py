"""Syntax trees that several threads build at the same time."""

import ast
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rheostat.infra import syntax


def test_threads_can_build_syntax_trees_at_the_same_time():
    """Threads are switched often, and also while a tree is built, because each garbage collection runs Python code."""
    sources = [path.read_text() for path in sorted(Path(syntax.__file__).parent.glob("*.py"))[:30]]
    expected = [ast.dump(ast.parse(source)) for source in sources]

    def parse_all(_: int) -> list[str]:
        return [ast.dump(syntax.parse_source(source)) for source in sources]

    def run_code(phase: str, info: object) -> None:
        sum(range(50))

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(1e-5)
        gc.set_threshold(50)
        gc.callbacks.append(run_code)
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(parse_all, range(4))] == [expected] * 4
    finally:
        gc.callbacks.remove(run_code)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)

"""Text for people: tables and rollouts on a terminal."""

import sys
from collections.abc import Sequence

from models.rollouts.preview import RolloutPreview


def write(text: str) -> None:
    """Print one piece of output at once, so that a reader of our pipe sees it when it is made."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def table(rows: Sequence[dict[str, str]]) -> str:
    """Columns under their names: the first to the left, numbers to the right."""
    if not rows:
        return ""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_cells(line, widths)).rstrip() for line in lines)


def _cells(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def rollout(sample: RolloutPreview) -> str:
    """A completion behind its prompt, under a line that says how it did."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    reward = "missing" if sample.reward is None else f"{sample.reward:g}"
    answer = f", answer {_last_line(sample.answer)}" if sample.answer else ""
    tokens = "1 token" if sample.tokens == 1 else f"{sample.tokens} tokens"
    return (
        f"--- iteration {sample.iteration}, prompt {sample.prompt_id}, sample {sample.sample}, "
        f"reward {reward}, {tokens}, {sample.finish_reason}{answer}\n"
        f"{_visible(sample.prompt)}{bold}{_visible(sample.completion)}{plain}"
    )


def _last_line(text: str) -> str:
    return _visible(text.strip().splitlines()[-1]) if text.strip() else ""


def _visible(text: str) -> str:
    """A policy may write anything: control characters are shown, not obeyed by the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t " else f"\\x{ord(c):02x}" for c in text)

"""Docstrings, comments and documentation are in plain technical English: rules that a pattern can check.

The patterns find about half of what a reader finds hard, so a text that passes may still need to be rewritten.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

PACKAGES = ("flows", "tasks", "models", "placement", "infra", "bench", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
GENERATED = ("docs/commands.md", "docs/faults.md")
"""Pages whose sentences come from code or from measured runs."""

HOMELY = re.compile(
    r"\b(anew|so many|beside|is told|are told|tells? apart|whereof|thereof|heeds?|reckon\w*|learnt|spelt|mends?"
    r"|goes on with|given again|apart from that|lies in|lie beside|none where|none if|but for)\b"
)
"""Words and phrases that have a common technical term, or that only make sense to their author."""
OPENING = re.compile(r"(What|Whose|Who|How|Where|Which|Those|That|Of|Its|It|They|Them|As|Such)\b")
"""First words that make a reader search for the subject."""
HOMELY_NAME = re.compile(
    r"_(told|tells?|said|says?|heeds?|buried|seats?|laps|dealt?|spelt|spells?|mends?|learnt|anew|beside|stands?"
    r"|lies_in|lies_there|goes_on|go_on|given_again|of_its_own|look(?:s|ed)?_at|sees|whatever|wherever)(?:_|$)"
    r"|^test_(?:it|its|they|of|those)_"
)
"""Words and first words that make the name of a test hard to understand without its code."""
CLIPPED = re.compile(r"; (?:none|none of|of|those|else|or none|that of)\b(?![^.;]*\b(?:is|are|has|have)\b)")
"""A remark after a semicolon that is no sentence."""


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, also of those below fields and constants."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr):
            match node.value:
                case ast.Constant(str(text)):
                    prose = re.sub(r"(?s)>>>.*|`[^`]*`", "x", text)
                    yield node.lineno, " ".join(prose.split())
        else:  # only statements, most of the nodes are parts of expressions
            inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
            waiting += (child for child in ast.iter_child_nodes(node) if isinstance(child, inner))


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment of a file that has a homely word after a `#`."""
    text = path.read_text()
    if not any(HOMELY.search(line.partition("#")[2]) for line in text.splitlines()):
        return  # a tokenizer takes a second for 15,000 lines
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:|pragma)", token.string):
            yield token.start[0], token.string


def _sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are prose: without code blocks, tables' rules and HTML."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", "x", line)


def _faults(texts: Iterable[tuple[int, str]], where: Path, *patterns: re.Pattern[str]) -> list[str]:
    found = [(line, match[0]) for line, text in texts for pattern in patterns for match in pattern.finditer(text)]
    return [f"{where.relative_to(ROOT)}:{line}: {words!r}" for line, words in found]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_comments_use_plain_terms_and_begin_with_their_subject(package):
    faults = []
    for path in sorted((ROOT / package).rglob("*.py")):
        docstrings = [*_docstrings(path)]
        faults += _faults(docstrings, path, HOMELY, CLIPPED)
        faults += _faults(_comments(path), path, HOMELY)
        faults += [
            f"{path.relative_to(ROOT)}:{line}: begins with {text.split()[0]!r}"
            for line, text in docstrings
            if OPENING.match(text)
        ]
    assert faults == []


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_pages_use_plain_terms(page):
    if page not in GENERATED:
        assert _faults(_sentences(ROOT / page), ROOT / page, HOMELY) == []


def test_names_of_tests_use_plain_terms():
    names = {
        f"{path.relative_to(ROOT)}: {match[1]}"
        for path in (ROOT / "tests").rglob("*.py")
        for match in re.finditer(r"def (test_\w+)\(", path.read_text())
        if HOMELY_NAME.search(match[1])
    }
    assert sorted(names) == []


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("Optimizer states, none where the run keeps none.", HOMELY),
        ("A shard is read anew.", HOMELY),
        ("What a worker holds.", OPENING),
        ("Digest of the shard; of a bundle, its name.", CLIPPED),
        ("test_a_skipped_prompt_is_told", HOMELY_NAME),
    ],
)
def test_the_patterns_match_their_examples(text, pattern):
    assert pattern.search(text) if pattern is not OPENING else pattern.match(text)

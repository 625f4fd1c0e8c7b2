"""Text of policies, servers and files: control characters are escaped in terminals and logs, secrets are removed."""

import base64
import html
import io
import json
import logging
import re
import urllib.parse
from itertools import product
from random import Random

import pytest
from rich.console import Console

from rheostat.flows.cli.live import draw_page, print_line
from rheostat.flows.cli.options import LineHandler
from rheostat.flows.cli.output import answer_rows, rollout_text
from rheostat.flows.cli.sweep import _Reporter
from rheostat.infra.errors import WorkerFailed
from rheostat.infra.terminal import command_app, run_command, write
from rheostat.infra.untrusted_text import log_visibly, make_visible, redact
from rheostat.models.rollouts.groups import TurnRecord
from rheostat.models.rollouts.preview import RolloutPreview
from rheostat.tasks.views.run_progress import Activity, RunProgress

HOSTILE = "\x1b[2J\x9b0m\x7f\u202eabc\u2066\r\U000e0041\ud800"
ESCAPED = r"\u001b[2J\u009b0m\u007f\u202eabc\u2066\u000d\udb40\udc41\ud800"
KEY = "sk-proj-AbC_19/xx+Zq"
QUOTED = urllib.parse.quote(KEY, safe="")
SPELLINGS = [
    KEY,
    json.dumps(KEY),
    KEY.replace("-", r"\u002d"),
    json.dumps(KEY.replace("-", r"\u002D")),
    KEY.replace("/", r"\/"),
    "".join(rf"\u{ord(each):04x}" for each in KEY),
    "".join(rf"\x{ord(each):02x}" for each in KEY),
    "".join(rf"\u{{{ord(each):x}}}" for each in KEY),
    QUOTED,
    urllib.parse.quote(QUOTED),
    QUOTED.lower().replace("abc", "AbC").replace("zq", "Zq"),
    "".join(f"%{ord(each):02x}" for each in KEY),
    html.escape(KEY).replace("+", "&plus;").replace("/", "&sol;"),
    "".join(f"&#{ord(each)};" for each in KEY),
    "".join(f"&amp;#x{ord(each):X};" for each in KEY),
    KEY.encode().hex(),
    KEY.encode().hex(":").upper(),
    *(encode(b"x" * before + KEY.encode()).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode)
      for before in range(4)),
    urllib.parse.quote(base64.b64encode(f"user:{KEY}".encode()).decode(), safe=""),
    json.dumps(base64.encodebytes(f"Authorization: Bearer {KEY}, and more words behind the key".encode()).decode()),
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_secret_is_redacted_in_every_encoding(spelling):
    shown = redact(f"the key {spelling} is not known", KEY)
    assert "***" in shown
    assert shown.startswith("the key ") and shown.endswith(" is not known")
    core = base64.b64encode(KEY.encode()).decode()[:8]
    assert not any(part in shown for part in ("proj", "AbC", "Zq", core, "70726f6a", "%70%72"))


@pytest.mark.parametrize("text", ["", "no key", "sk-proj", r"\u002d %2D &#45; c2st", KEY[:-1]])
def test_a_text_without_the_secret_stays_as_it_is(text):
    assert redact(text, KEY) == text
    assert redact(text, "") == text


def redact_slowly(text, secret):
    """Redact as `redact` does, character by character: an independent implementation."""
    data = secret.encode()
    cores = [base64.b64encode(bytes(before) + data).decode() for before in range(3)]
    cores = [core[-(-8 * before // 6) : 8 * (before + len(data)) // 6] for before, core in enumerate(cores)]
    characters = [(each, place, place + 1) for place, each in enumerate(text)]
    hidden = set()
    for _ in range(5):
        packed = [("+/"["-_".index(each)] if each in "-_" else each, *span) for each, *span in characters
                  if not each.isspace()]  # fmt: skip
        digits = [(each.lower() if each in "ABCDEF" else each, *span) for each, *span in packed if each != ":"]
        for haystack, needles in ((characters, [secret]), (packed, cores), (digits, [data.hex()])):
            for at, needle in product(range(len(haystack)), needles):
                part = haystack[at : at + len(needle)]
                if "".join(each for each, _, _ in part) == needle:
                    hidden.add((part[0][1], part[-1][2]))
        decoded, at = [], 0
        joined = "".join(each for each, _, _ in characters)
        while at < len(characters):
            match = ESCAPE.match(joined, at)
            if match is None:
                decoded.append(characters[at])
                at += 1
                continue
            decoded += [(each, characters[at][1], characters[match.end() - 1][2]) for each in decode_escape(match)]
            at = match.end()
        characters = decoded
    covered, end = [], 0
    for first, last in sorted(hidden):
        if last > end:
            covered += [text[end:first], "***"] if first >= end else []
            end = last
    return "".join([*covered, text[end:]])


ESCAPE = re.compile(
    r"\\+u\{(?P<a>[\da-fA-F]{1,6})\}|\\+U(?P<b>[\da-fA-F]{8})|\\+u(?P<c>[\da-fA-F]{4})|\\+x(?P<d>[\da-fA-F]{2})"
    r"|%(?P<e>[\da-fA-F]{2})|&#[xX](?P<f>[\da-fA-F]{1,8});?|(?P<html>&(?:#\d{1,8};?|[A-Za-z]{2,24};))"
    r"|\\+(?P<plain>[^\\\w\s])",
)


def decode_escape(match):
    if match["plain"] or match["html"]:
        return match["plain"] or html.unescape(match["html"])
    return chr(int(next(filter(None, match.groups())), 16))


@pytest.mark.parametrize("seed", range(4))
def test_texts_with_secrets_between_other_escapes_are_redacted_as_character_by_character(seed):
    random = Random(seed)
    others = [
        "\\",
        "\\\\",
        " ",
        "\n",
        "%",
        "%41",
        "&amp;",
        "&#",
        "a",
        "x",
        ":",
        "_",
        "-",
        r"\u002d",
        "%25",
        "sk-",
        ";",
        "İ",
    ]
    for _ in range(12):
        pieces = [random.choice(others if random.random() < 0.8 else SPELLINGS) for _ in range(random.randrange(30))]
        assert redact("".join(pieces), KEY) == redact_slowly("".join(pieces), KEY)


@pytest.mark.parametrize("piece", ["\\", "&", "%25", r"\u005c", ":", "İ"])
def test_a_long_text_without_a_secret_stays_as_it_is(piece):
    assert redact(piece * 50_000, KEY) == piece * 50_000


def test_a_letter_that_becomes_longer_in_lower_case_does_not_move_the_redacted_part():
    assert redact(f"İİ{KEY.encode().hex()}", KEY) == "İİ***"


def test_escaping_removes_control_characters_and_keeps_lines_and_spaces():
    assert make_visible(HOSTILE) == ESCAPED
    assert make_visible("größer,\n\t日本\u3000語 🙂") == "größer,\n\t日本\u3000語 🙂"


def test_control_characters_are_escaped_in_command_output_and_json_stays_json(capsys):
    write(HOSTILE)
    write(json.dumps([HOSTILE], ensure_ascii=False))
    plain, document = capsys.readouterr().out.splitlines()
    assert plain == ESCAPED
    assert document.isprintable() and json.loads(document) == [HOSTILE]


@pytest.mark.parametrize("error", [WorkerFailed, ValueError])
def test_control_characters_are_escaped_in_the_last_line_of_an_error_and_its_traceback(error, capsys):
    app = command_app("program", "An app.")

    @app.default
    def fail() -> None:
        raise error(HOSTILE)

    assert run_command(app, [], again="") == 1
    shown = capsys.readouterr().err
    assert all(line.isprintable() for line in shown.splitlines())
    assert r"\u001b[2J" in shown and r"\u202eabc" in shown


def test_control_characters_are_escaped_in_the_refusal_of_a_command_line(capsys):
    app = command_app("program", "An app.")
    app.default(lambda: None)
    assert run_command(app, [HOSTILE[:-1]], again="") == 2
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_control_characters_are_escaped_in_the_turns_of_a_rollout():
    turn = TurnRecord(tokens=1, error=HOSTILE)
    sample = RolloutPreview.model_construct(
        iteration=1, prompt_id=HOSTILE, sample=0, reward=None, tokens=1, finish_reason="stop", answer=HOSTILE,
        images=(), turns=(turn,), prompt=HOSTILE, completion=HOSTILE,
    )  # fmt: skip
    assert all(line.isprintable() for line in rollout_text(sample).split("\n"))


def test_control_characters_are_escaped_in_log_records_and_their_tracebacks():
    before = logging.getLogRecordFactory()
    try:
        log_visibly("prefect")
        log_visibly("prefect")
        records = []
        logger = logging.getLogger("prefect.flow_runs.test")
        logger.propagate = False
        logger.addHandler(handler := logging.Handler())
        handler.emit = records.append
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("%s of 100%%", HOSTILE)
        logger.removeHandler(handler)
    finally:
        logging.setLogRecordFactory(before)
    shown = logging.Formatter().format(records[0])
    assert shown.startswith(f"{ESCAPED} of 100%\n")
    assert all(line.isprintable() for line in shown.split("\n"))


def print_page(text):
    """Print a live page and a line above the page, both with a text of others, and return the output."""
    activity = Activity(description=text, note=text)
    status = RunProgress("r", 3, (), (), activity, eta_seconds=None, is_finished=False)
    terminal = Console(file=io.StringIO(), width=500, color_system=None)
    terminal.print(draw_page(status, seconds=1))
    print_line(terminal, text)
    return terminal.file.getvalue()


def handle_record(text):
    lines = []
    handler = LineHandler(lambda line, level: lines.append(line))
    handler.emit(logging.LogRecord("rheostat.flows.train", logging.WARNING, "", 0, "%s", (text,), None))
    return "".join(lines)


def report_sweep(text):
    stream = io.StringIO()
    _Reporter(stream).tell("lr-1", text)
    return stream.getvalue()


SHOWN_BY = {
    "live page": print_page,
    "log line": handle_record,
    "line of a sweep": report_sweep,
    "message of an error": lambda text: str(WorkerFailed(text)),
    "cell of a query": lambda text: str(answer_rows([{text: text}])),
}


@pytest.mark.parametrize("place", SHOWN_BY)
def test_control_characters_are_escaped_in_every_display_of_a_run(place):
    shown = SHOWN_BY[place](HOSTILE.replace("\r", ""))
    assert all(line.isprintable() for line in shown.split("\n"))
    assert r"\u001b[2J" in shown and r"\u202eabc" in shown

"""Files of problems: lines of JSON, files that TOML cannot hold because they are binary or damaged, and pictures."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rheostat.models.config.preferences import FilePreferences
from rheostat.models.data.preferences import Preference, load_preferences
from tests.support.demos import ArithmeticData
from tests.support.pictures import picture


def write_lines(path: Path, *lines: object) -> Path:
    """Write a file with one line per value; a value that is not text is written as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def number_problems(count: int) -> list[dict[str, str]]:
    """Return rows with one addition each."""
    return [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]


def write_damaged_files(folder: Path) -> None:
    """Write one file for each way in which a data file can be unreadable."""
    (folder / "latin.csv").write_bytes(b"prompt,answer\n\xff,1\n")
    (folder / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff"}\n')
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "plain.jsonl.gz").write_bytes(b"plain")
    (folder / "torn.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99, mtime=0)[:-9])
    for suffix in ("parquet", "arrow"):
        (folder / f"torn.{suffix}").write_bytes(b"ARROW1\0\0torn")
    (folder / "folder.jsonl").mkdir()
    pq.write_table(pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), folder / "null.parquet")
    pq.write_table(pa.table({"question": ["a"], "answer": ["1"]}), folder / "question.parquet")
    pq.write_table(pa.table({"prompt": ["A box."], "answer": ["1"], "size": [b"7"]}), folder / "bytes.parquet")
    texts = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "chosen": ["c", "d"], "rejected": ["e", "f"]})
    for number, column in enumerate(texts.column_names):
        values = pa.array([texts[column][0].as_py().encode(), b"\xff"])
        damaged = pa.Array.from_buffers(pa.string(), 2, values.buffers())  # text that is not UTF-8, unchecked
        pq.write_table(texts.set_column(number, column, damaged), folder / f"latin-{column}.parquet")
        pq.write_table(texts.set_column(number, column, values), folder / f"bytes-{column}.parquet")
    pq.write_table(texts.append_column("prompt", texts["answer"]), folder / "twice.parquet")
    pq.write_table(texts.set_column(1, "answer", pa.array([1.0, float("nan")])), folder / "nan.parquet")
    pq.write_table(texts.append_column("size", pa.array([1.0, float("nan")])), folder / "size.parquet")
    (folder / "utf-16.csv").write_text("prompt,answer\na,1\n", encoding="utf-16")
    (folder / "utf-16.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-16")
    (folder / "latin.json").write_bytes(b'[{"prompt": "a", "answer": "b"}, {"prompt": [{"role": "\xff"}]}]')
    (folder / "latin-pairs.jsonl").write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "\xff"}\n')


def write_nested_table(folder: Path) -> None:
    """Write a table with a struct, which is null in the second row."""
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "1"}}, {"prompt": "b", "reward_model": None}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "nested.parquet")


def load_pairs(name: str) -> list[Preference]:
    """Load the preferences of a file in the working directory."""
    preferences = FilePreferences(path=Path(name), heldout_fraction=0.5)
    return load_preferences(preferences, ArithmeticData(), split="train", seed=0)


def write_pictures(folder: Path) -> None:
    """Write `home/red.png`, `secret.png` outside of the folder `home`, and `home/link.png`, a link to `secret.png`."""
    (folder / "home").mkdir(exist_ok=True)
    (folder / "home/red.png").write_bytes(picture("red"))
    (folder / "secret.png").write_bytes(picture("red"))
    (folder / "home/link.png").symlink_to(folder / "secret.png")

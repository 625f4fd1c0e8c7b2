"""Bad input through the real command: one line, exit code 2, no traceback, nothing written."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flows.cli.app import main
from infra.errors import BadInput
from infra.store.runs import create_run, open_run
from models.commands.preflight import Inputs, check
from tasks.config.run import load_config
from tests.support.jobs import RHEOSTAT, ROOT
from tests.support.policies import write_policy
from tests.support.processes import process

DOCUMENT = """
name = "job"
[data]
kind = "file"
path = "train.jsonl"
heldout_path = "heldout.jsonl"
[policy]
kind = "scratch"
context = 128
[rollout]
prompts = 4
[rollout.sampling]
max_new_tokens = 32
[evaluation]
problems = 2
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a job that has nothing wrong with it."""
    monkeypatch.chdir(tmp_path)
    write_rows("train.jsonl", range(8))
    write_rows("heldout.jsonl", range(8, 12))
    Path("job.toml").write_text(DOCUMENT)
    Path("vision").mkdir()
    Path("vision/config.json").write_text('{"model_type": "vit"}')
    return tmp_path


def write_rows(path: str, numbers: range, **columns: object) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "answer": f"#### {n + 1}"} | columns for n in numbers]
    Path(path).write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


def complaint(*overrides: str) -> str:
    """What the input check has against the job."""
    with pytest.raises(BadInput) as found:
        check(Inputs.model_validate_json(load_config(Path("job.toml"), overrides).model_dump_json()))
    return str(found.value)


@pytest.fixture
def refused(place, capsys):
    """Give the command in this process; return the one line with which it refuses, and changes nothing."""

    def give(*arguments: str) -> str:
        before = tree(place)
        assert main(["train", "job.toml", *arguments]) == 2
        assert tree(place) == before
        out, err = capsys.readouterr()
        assert out == ""
        return told(err)

    return give


def told(err: str) -> str:
    """The one line that was said."""
    assert err.startswith("rheostat: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("rheostat: ").removesuffix("\n")


def started(place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Start the real command; whatever it says, it has changed nothing below the place."""
    environment = {**os.environ, "PREFECT_HOME": str(place / "prefect"), "PYTHONPATH": str(ROOT)}
    before = tree(place)
    command = [RHEOSTAT, "train", "job.toml", *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert tree(place) == before
    return done


def append(path: str, line: str, *, mode: str = "a") -> None:
    with Path(path).open(mode) as file:
        file.write(line + "\n")


DATA: dict[str, tuple[Callable[[], object], str]] = {
    "half a line": (lambda: Path("train.jsonl").write_text('{"prompt": "a"\n'), "train.jsonl:1: not a JSON line: "),
    "no object": (lambda: append("train.jsonl", "[1]"), "train.jsonl:9: expected a JSON object, found list"),
    "empty file": (lambda: Path("train.jsonl").write_text(""), "train.jsonl: no problems, the file is empty"),
    "blank file": (lambda: append("heldout.jsonl", "\n", mode="w"), "heldout.jsonl: no problems, the file is empty"),
    "no file": (lambda: Path("train.jsonl").unlink(), "train.jsonl: no such file (looked in "),
    "same data": (
        lambda: write_rows("heldout.jsonl", range(8)),
        "heldout.jsonl:1: this held-out problem is a training problem too",
    ),
    "no number": (
        lambda: write_rows("train.jsonl", range(8), answer="many"),
        "train.jsonl:1: the numeric reward finds no number in the reference 'many'",
    ),
    "no text": (
        lambda: write_rows("train.jsonl", range(8), prompt=""),
        "train.jsonl:1: prompt: expected text, found none",
    ),
    "null": (
        lambda: write_rows("train.jsonl", range(8), prompt=None),
        "train.jsonl:1: prompt: expected text, found NoneType",
    ),
    "no chat": (
        lambda: write_rows("train.jsonl", range(8), prompt=[{"role": "user"}]),
        "train.jsonl:1: prompt[0] is no chat message, expected {role, content}",
    ),
    "long prompt": (
        lambda: append("heldout.jsonl", json.dumps({"prompt": "é?" * 60, "answer": "1"})),
        "heldout.jsonl:5: the prompt has ",
    ),
}

SETTINGS = {
    "data.prompt_column=promt": "train.jsonl:1: no column 'promt', did you mean 'prompt'? (columns: prompt, answer)",
    "data.answer_column=label": "train.jsonl:1: no column 'label' (columns: prompt, answer)",
    "data.path=job.toml": "job.toml: unknown suffix '.toml', expected one of .jsonl, .json, .csv, .parquet, .arrow",
    "data.template=fixed": "data.template 'fixed' has no {prompt}: every prompt would be the same",
    "rollout.prompts=9": "rollout.prompts 9 exceeds the 8 training problems: an iteration would ask one twice",
    "evaluation.problems=5": "evaluation.problems 5 exceeds the 4 held-out problems: set evaluation.problems=4",
    "rollout.sampling.max_new_tokens=128": "rollout.sampling.max_new_tokens 128 leaves no room for a prompt",
    "rollout.sampling.max_new_tokens=127": "train.jsonl:1: the prompt has ",
    "policy.kind=directory policy.path=model": "policy model: no such directory (looked in ",
    "policy.kind=directory policy.path=Qwen/Qwen3-0.6B": "policy Qwen/Qwen3-0.6B: no such directory (looked in ",
    "policy.kind=directory policy.path=.": "policy .: no config.json: not a model directory in Hugging Face format",
    "policy.kind=directory policy.path=vision": "vision/config.json: model_type 'vit' is no causal language model",
}


def test_the_job_of_these_tests_is_good_as_it_stands(place):
    done = started(place, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 training, 4 held out" in done.stdout


def test_a_default_larger_than_the_data_gives_way_in_the_plan_that_a_dry_run_shows(place, capsys):
    Path("job.toml").write_text(DOCUMENT.replace("prompts = 4\n", "").replace("problems = 2\n", ""))
    assert main(["train", "job.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "8 prompts x 8 = 64 completions in 1 shards" in shown
    assert "note: rollout.prompts is 8, not its default 64: there are 8 training problems\n" in shown
    assert "note: evaluation.problems is 4, not its default 256: there are 4 held-out problems\n" in shown


def test_a_dry_run_notes_what_will_not_be_as_it_was_asked_for(place, capsys):
    write_rows("train.jsonl", range(7))
    append("train.jsonl", json.dumps({"prompt": "What is 6 + 1?", "answer": "#### 7"}))
    asked = ("rollout.group_size=2", "update.minibatches=9", "pools.update_ranks=3", "pools.gpus_per_update_rank=16")
    assert main(["train", "job.toml", *asked, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    notes = [line.removeprefix("note: ") for line in shown.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith("pools ask for 48 GPUs, this machine has ")
    assert notes[1:] == [
        "update.minibatches 9: 4 prompts give 4 optimizer steps",
        "pools.update_ranks 3: an optimizer step has 2 completions, some idle",
        "1 training problem of 8 repeats another",
    ]
    assert "4 per iteration, 96 to do" in shown
    assert main(["train", "job.toml", "--dry-run"]) == 0
    assert "note: 1 training problem of 8 repeats another\n" in capsys.readouterr().out


@pytest.mark.skipif(os.access("/proc/sys", os.W_OK), reason="needs a directory that even root cannot write to")
def test_a_store_that_cannot_be_written_is_refused_by_a_dry_run_as_by_a_run(refused):
    for arguments in ([], ["--dry-run"]):
        assert refused("--store", "/proc/sys/runs", *arguments) == (
            "store '/proc/sys/runs': expected a directory that can be written, cannot write to /proc/sys"
        )


@pytest.mark.parametrize("fault", DATA)
def test_bad_data_is_told_by_file_and_line(fault, place):
    spoil, expected = DATA[fault]
    spoil()
    assert complaint().startswith(expected)


@pytest.mark.parametrize("overrides", SETTINGS)
def test_a_bad_setting_is_told_by_what_it_meets(overrides, place):
    assert complaint(*overrides.split()).startswith(SETTINGS[overrides])


@pytest.mark.slow
@pytest.mark.parametrize("fault", DATA)
def test_the_command_refuses_bad_data_in_one_line(fault, refused):
    spoil, expected = DATA[fault]
    spoil()
    assert refused().startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", SETTINGS)
def test_the_command_refuses_bad_settings_in_one_line(overrides, refused):
    assert refused(*overrides.split()).startswith(SETTINGS[overrides])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["seed=x"], "job.toml: seed: expected an integer, got 'x'"),
        (["rollout.group_sise=4"], "job.toml: unknown key 'rollout.group_sise'; did you mean 'group_size'?"),
        (["--run", "../evil"], "job.toml: name: should match pattern "),
        (["--run", "a..b"], "job.toml: name: expected a name without '..', got 'a..b'"),
        (["--run", 'a"b\\'], "job.toml: name: should match pattern "),
        (["--store", "gs://bucket"], "store 'gs://bucket': expected a path, file:// or s3://bucket/prefix"),
        (["--store", "job.toml"], "store '"),
        (["--store", "job.toml/runs", "--dry-run"], "store '"),
        (["data.path=nowhere.jsonl", "--dry-run"], "nowhere.jsonl: no such file (looked in "),
    ],
)
def test_a_wrong_argument_ends_with_code_2_and_one_line_and_writes_nothing(arguments, expected, refused):
    assert refused(*arguments).startswith(expected)


def test_the_real_command_ends_with_code_2_and_one_line_and_writes_nothing(place):
    done = started(place, "data.path=nowhere.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert told(done.stderr).startswith("nowhere.jsonl: no such file (looked in ")


@pytest.mark.parametrize("missing", ["eos", "pad"])
def test_a_tokenizer_that_cannot_end_or_pad_is_refused(missing, place):
    write_policy(Path("model"))
    tokens = {"eos_token": "e", "pad_token": "p"}
    del tokens[f"{missing}_token"]
    words = Tokenizer(WordLevel({"e": 0, "p": 1, "u": 2}, unk_token="u"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="u", **tokens).save_pretrained("model")
    said = complaint("policy.kind=directory", "policy.path=model")
    assert said.startswith(
        f"policy model: the tokenizer has no {missing.replace('eos', 'EOS')} token; set {missing}_token"
    )


def test_a_run_made_by_another_configuration_is_refused_with_what_differs(refused):
    make_run("seed=1")
    assert refused().endswith("was made by another configuration: seed was 1, is 0")


@pytest.mark.system
def test_a_run_that_another_process_holds_is_refused_by_name(place, refused):
    make_run()
    with process(_hold, str(place / "runs"), "job", str(place / "held")) as holder:
        while not (place / "held").exists():
            assert holder.is_alive()
        assert f"is held by process {holder.pid} on " in refused()


def make_run(*overrides: str) -> None:
    config = load_config(Path("job.toml"), overrides)
    create_run(config.store, "job", config.identity())


def _hold(store: str, name: str, told: str) -> None:
    with open_run(store, name).hold():
        Path(told).touch()
        Event().wait()

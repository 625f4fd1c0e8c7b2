"""Names of the Hugging Face Hub, resolved and fetched from a local server that speaks its API."""

import io
import sys
from contextlib import suppress

import pytest
from huggingface_hub.utils import disable_progress_bars

from rheostat.infra.errors import BadInput
from rheostat.infra.store.hub import base_address, fetch_snapshot, list_files, resolve_commit, split_files
from rheostat.infra.store.hub_names import HubAddress, is_hub_name, parse_hub_address

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 99,
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"the same weights",
    "tokenizer.json": b"{}",
}
SPLITS = {
    "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
    b"  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n"
    b"    path: socratic/train-*\n---\n",
    "main/train-00000-of-00002.parquet": b"first",
    "main/train-00001-of-00002.parquet": b"second",
    "main/test-00000-of-00001.parquet": b"held out",
    "socratic/train-00000-of-00001.parquet": b"other",
}
TINY = HubAddress("model", "team/tiny")
SUMS = HubAddress("dataset", "team/sums")


def names_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("openai/gsm8k", True),
        ("owner/name@v1.0", True),
        ("owner/name@refs/pr/3", True),
        ("data/train.jsonl", False),
        ("data/train.jsonl.gz", False),
        ("./models/policy", False),
        ("../models", False),
        ("/models/policy", False),
        ("~/models", False),
        ("a/b/c", False),
        ("policy", False),
        ("owner/na me", False),
    ],
)
def test_a_name_of_the_hub_is_distinguished_from_a_path(text, is_name):
    assert is_hub_name(text) is is_name


@pytest.mark.parametrize(
    "text",
    [
        "hf://models/team/tiny",
        "hf://datasets/team/sums@main/main/train.parquet",
        "hf://datasets/team/sums@feature%2Fx?config=main&split=train",
    ],
)
def test_an_address_of_the_hub_is_written_as_it_is_read(text):
    assert parse_hub_address(text).text() == text


def test_a_model_is_fetched_without_code_pickles_and_copies_of_its_weights(hub):
    commit = hub.add("team/tiny", MODEL)
    folder = fetch_snapshot(TINY)
    assert folder.name == commit and names_below(folder) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(("is_terminal", "faults"), [(True, []), (True, ["wrong"] * 9), (False, [])])
def test_a_download_has_one_progress_bar_on_a_terminal_that_is_removed_at_its_end(
    hub, monkeypatch, is_terminal, faults
):
    disable_progress_bars()  # as transformers does before it loads a model
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal, raising=False)
    hub.add("team/tiny", MODEL)
    hub.faults += faults
    with suppress(BadInput):
        fetch_snapshot(TINY)
    lines = [line for line in shown.getvalue().split("\r") if line.strip()]
    assert bool(lines) is is_terminal and all(line.startswith("model team/tiny: ") for line in lines), lines
    assert "\n" not in shown.getvalue() and shown.getvalue().rpartition("\r")[2].strip() == ""


def test_a_fetched_model_is_read_again_without_a_request(hub, monkeypatch):
    commit = hub.add("team/tiny", MODEL)
    folder = fetch_snapshot(TINY)
    hub.requests.clear()
    assert fetch_snapshot(TINY.pin(commit)) == folder and not hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_snapshot(TINY) == folder and not hub.requests


def test_a_pinned_name_stays_at_its_commit_after_the_branch_moved(hub):
    first = hub.add("team/tiny", MODEL)
    second = hub.add("team/tiny", {**MODEL, "config.json": b"{}"})
    assert resolve_commit(TINY) == second
    assert (fetch_snapshot(TINY.pin(first)) / "config.json").read_bytes() == MODEL["config.json"]


def test_a_download_that_was_cut_off_continues(hub):
    hub.add("team/tiny", MODEL)
    fetch_snapshot(HubAddress("model", "team/tiny", file="config.json"))
    hub.faults += ["cut"]
    folder = fetch_snapshot(HubAddress("model", "team/tiny", file="model.safetensors"))
    assert folder.read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_other_bytes_is_downloaded_again(hub, name):
    hub.add("team/tiny", MODEL)
    fetch_snapshot(HubAddress("model", "team/tiny", file="config.json"))
    hub.faults += ["wrong"]
    assert fetch_snapshot(HubAddress("model", "team/tiny", file=name)).read_bytes() == MODEL[name]
    assert hub.downloads().count(name) == 2


def test_a_file_that_stays_wrong_is_refused_and_not_kept(hub, tmp_path):
    hub.add("team/tiny", MODEL)
    fetch_snapshot(HubAddress("model", "team/tiny", file="config.json"))
    hub.faults += ["wrong"] * 3
    with pytest.raises(BadInput, match=r"team/tiny.*tokenizer\.json was downloaded, but its digest"):
        fetch_snapshot(HubAddress("model", "team/tiny", file="tokenizer.json"))
    assert "tokenizer.json" not in {path.name for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["other bytes", "cut"])
def test_a_file_that_was_damaged_before_it_was_verified_is_downloaded_again(hub, monkeypatch, name, damage):
    commit = hub.add("team/tiny", MODEL)
    with monkeypatch.context() as killed:  # the process ends after the download, before the verification
        killed.setattr("rheostat.infra.store.hub.verify_files", lambda *_, **__: None)
        folder = fetch_snapshot(TINY)
    blob = (folder / name).resolve()
    blob.write_bytes(MODEL[name][::-1] if damage == "other bytes" else MODEL[name][:-1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match=rf"{name} is damaged"):
        fetch_snapshot(TINY.pin(commit))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert (fetch_snapshot(TINY.pin(commit)) / name).read_bytes() == MODEL[name]


@pytest.mark.parametrize("files", [{"train.jsonl": b"{}"}, {"README.md": b"", "train.jsonl": b"{}"}])
def test_only_files_that_exist_are_requested_so_the_library_prints_no_warning(hub, files, caplog, capfd):
    hub.add("team/plain", files, kind="dataset")
    with caplog.at_level("WARNING", logger="huggingface_hub"):
        fetch_snapshot(HubAddress("dataset", "team/plain"))
    assert not caplog.records and "Fetching 0 files" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("address", "token", "is_offline", "parts"),
    [
        (HubAddress("model", "team/none"), "", False, ["model team/none", "neither a local path nor", "HF_TOKEN"]),
        (HubAddress("model", "team/none"), "hf_x", False, ["model team/none", "neither a local path nor"]),
        (HubAddress("model", "team/tiny", "v9"), "", False, ["team/tiny@v9", "no revision 'v9'"]),
        (HubAddress("model", "team/gated"), "", False, ["team/gated@", "is gated", "HF_TOKEN", "hf auth login"]),
        (HubAddress("model", "team/gated"), "hf_bad", False, ["is gated", "Accept its conditions", "/team/gated"]),
        (TINY, "hf_expired", False, ["model team/tiny", "refused the access token", "HF_TOKEN"]),
        (TINY, "", True, ["team/tiny is not in the Hugging Face cache", "HF_HUB_OFFLINE"]),
        (HubAddress("model", "team/pickled"), "", False, ["only pytorch_model.bin", "may execute code"]),
        (HubAddress("model", "team/empty"), "", False, ["team/empty", "no weights"]),
        (HubAddress("dataset", "team/none"), "", False, ["dataset team/none"]),
        (HubAddress("dataset", "team/sums", file="x.jsonl"), "", False, ["no file or folder x.jsonl"]),
    ],
)
def test_a_name_that_cannot_be_fetched_is_refused_in_one_line(hub, monkeypatch, address, token, is_offline, parts):
    hub.add("team/tiny", MODEL)
    hub.add("team/gated", MODEL, is_gated=True)
    hub.add("team/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    hub.add("team/empty", {"config.json": b"{}"})
    hub.add("team/sums", SPLITS, kind="dataset")
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if is_offline else "0")
    with pytest.raises(BadInput) as refused:
        fetch_snapshot(address)
    message = str(refused.value)
    assert all(part in message for part in parts) and "\n" not in message, message


def test_a_gated_model_is_fetched_with_a_token_that_has_access(hub, monkeypatch):
    hub.add("team/gated", MODEL, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert (fetch_snapshot(HubAddress("model", "team/gated")) / "model.safetensors").is_file()


def test_an_unreachable_hub_is_named_in_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match=r"team/tiny is not a local path, and it could not be fetched from http://127"):
        fetch_snapshot(TINY)


@pytest.mark.parametrize(
    ("config", "split", "files"),
    [
        ("main", "train", ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]),
        ("main", "test", ["main/test-00000-of-00001.parquet"]),
        ("socratic", "", ["socratic/train-00000-of-00001.parquet"]),
    ],
)
def test_the_files_of_a_split_come_from_the_metadata_of_the_dataset(hub, config, split, files):
    hub.add("team/sums", SPLITS, kind="dataset")
    address = HubAddress("dataset", "team/sums", config=config, split=split)
    assert split_files(address) == files
    folder = fetch_snapshot(address)
    assert names_below(folder) == sorted(["README.md", *files])


def test_the_files_of_a_split_come_from_names_of_files_if_there_is_no_metadata(hub):
    hub.add("team/plain", {"train.jsonl": b"{}", "test.jsonl": b"{}"}, kind="dataset")
    assert split_files(HubAddress("dataset", "team/plain", split="test")) == ["test.jsonl"]


@pytest.mark.parametrize(
    ("config", "split", "parts"),
    [
        ("", "train", ["has 2 configs", "main, socratic"]),
        ("mian", "train", ["no config 'mian'", "main, socratic"]),
        ("main", "", ["has 2 splits", "train, test"]),
        ("main", "tests", ["no split 'tests'", "train, test"]),
    ],
)
def test_a_missing_or_ambiguous_split_is_refused_with_the_list(hub, config, split, parts):
    hub.add("team/sums", SPLITS, kind="dataset")
    with pytest.raises(BadInput) as refused:
        fetch_snapshot(HubAddress("dataset", "team/sums", config=config, split=split))
    assert all(part in str(refused.value) for part in parts), refused.value


def test_the_base_of_an_adapter_is_fetched_with_it(hub):
    base = hub.add("team/tiny", MODEL)
    settings = b'{"base_model_name_or_path": "team/tiny", "peft_type": "LORA"}'
    hub.add("team/adapter", {"adapter_config.json": settings, "adapter_model.safetensors": b"low rank"})
    folder = fetch_snapshot(HubAddress("model", "team/adapter"))
    address = base_address(folder)
    assert address == TINY and fetch_snapshot(address).name == base


def test_sizes_of_files_are_known_after_a_fetch(hub):
    commit = hub.add("team/tiny", MODEL)
    fetch_snapshot(TINY)
    sizes = {name: file.size for name, file in list_files(TINY.pin(commit)).items()}
    assert sizes == {name: len(data) for name, data in MODEL.items()}

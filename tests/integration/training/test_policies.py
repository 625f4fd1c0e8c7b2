"""The initial policy and its prompts: reproducible, loadable by other libraries, and refused with the missing part."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.data import DataConfig, FileData, MixtureData, WeightedFile
from rheostat.models.config.policy import DirectoryPolicy
from rheostat.models.data.problems import Message, Problem, load_problems
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.modeling.directory import check_directory, copy_directory
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import PolicyWork, PromptWork
from rheostat.models.text.tokenizer import TokenizedPrompt, enforce_prompt_length, load_tokenizer, tokenize_problems
from rheostat.models.workers.preparation import PreparationWorker
from tests.support.policies import DATA, TINY, make_policy, write_scratch
from tests.support.processes import preload, process

preload(__name__)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    """Tiny causal language model in Hugging Face format. Tests copy it before they damage it."""
    return write_scratch(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def spoilt(model_directory, tmp_path) -> Path:
    return copytree(model_directory, tmp_path / "spoilt")


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def make_prompts(folder: Path, made: Outcome, data: DataConfig = DATA, *, max_new_tokens: int = 32) -> Outcome:
    work = PromptWork(data=data, split="train", policy=made.model, seed=0, max_new_tokens=max_new_tokens)
    return PreparationWorker(str(folder), "run", threads=1).make_prompts(work)


# ---- tokenizer
def test_any_text_is_encoded_and_decoded_without_loss(model_directory):
    tokenizer = load_tokenizer(model_directory)
    for text in ("16+3=19 #### 16", "  two  spaces ", "漢字 and ⚙️\t\n", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tokenizer_has_the_tasks_words_and_different_eos_and_pad_tokens(model_directory):
    tokenizer = load_tokenizer(model_directory)
    assert len(tokenizer("16+3=19 19-4=15 #### 15")["input_ids"]) <= 14
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer("text")["input_ids"][-1] != tokenizer.eos_token_id


def test_chats_are_rendered_up_to_the_assistants_turn_and_plain_text_is_unchanged(model_directory):
    tokenizer = load_tokenizer(model_directory)
    problems = [
        Problem("a:1", "1+1?", "2"),
        Problem("a:2", (Message("system", "Be brief."), Message("user", "1+1?")), "2"),
    ]
    plain, chat = tokenize_problems(problems, tokenizer)
    assert plain.text == "1+1?"
    assert chat.text == "system: Be brief.\nuser: 1+1?\nassistant: "
    assert tokenizer.decode(chat.input.tokens) == chat.text


# ---- from scratch
def make_elsewhere(folder: Path, told: Path) -> None:
    told.write_text(make_policy(folder, TINY, seed=7).model.weights.digest)


@pytest.mark.smoke
@pytest.mark.system
def test_two_processes_build_the_same_bytes_from_one_seed(tmp_path):
    with process(make_elsewhere, tmp_path / "there", tmp_path / "told") as elsewhere:
        here = make_policy(tmp_path / "here", TINY, seed=7)
        elsewhere.join()
    assert (tmp_path / "told").read_text() == here.model.weights.digest
    assert make_policy(tmp_path / "here", TINY, seed=8).model.weights.digest != here.model.weights.digest


def test_building_a_policy_does_not_change_the_callers_random_state(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    make_policy(tmp_path, TINY, seed=7)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_published_policy_is_loaded_by_plain_transformers_and_has_the_predicted_size(tmp_path, architecture):
    policy = TINY.model_copy(update={"architecture": architecture})
    made = make_policy(tmp_path, policy)
    directory = str(fetch_bundle(open_store(f"{tmp_path}/run"), made.model.weights))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("Ana has 16 pens", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert model.config.model_type == architecture
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    shape = DecoderSizes.from_scratch(policy, vocab_size=len(tokenizer)).shape()
    assert shape.parameters == made.metrics["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert (shape.context, shape.layers, shape.kv_heads, shape.head_size) == (64, 1, 1, 8)


# ---- from a directory
def test_an_imported_policy_has_the_same_weights_and_no_code(spoilt, tmp_path):
    (spoilt / "modeling_evil.py").write_text("raise SystemExit")
    (spoilt / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (spoilt / "consolidated.safetensors").write_bytes(b"not part of the model")
    made = make_policy(tmp_path, DirectoryPolicy(path=spoilt))
    directory = fetch_bundle(open_store(f"{tmp_path}/run"), made.model.weights)
    assert (directory / "model.safetensors").read_bytes() == (spoilt / "model.safetensors").read_bytes()
    assert {path.name for path in directory.iterdir()} == {
        "bundle.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert load_policy(directory).num_parameters() == made.metrics["parameters"]


def test_a_policy_that_a_run_published_is_imported_without_its_list_of_contents(spoilt, tmp_path):
    (spoilt / "bundle.json").write_text("{}")
    target = tmp_path / "copy"
    target.mkdir()
    copy_directory(spoilt, target)
    assert {path.name for path in target.iterdir()} == {path.name for path in spoilt.iterdir()} - {"bundle.json"}


def test_all_weight_files_of_a_directory_are_imported(model_directory, tmp_path):
    split = tmp_path / "split"
    load_policy(model_directory).save_pretrained(split, max_shard_size="10KB")
    load_tokenizer(model_directory).save_pretrained(split)
    assert len(list(split.glob("*.safetensors"))) > 1
    made = make_policy(tmp_path, DirectoryPolicy(path=split))
    weights = load_policy(fetch_bundle(open_store(f"{tmp_path}/run"), made.model.weights)).state_dict()
    for name, weight in load_policy(model_directory).state_dict().items():
        assert torch.equal(weights[name], weight)
    next(split.glob("model-00002*")).unlink()
    with pytest.raises(BadInput, match=r"file model-00002-of\S+ does not exist"):
        check_directory(split)


def test_code_that_comes_with_a_model_is_not_run(spoilt, tmp_path):
    planted = tmp_path / "ran"
    (spoilt / "configuration_evil.py").write_text(f"open({str(planted)!r}, 'w')")
    edit(spoilt / "config.json", model_type="evil", auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    with pytest.raises(BadInput, match="model_type 'evil'"):
        check_directory(spoilt)
    edit(spoilt / "config.json", model_type="llama")
    edit(spoilt / "tokenizer_config.json", auto_map={"AutoTokenizer": ["configuration_evil.Evil", None]})
    check_directory(spoilt)
    assert not planted.exists()


def test_a_missing_weight_is_refused_instead_of_initialized(spoilt):
    weights = load_file(spoilt / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, spoilt / "model.safetensors", metadata={"format": "pt"})
    for load in (check_directory, load_policy):
        with pytest.raises(
            BadInput, match=r"not contain the weight model.layers.0.mlp.down_proj.weight of size 16 x 16"
        ):
            load(spoilt)


def test_truncated_weights_are_refused(spoilt):
    data = (spoilt / "model.safetensors").read_bytes()
    (spoilt / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(BadInput, match=r"model.safetensors is damaged or incomplete"):
        check_directory(spoilt)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_without_their_scales_are_refused(spoilt, dtype):
    weights = {name: weight.to(dtype) for name, weight in load_file(spoilt / "model.safetensors").items()}
    save_file(weights, spoilt / "model.safetensors", metadata={"format": "pt"})
    for load in (check_directory, load_policy):
        with pytest.raises(
            BadInput, match=r"model.safetensors stores \S+weight as .*, but weights must have one of the types F64"
        ):
            load(spoilt)


def test_nothing_is_printed_about_weights_that_do_not_fit(spoilt, capfd):
    edit(spoilt / "config.json", intermediate_size=24)
    with pytest.raises(BadInput, match="size"):
        load_policy(spoilt)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(spoilt):
    tokenizer = load_tokenizer(spoilt)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(spoilt)
    with pytest.raises(BadInput, match=r"the tokenizer has 355 tokens, .* 354"):
        check_directory(spoilt)


# ---- prompts
def test_prompts_are_tokenized_in_order_and_identified_by_their_text(tmp_path):
    made = make_policy(tmp_path, TINY)
    outcome = make_prompts(tmp_path, made)
    store = open_store(f"{tmp_path}/run")
    table = read_shard(store, outcome.shards[0])
    problems = load_problems(DATA, "train", 0)
    assert table.schema.remove_metadata() == PROMPT_SCHEMA
    assert table["text"].to_pylist() == [problem.prompt for problem in problems]
    assert table["answer"].to_pylist() == [problem.answer for problem in problems]
    assert table["prompt_id"][0].as_py() == blake3(problems[0].prompt.encode()).hexdigest()[:16]
    tokenizer = load_tokenizer(fetch_bundle(store, made.model.weights))
    assert tokenizer.decode(table["tokens"][5].as_py()) == problems[5].prompt
    assert outcome.metrics["longest"] == max(len(tokens) for tokens in table["tokens"].to_pylist())
    assert make_prompts(tmp_path, made).shards == outcome.shards


@pytest.fixture
def uneven(tmp_path) -> FileData:
    """Problems whose prompts have 40, 5, 33, 32 and 41 tokens."""
    rows = [{"prompt": "x" * length, "answer": str(length)} for length in (40, 5, 33, 32, 41)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return FileData(path=path, heldout_path=path)


def test_a_prompt_that_leaves_no_room_is_named_with_its_length(tmp_path, uneven):
    policy = make_policy(tmp_path, TINY)
    with pytest.raises(BadInput, match=r"a.jsonl:1: the prompt has 40 tokens, but it must have 1 to 32"):
        make_prompts(tmp_path, policy, uneven, max_new_tokens=32)
    assert make_prompts(tmp_path, policy, uneven, max_new_tokens=23).metrics["longest"] == 41


def test_prompts_that_are_too_long_are_dropped_and_counted_if_the_data_allows_it(tmp_path, uneven):
    policy = make_policy(tmp_path, TINY)
    outcome = make_prompts(tmp_path, policy, uneven.model_copy(update={"on_too_long": "drop"}))
    table = read_shard(open_store(f"{tmp_path}/run"), outcome.shards[0])
    assert table["answer"].to_pylist() == ["5", "32"]
    assert (outcome.metrics["prompts"], outcome.metrics["too_long"], outcome.metrics["longest"]) == (2, 3, 32)
    assert "too_long" not in make_prompts(tmp_path, policy).metrics, "without dropping, nothing is counted"


def test_empty_and_too_long_problems_are_counted_by_their_reason(tmp_path):
    rows = [{"prompt": "x" * length, "answer": "1"} for length in (5, 40, 0, 3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = FileData(path=tmp_path / "a.jsonl", heldout_path=tmp_path / "a.jsonl", drop=("empty", "too_long"))
    metrics = make_prompts(tmp_path, make_policy(tmp_path, TINY), data).metrics
    assert (metrics["prompts"], metrics["too_long"], metrics["empty"]) == (2, 1, 1)


def test_prompts_of_several_files_record_the_rows_and_weight_of_each_file(tmp_path):
    for name, lengths in (("a", (3, 40, 5)), ("b", (4, 4))):
        lines = [
            json.dumps({"prompt": f"{name}{n}" + "x" * length, "answer": name}) for n, length in enumerate(lengths)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    sources = tuple(WeightedFile(path=path, heldout_path=path, weight=n + 0.5) for n, path in enumerate(paths))
    data = MixtureData(sources=sources, on_too_long="drop")
    made = make_prompts(tmp_path, make_policy(tmp_path, TINY), data)
    answers = read_shard(open_store(f"{tmp_path}/run"), made.shards[0])["answer"].to_pylist()
    assert answers == ["a", "a", "b", "b"]
    assert made.detail == {"parts": {"rows": [2, 2], "weights": [0.5, 1.5]}}


def test_an_empty_prompt_is_not_too_long():
    asked = [(Problem("a:1", "", "1"), TokenizedPrompt("", ModelInput.from_prompt([])))]
    with pytest.raises(BadInput, match=r"a:1: the prompt has 0 tokens, but it must have 1 to 9"):
        enforce_prompt_length(asked, max_tokens=9, too_long="drop", split="train")


def test_progress_grows_with_the_work(tmp_path):
    worker = PreparationWorker(str(tmp_path), "run", threads=1)
    before = worker.progress()
    worker.make_policy(PolicyWork(policy=TINY, data=DATA, seed=0))
    assert worker.progress() > before


MAKER = """
import signal, sys
from pathlib import Path
from rheostat.models.workers import preparation
from tests.support.policies import TINY, make_policy
preparation.publish_bundle = lambda *arguments, **options: (print("written", flush=True), signal.pause())
make_policy(Path(sys.argv[1]), TINY)
"""


@pytest.mark.system
def test_a_killed_worker_leaves_no_copy_of_weights_once_the_store_is_locked_again(tmp_path):
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", MAKER, str(store)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(elsewhere)}, stdout=subprocess.PIPE) as maker:
        assert b"written\n" in maker.stdout  # libraries print lines before
        maker.kill()
    copies = [*tmp_path.glob("**/*.safetensors")]
    assert copies and all(copy.is_relative_to(store) for copy in copies)
    with open_store(str(store / "run")).lock("lock"):
        assert [*tmp_path.glob("**/*.safetensors")] == []

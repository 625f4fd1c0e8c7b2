"""Model directories from elsewhere: what could read, fetch, run or take too much is refused in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.app import main
from infra.errors import BadInput
from models.admission.directory import admit
from models.commands.preflight import Inputs, check
from models.inspection.directory import inspect_directory
from models.modeling.critic import classifier_of
from models.modeling.directory import check_directory
from models.modeling.policy import build_scratch, save_policy
from models.modeling.reward_model import check_reward_model
from models.text.tokenizer import load_tokenizer
from tasks.config.run import load_config
from tests.support.policies import TINY, small_tokenizer

DOCUMENT = """
name = "job"
[data]
kind = "file"
path = "train.jsonl"
heldout_path = "heldout.jsonl"
[policy]
kind = "directory"
path = "model"
[rollout]
prompts = 4
[rollout.sampling]
max_new_tokens = 8
[evaluation]
problems = 2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with nothing wrong about it."""
    directory = tmp_path_factory.mktemp("models") / "model"
    tokenizer = small_tokenizer()
    policy = TINY.model_copy(update={"context": 4096})
    save_policy(build_scratch(policy, tokenizer, seed=0), tokenizer, directory)
    return directory


@pytest.fixture
def place(tmp_path, model, monkeypatch):
    """A job that begins with a copy of the model and asks it chats."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    for path, numbers in (("train.jsonl", range(8)), ("heldout.jsonl", range(8, 12))):
        rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": f"#### {n + 1}"} for n in numbers]
        Path(path).write_text("\n".join(map(json.dumps, rows)))
    Path("job.toml").write_text(DOCUMENT)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def complaint(*overrides: str) -> str:
    with pytest.raises(BadInput) as found:
        check(Inputs.model_validate_json(load_config(Path("job.toml"), overrides).model_dump_json()))
    assert "\n" not in str(found.value)
    return str(found.value)


def test_the_job_of_these_tests_is_good_as_it_stands(place):
    assert check(Inputs.model_validate_json(load_config(Path("job.toml"), []).model_dump_json()))["context"] == 4096


# ---- links

SNAPSHOT = "hub/models--org--name/snapshots/0123abcd"


def linked(name: str, target: str) -> None:
    path = Path("model", name)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", "chat_template.jinja", "x.txt"])
def test_a_link_out_of_the_directory_is_refused(place, name):
    Path("secret").write_text("{}")
    linked(name, "../secret")
    assert complaint() == (
        f"model/{name}: expected a file of the directory itself, found a symbolic link to {place}/secret; put a copy "
        "in its place"
    )


def test_a_link_behind_a_link_and_a_folder_that_is_one_are_refused(place):
    Path("model/one.json").symlink_to("two.json")
    Path("model/two.json").symlink_to("/etc/hostname")
    assert "model/one.json: expected a file of the directory itself" in complaint()
    for name in ("one.json", "two.json"):
        Path("model", name).unlink()
    Path("templates").mkdir()
    Path("model/additional_chat_templates").symlink_to("../templates")
    assert "model/additional_chat_templates: expected" in complaint()


def test_a_link_within_the_directory_is_fine(place):
    Path("model/tokenizer.json").rename("model/tokenizer-v1.json")
    linked("tokenizer.json", "tokenizer-v1.json")
    assert check_directory(Path("model"))


def snapshot(model: Path) -> Path:
    """Lay the model out as the Hugging Face cache does, its weights where repositories share them."""
    directory, blobs, shared = Path(SNAPSHOT), Path("hub/models--org--name/blobs"), Path("hub/blobs/ab")
    for folder in (directory, blobs, shared):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, blobs / f"etag{number}")
        (directory / path.name).symlink_to(f"../../blobs/etag{number}")
        if path.suffix == ".safetensors":
            (blobs / f"etag{number}").rename(shared / ("ab" * 32))
            (blobs / f"etag{number}").symlink_to(f"../../blobs/ab/{'ab' * 32}")
    return directory


def test_a_snapshot_of_the_hugging_face_cache_is_read_as_the_model_it_is(place, model):
    directory = snapshot(model)
    assert inspect_directory(directory).shape == inspect_directory(model).shape
    assert check_directory(directory)[2] == check_directory(model)[2]
    Path("by-name").symlink_to(SNAPSHOT)
    assert inspect_directory(Path("by-name")).shape == inspect_directory(model).shape


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../models--other/blobs/etag", "../../../blobs/token"])
def test_a_snapshot_may_not_link_beyond_its_own_cache(place, model, target):
    directory = snapshot(model)
    Path("hub/blobs/token").write_text("hf_")
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").symlink_to(target)
    with pytest.raises(BadInput, match=r"chat_template.jinja: expected a file of the directory itself"):
        admit(directory)


def test_a_folder_called_blobs_makes_no_cache(place):
    Path("blobs").mkdir()
    Path("blobs/etag").write_text("{}")
    linked("extra.json", "../blobs/etag")
    assert "model/extra.json: expected a file" in complaint()


# ---- sizes


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1e9},
        {"num_hidden_layers": float("inf")},
        {"hidden_size": 10**12},
        {"head_dim": 10**30},
        {"vocab_size": 10**9},
        {"max_position_embeddings": 10**18},
        {"num_attention_heads": 10**9},
        {"num_labels": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
        {"model_type": "mixtral", "num_hidden_layers": 1000, "num_local_experts": 1000},
    ],
    ids=str,
)
def test_sizes_that_no_machine_can_build_are_refused_before_anything_is_built(place, changes):
    edit(Path("model/config.json"), **changes)
    assert complaint().startswith("model/config.json: ")
    assert "expected at most" in complaint()


def test_a_number_of_a_thousand_digits_is_not_spelt_out(place):
    edit(Path("model/config.json"), num_hidden_layers=10**999)
    assert complaint() == (
        "model/config.json: num_hidden_layers: expected at most 1024, found 100000000000… (1000 digits)"
    )


def test_the_largest_sizes_that_are_published_are_admitted(place):
    edit(
        Path("model/config.json"),
        num_hidden_layers=126,
        n_routed_experts=512,
        max_position_embeddings=10 * 2**20,
        rope_theta=10**9,
        vocab_size=2**18,
    )
    admit(Path("model"))


def test_a_configuration_of_a_gigabyte_is_not_read(place):
    with Path("model/config.json").open("ab") as file:
        file.truncate(2**30)
    assert complaint() == f"model/config.json: expected at most {2**24} bytes, found {2**30}"


# ---- code

KERNELS = {
    "attn_implementation": "evil/kernel:run",
    "_attn_implementation": "evil/kernel@main:run",
    "_attn_implementation_internal": "kernels-community/flash-attn3",
    "experts_implementation": "sonicmoe",
    "text_config": {"attn_implementation": {"": "evil/kernel"}},
    "kernel_config": {"RMSNorm": "evil/kernel:norm"},
    "use_kernels": True,
    "transformers_weights": "other.safetensors",
    "configuration_files": ["config.1.0.0.json"],
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("name", KERNELS)
def test_names_of_code_and_of_other_files_are_refused(place, name):
    edit(Path("model/config.json"), **{name: KERNELS[name]})
    assert complaint().startswith(f"model/config.json: {name}")


def test_what_transformers_comes_with_may_be_named(place):
    for way in (None, "eager", "sdpa"):
        edit(Path("model/config.json"), attn_implementation=way)
        assert check_directory(Path("model"))


def test_a_model_that_cannot_do_without_its_own_code_is_refused_by_name(place):
    edit(Path("model/config.json"), model_type="evil", auto_map={"AutoConfig": "org/repo--configuration.Evil"})
    assert complaint().startswith("model/config.json: auto_map: expected a model that transformers itself knows, found")


def test_a_directory_is_a_model_or_an_adapter(place):
    Path("model/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/name"}))
    assert "expected a model or an adapter, found config.json and adapter_config.json" in complaint()


# ---- chat templates

ENDLESS: dict[str, tuple[str, str]] = {
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "does not end",
    ),
    "one long loop": ("{% for i in range(10**12) %}{% endfor %}", "refuses it: Range too big"),
    "one long string": ("{{ 'a' * 10**11 }}", "takes more than 2147483648 bytes of memory"),
    "doubling": (
        "{% set all = namespace(x='ab') %}{% for i in range(60) %}{% set all.x = all.x ~ all.x %}{% endfor %}",
        "(takes more than 2147483648 bytes|does not end)",  # where memory is slow, its time is over before
    ),
    "much": ("{{ 'a' * 10**6 }}", "makes 1000000 characters of 6"),
    "itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it: maximum recursion depth exceeded"),
    "nothing to divide by": ("{{ 1 // 0 }}", "refuses it: integer division or modulo by zero"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_refused_by_name(place, kind):
    template, reason = ENDLESS[kind]
    Path("model/chat_template.jinja").write_text(template)
    assert re.match(f"train.jsonl:1: the policy's chat template {reason}", complaint())


def test_a_chat_is_spelt_as_transformers_spells_it(place):
    from models.data.problems import Message
    from models.text.tokenizer import render

    template = (
        "{{ bos_token }}{{ eos_token }}{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m | tojson }}"
        "{% if m.content is defined %}{% generation %}{{ m['content'].strip() }}{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}é\u2028>{% endif %}"
    )
    Path("model/chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(Path("model"))
    chat = (Message("system", " ä\n<b>"), Message("user", "\U0001f600"))
    turns = [{"role": each.role, "content": each.content} for each in chat]
    expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert render(["plain", chat, chat], tokenizer, sources=["a", "b", "c"]) == ["plain", expected, expected]


# ---- wherever a directory may be named


def write_classifier(model: Path, directory: Path) -> None:
    config, tokenizer, _ = check_directory(model)
    critic = classifier_of(config).to_empty(device="cpu")
    save_policy(critic, tokenizer, directory)


BESIDE = {
    "judge": (
        'scoring.rewards=[{kind="judge",name="j",template="{completion}",model={kind="directory",path="other"}}]',
        "reward j: other/config.json: num_hidden_layers: ",
    ),
    "reward model": (
        'scoring.rewards=[{kind="model",name="m",model={kind="directory",path="other"}}]',
        "reward m: reward model: other/config.json: num_hidden_layers: ",
    ),
    "teacher": (
        'algorithm={kind="grpo",distillation={teacher={kind="directory",path="other"}}}',
        "algorithm.distillation.teacher: other/config.json: num_hidden_layers: ",
    ),
    "critic": (
        'algorithm={kind="ppo",critic={path="other"}}',
        "algorithm.critic: reward model: other/config.json: num_hidden_layers: ",
    ),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_models_beside_the_policy_are_looked_at_as_the_policy_is(place, kind):
    override, expected = BESIDE[kind]
    if kind in ("reward model", "critic"):
        write_classifier(Path("model"), Path("other"))
        assert check_reward_model(Path("other"))
    else:
        shutil.copytree("model", "other")
    edit(Path("other/config.json"), num_hidden_layers=10**9)
    assert complaint(override).startswith(expected)


SPOILT: dict[str, Callable[[], object]] = {
    "link": lambda: linked("tokenizer.json", "/etc/hostname"),
    "template": lambda: Path("model/chat_template.jinja").write_text(ENDLESS["one long string"][0]),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_the_command_ends_with_code_2_and_one_line_and_writes_nothing(place, capsys, fault):
    SPOILT[fault]()
    before = sorted(place.rglob("*"))
    assert main(["train", "job.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rheostat: ") and err.count("\n") == 1
    assert sorted(place.rglob("*")) == before

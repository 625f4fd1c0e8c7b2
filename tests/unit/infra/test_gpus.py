"""NVIDIA driver and GPUs of a machine, and the choice between PyTorch's builds. The driver's file and nvidia-smi are
replaced by files with the text of real ones, because the tests run on machines without GPUs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from rheostat.infra.environments import gpus
from rheostat.infra.environments.find import DISTRIBUTIONS, Environment, check_environment_driver, pins_path
from rheostat.infra.environments.gpus import (
    MIN_DRIVERS,
    TORCH_CUDA,
    has_driver,
    num_gpus,
    platform_here,
    read_driver_version,
    visible_devices,
)
from rheostat.infra.environments.install import install
from rheostat.infra.errors import BadInput
from tests.support.jobs import ROOT

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3-AE18-23-3)  Sun Jul 27
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
LIST = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5fa0a2a5-3f3c-3a55-8a3c-0c3dd0a2f6c1)
  MIG 3g.40gb     Device  0: (UUID: MIG-2b6e8f6a-1a4e-5c1b-9b43-6b0a5d3a9b10)
  MIG 3g.40gb     Device  1: (UUID: MIG-8f0c2f0e-7d0a-5a3c-8c1d-3f4a3e2b1c90)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0b1f4c9e-0e1b-2d5f-9c53-4a2e7f1d8e22)
"""
SMI = """#!/bin/sh
case "$*" in
    -L) printf '%s' "$LIST" ;;
    *driver_version*) printf '581.15\\n581.15\\n' ;;
    *) exit 2 ;;
esac
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Function that gives this machine a driver with a version, or none. At first it has none, and no nvidia-smi."""
    for name in ("CUDA_VISIBLE_DEVICES", "RHEOSTAT_TORCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(gpus, "NVML", str(tmp_path / "libnvidia-ml.so.1"))

    def install(version: str, text: str = PROPRIETARY) -> None:
        (tmp_path / "version").write_text(text.format(version))

    return install


def add_smi(folder, monkeypatch) -> None:
    """Put a program on PATH that prints what nvidia-smi prints, for two GPUs of which one is divided by MIG."""
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text(SMI)
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("LIST", LIST)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """Library with the two functions of NVML that count GPUs, for two GPUs, or None without a C compiler."""
    if shutil.which("gcc") is None:
        return None
    library = tmp_path_factory.mktemp("nvml") / "library.so"
    source = "int nvmlInit_v2(void) { return 0; } int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=source, text=True, check=True)
    return library


@pytest.mark.parametrize("text", [PROPRIETARY, OPEN])
@pytest.mark.parametrize("version", ["470.256.02", "535.104.05", "580.65.06", "580.95", "1000.1"])
def test_the_drivers_version_is_read_from_its_file(machine, text, version):
    machine(version, text)
    assert read_driver_version() == version


def test_a_driver_without_a_file_is_found_by_nvidia_smi(machine, tmp_path, monkeypatch):
    assert (has_driver(), read_driver_version(), platform_here()) == (False, None, "cpu")
    add_smi(tmp_path, monkeypatch)
    assert (has_driver(), read_driver_version(), platform_here()) == (True, "581.15", "cuda")


def test_a_driver_whose_version_cannot_be_read_is_not_refused(machine, capsys):
    machine("", "NVRM version: unknown")
    assert read_driver_version() is None
    assert gpus.main() == 0
    assert capsys.readouterr().out == "cuda\n"


@pytest.mark.parametrize(
    ("driver", "variable", "platform"),
    [
        (None, "", "cpu"),
        (None, "cuda", "cuda"),
        ("580.65.06", "", "cuda"),
        ("580.65.06", "cpu", "cpu"),
        ("535.104.05", "cpu", "cpu"),
        ("535.104.05", "cuda", "cuda"),  # for an image that runs elsewhere
    ],
)
def test_the_driver_decides_which_build_is_installed_unless_the_variable_is_set(
    machine, monkeypatch, capsys, driver, variable, platform
):
    if driver is not None:
        machine(driver)
    monkeypatch.setenv("RHEOSTAT_TORCH", variable)
    assert platform_here() == platform
    assert gpus.main() == 0
    assert capsys.readouterr().out == f"{platform}\n"


@pytest.mark.parametrize("version", ["470.256.02", "535.104.05", "570.133.20"])
@pytest.mark.parametrize("part", ["install.sh", "engine install", "engine check"])
def test_a_driver_that_is_too_old_is_refused_with_its_version_before_anything_is_installed(
    machine, capsys, tmp_path, monkeypatch, part, version
):
    machine(version)
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    if part == "install.sh":
        assert gpus.main() == 2
        message = capsys.readouterr().err.removesuffix("\n")
    else:
        with pytest.raises(BadInput) as refused:
            install("vllm") if part == "engine install" else check_environment_driver(cuda_environment("2.13.0+cu130"))
        message = str(refused.value)
    assert not (tmp_path / "engines").exists()
    assert "\n" not in message
    assert all(word in message for word in (version, "CUDA 13.0", "580 or newer", "RHEOSTAT_TORCH=cpu", "cuda-compat"))


def test_a_torch_for_an_older_cuda_needs_an_older_driver(machine):
    machine("570.133.20")
    check_environment_driver(cuda_environment("2.12.0+cu128"))
    machine("515.43.04")
    with pytest.raises(BadInput, match=r"515\.43\.04 .* too old for CUDA 12\.8, which needs 525"):
        check_environment_driver(cuda_environment("2.12.0+cu128"))


def cuda_environment(torch: str) -> Environment:
    return Environment(engine="vllm", python=sys.executable, platform="cuda", versions={"torch": torch})


def test_vllm_for_cuda_is_not_installed_with_a_python_that_its_packages_do_not_support(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("RHEOSTAT_TORCH", "cuda")
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    python = tmp_path / "python3.13"
    python.write_text("#!/bin/sh\necho 3.13\n")
    python.chmod(0o755)
    with pytest.raises(BadInput, match=r"python3\.13 is Python 3\.13, .* for Python 3\.11 or 3\.12\. .* --python"):
        install("vllm", interpreter=python)
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("3, 4", ("3", "4")),
        ("0,1,-1,2", ("0", "1")),
        ("0,,1", ("0",)),
        ("GPU-5fa0a2a5", ("GPU-5fa0a2a5",)),
        ("MIG-2b6e8f6a,MIG-8f0c2f0e", ("MIG-2b6e8f6a", "MIG-8f0c2f0e")),
    ],
)
def test_the_devices_of_a_process_are_the_ones_that_cuda_takes_from_the_variable(monkeypatch, variable, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_devices() == devices


@pytest.mark.parametrize(
    ("variable", "count"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1,2", 2), ("MIG-2b6e8f6a", 1)]
)
def test_gpus_are_counted_by_nvidia_smi_and_without_it_by_nvml(machine, nvml, tmp_path, monkeypatch, variable, count):
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert num_gpus() == 0
    if nvml is not None:
        (tmp_path / "libnvidia-ml.so.1").symlink_to(nvml)
        assert num_gpus() == count
    add_smi(tmp_path, monkeypatch)
    assert num_gpus() == count, "instances of MIG are not counted"


def test_the_pinned_torch_is_for_the_cuda_version_whose_driver_is_checked():
    pins = pins_path("vllm", "cuda").read_text()
    (runtime,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)\.", pins, re.MULTILINE)
    assert runtime == TORCH_CUDA and TORCH_CUDA.partition(".")[0] in MIN_DRIVERS
    (torch,) = re.findall(r"^torch==([\d.]+),", pins, re.MULTILINE)
    script = (ROOT / "infra/environments/install.sh").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\ntorch={torch} " in script and f"torch=={torch}" in project["dependencies"]
    assert all(
        f"Python {' and '.join(DISTRIBUTIONS['vllm'].pythons['cuda'])};" in line for line in pins.splitlines()[:1]
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RHEOSTAT_TORCH": "rocm"}, ["RHEOSTAT_TORCH", "'rocm'", "'cpu' or 'cuda'"]),
        ({"LIST": LIST, "OLD": "yes"}, ["570.133.20", "580 or newer", "RHEOSTAT_TORCH=cpu"]),
    ],
)
def test_the_install_script_ends_with_one_line_before_it_creates_anything(tmp_path, variables, words):
    if "OLD" in variables and gpus.DRIVER.exists():
        pytest.skip("this machine has an NVIDIA driver")
    (tmp_path / "nvidia-smi").write_text(SMI.replace("581.15", "570.133.20"))
    (tmp_path / "nvidia-smi").chmod(0o755)
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "HOME": str(tmp_path)}
    script = [ROOT / "infra/environments/install.sh", tmp_path / "venv"]
    done = subprocess.run(script, cwd=ROOT, env=here | variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert [word for word in words if word not in done.stderr] == []
    assert not (tmp_path / "venv").exists()

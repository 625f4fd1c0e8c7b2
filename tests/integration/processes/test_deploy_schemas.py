"""The files of infra/deploy/ and the pins for CUDA, checked with tools and packages of the package index."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.workers.base import BaseJobConfiguration
from uv import find_uv_bin

from rheostat.infra.environments.find import DISTRIBUTIONS, pins_path
from tests.support.jobs import ROOT

DEPLOY = ROOT / "infra" / "deploy"
GLIBC = "x86_64-manylinux_2_36"
"""Platform of Debian 12, on which the images of python:3.11-slim are based, or a newer Debian."""


def run_tool(package: str, *words: str | Path) -> None:
    """Run the command of a package from the package index, which is not a dependency of the tests."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [find_uv_bin(), "tool", "run", "--quiet", "--python", sys.executable, package, *words]
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_compose_files_follow_the_schema_of_compose():
    run_tool(
        "check-jsonschema@0.39.0",
        *("--builtin-schema", "vendor.compose-spec"),
        *(DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"),
    )


@pytest.mark.slow
async def test_the_pods_and_jobs_follow_the_schema_of_kubernetes(tmp_path):
    class Configuration(BaseJobConfiguration):
        job_manifest: dict
        namespace: str

    template = json.loads((DEPLOY / "kubernetes.json").read_text())
    made = await Configuration.from_template_and_values(template, {"gpus": 8, "name": "train"}, client=object())
    (container,) = made.job_manifest["spec"]["template"]["spec"]["containers"]
    container |= {"env": [{"name": "DO_NOT_TRACK", "value": "1"}], "args": ["rheostat"]}  # as the worker fills them in
    made.job_manifest["metadata"]["name"] = "train"  # the tool does not know generateName
    documents = [made.job_manifest]
    for name in ("kuberay.yaml", "kuberay-gpu.yaml"):
        spec = yaml.safe_load((DEPLOY / name).read_text())["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
            documents.append(pod)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(documents))
    run_tool("kubernetes-validate@1.37.0", "--strict", "--kubernetes-version", "1.34", tmp_path / "all.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("python", DISTRIBUTIONS["vllm"].pythons["cuda"])
def test_the_packages_of_vllm_for_cuda_exist_and_are_all_that_each_of_them_needs(python, tmp_path):
    pins = pins_path("vllm", "cuda")
    resolved = tmp_path / "resolved.txt"
    uv(
        *("compile", pins, "--python-version", python, "--python-platform", GLIBC),
        *("--no-annotate", "--no-header", "--output-file", resolved),
    )
    assert read_pins(resolved) == read_pins(pins)


@pytest.mark.slow
def test_the_packages_of_the_image_for_gpus_exist_for_its_python(tmp_path):
    there = (
        "--dry-run",
        "--python-version",
        "3.11",
        "--python-platform",
        GLIBC,
        "--target",
        tmp_path,
    )
    uv("install", *there, "--no-deps", "--only-binary=:all:", "--requirements", pins_path("vllm", "cuda"))
    script = (ROOT / "infra/environments/install.sh").read_text()
    version = re.search(r"^torch=(\S+)", script, re.MULTILINE)[1]
    done = uv("install", *there, f"torch=={version},!={version}+cpu")
    assert f"torch=={version}\n" in done and "nvidia-cublas" in done, "the build for CUDA, not the one for CPUs"


def uv(*words: str | Path) -> str:
    """Run `uv pip` and return its output. Skip the test if the package index cannot be reached."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([find_uv_bin(), "pip", *words], env=here, capture_output=True, text=True)
    if done.returncode and re.search(r"error sending request|dns error|connect error", done.stderr, re.IGNORECASE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def read_pins(path: Path) -> dict[str, str]:
    """Return the version of each package of a file with pins, by its normalized name."""
    lines = [line.partition(",")[0] for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pins = (line.partition("==") for line in lines)
    return {re.sub(r"[-_.]+", "-", name).lower(): pinned for name, _, pinned in pins}

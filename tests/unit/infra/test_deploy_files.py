"""The files of infra/deploy/: all that they name exists, and they are consistent. No container engine runs here."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from jsonschema import validate as validate_json
from prefect.utilities.schema_tools.validation import is_valid_schema, validate
from prefect.workers.base import BaseJobConfiguration

from rheostat.infra.environments.gpus import TORCH_VARIABLE
from tests.support.jobs import ROOT
from tests.support.wheels import build_wheel

DEPLOY = ROOT / "infra" / "deploy"
KUBERNETES = json.loads((DEPLOY / "kubernetes.json").read_text())
PLACEHOLDER = re.compile(r"{{ (\w+) }}")

_POD = {"type": "object", "required": ["spec"], "properties": {"spec": {"required": ["containers", "volumes"]}}}
_PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
RAY_CLUSTER = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "headGroupSpec": {
                    "type": "object",
                    "required": ["rayStartParams", "template"],
                    "additionalProperties": False,
                    "properties": {"rayStartParams": _PARAMETERS, "template": _POD},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": [
                            "groupName",
                            "replicas",
                            "minReplicas",
                            "maxReplicas",
                            "rayStartParams",
                            "template",
                        ],
                        "additionalProperties": False,
                        "properties": {
                            "groupName": {"type": "string", "minLength": 1},
                            "replicas": {"type": "integer", "minimum": 0},
                            "minReplicas": {"type": "integer", "minimum": 0},
                            "maxReplicas": {"type": "integer", "minimum": 0},
                            "rayStartParams": _PARAMETERS,
                            "template": _POD,
                        },
                    },
                },
            },
        },
    },
}
"""JSON schema of the fields of KubeRay's RayCluster that the files use. A field with another name is an error."""


@pytest.fixture(scope="module")
def steps():
    """Instructions of the Dockerfile, each with its words."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], shlex.split(line)[1:]) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module", params=["kuberay.yaml", "kuberay-gpu.yaml"])
def cluster(request):
    return yaml.safe_load((DEPLOY / request.param).read_text())


@pytest.fixture(scope="module")
def gpu_compose(compose):
    """Services of compose.yaml with the additions of compose.gpu.yaml."""
    additions = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    (worker,) = additions["services"].values()
    volumes = [*compose["services"]["worker"]["volumes"], *worker["volumes"]]
    merged = compose["services"] | {"worker": compose["services"]["worker"] | worker | {"volumes": volumes}}
    return compose | {"services": merged, "volumes": compose["volumes"] | additions["volumes"]}


def test_every_documented_deploy_command_runs_without_prompts():
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.*"), *DEPLOY.glob("*.yaml"), *(ROOT / "infra").glob("*.yaml")]
    lines = [
        line for page in pages if page.is_file() for line in page.read_text().splitlines() if "deploy --all" in line
    ]
    assert len(lines) > 4 and all("prefect --no-prompt deploy --all" in line for line in lines)


@pytest.mark.system
def test_a_wheel_has_the_files_of_deployments_and_demonstrations_and_init_writes_them(tmp_path):
    with zipfile.ZipFile(build_wheel(ROOT, tmp_path)) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
        assert "rheostat" in folders and all(name.endswith(".dist-info") for name in folders - {"rheostat"})
        archive.extractall(tmp_path / "installed")
    rheostat = [sys.executable, "-P", "-m", "rheostat"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "installed")}
    installed = {"cwd": tmp_path, "env": environment, "check": True}
    subprocess.run([*rheostat, "init", "there", "--deployments"], **installed)
    subprocess.run([*rheostat, "init", "mine", "--example", "tools"], **installed)
    subprocess.run([*rheostat, "train", "mine/job.toml", "--dry-run"], **installed)
    subprocess.run([*rheostat, "plan", "there/configs/demo.toml", "data.kind=measures"], **installed)
    written = {path.relative_to(tmp_path / "there") for path in (tmp_path / "there").rglob("*") if path.is_file()}
    listed = subprocess.run(["git", "ls-files", "configs"], cwd=ROOT, check=True, capture_output=True, text=True)
    examples = {Path(line) for line in listed.stdout.splitlines()}
    assert written == examples | {Path("prefect.yaml"), Path("automations.yaml"), Path("notifications.yaml")}
    assert (tmp_path / "there/prefect.yaml").read_text() == (ROOT / "prefect.yaml").read_text()


def test_the_image_copies_only_existing_files_and_all_files_that_the_installation_needs(steps):
    copied = {source for step, words in steps if step == "COPY" for source in words[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {f"{folder.partition('/')[0]}/" for folder in project["tool"]["setuptools"]["package-dir"].values()}
    project_files = {"pyproject.toml", "setup.py", "constraints.txt", project["project"]["readme"], "prefect.yaml"}
    assert copied >= packages | project_files
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert sorted(kept) == sorted(source.rstrip("/") for source in copied | {"infra/"} if "/" not in source.rstrip("/"))
    assert not [line for line in kept if fnmatch(line, "**/__pycache__")]


def test_the_image_installs_existing_extras_at_pinned_versions_and_does_not_run_as_root(steps):
    (install,) = [words for step, words in steps if step == "RUN" and "install.sh" in words[0]]
    script, _, *extras = install[: install.index("&&")]
    assert install[-3:] == ["rm", "-rf", "/root/.cache"], "the packages of both environments are linked to one cache"
    assert (ROOT / script).stat().st_mode & 0o100 and "--constraint constraints.txt" in (ROOT / script).read_text()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*extras} == known.keys() - {"dev", "docs"}
    (linked,) = [words for step, words in steps if step == "RUN" and words[0] == "ln"]
    programs = {Path(word).name for word in linked[2:-1]}
    assert programs and all((Path(sys.executable).parent / name).exists() for name in programs)
    (user,) = [words for step, words in steps if step == "USER"]
    order = [step for step, _ in steps]
    assert user not in (["root"], ["0"]) and order.index("USER") > len(order) - 1 - order[::-1].index("RUN")
    bases = [words[0] for step, words in steps if step == "FROM"]
    assert bases == ["python:3.11-slim", "system-cpu", "system-${RHEOSTAT_TORCH}"]
    assert "://" not in (DEPLOY / "Dockerfile").read_text(), "nothing is fetched from a place of ours"


def test_an_argument_and_not_the_building_machine_decides_whether_the_image_is_for_gpus(steps, gpu_compose):
    orders = [step for step, _ in steps]
    assert steps[0] == ("ARG", [f"{TORCH_VARIABLE}=cpu"])
    last = max(number for number, order in enumerate(orders) if order == "FROM")
    assert ("ARG", [TORCH_VARIABLE]) in steps[last:], "an argument before FROM is not known to the steps after it"
    (install,) = [words for step, words in steps if step == "RUN" and "install.sh" in words[0]]
    engine = install[install.index("if") : install.index("fi")]
    assert engine[:5] == ["if", "[", f"${TORCH_VARIABLE}", "=", "cuda"]
    assert engine[engine.index("engine") :] == ["engine", "install", "vllm", "--platform", "cuda;"]
    assert gpu_compose["services"]["worker"]["build"]["args"] == {TORCH_VARIABLE: "cuda"}
    assert "args" not in gpu_compose["services"]["server"]["build"]


def test_the_image_for_gpus_has_the_compiler_and_headers_that_triton_needs(steps):
    begin = steps.index(("FROM", ["system-cpu", "AS", "system-cuda"]))
    (run,) = [words for step, words in steps[begin + 1 : begin + 3] if step == "RUN"]
    assert {"gcc", "g++", "libc6-dev"} < {*run}
    header = run[run.index("echo") :]
    assert "#include <Python.h>" in header and "gcc" in header, "the build fails if the base image has no Python.h"


def test_the_services_for_gpus_reserve_them_and_mount_declared_volumes(gpu_compose, steps):
    services = gpu_compose["services"]
    worker = services["worker"]
    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert [name for name, service in services.items() if "deploy" in service] == ["worker"]
    assert worker["image"] == "rheostat:cuda" and worker["command"][:3] == ["prefect", "worker", "start"]
    mounted = dict(mount.split(":") for mount in worker["volumes"])
    assert mounted.keys() <= gpu_compose["volumes"].keys()
    owned = next(words for step, words in steps if step == "RUN" and "useradd" in words)
    assert {*mounted.values()} <= {*owned}, "a new volume takes the owner of the image's directory"


def test_every_service_waits_for_services_that_report_readiness_and_mounts_declared_volumes(compose):
    services = compose["services"]
    assert services.keys() == {"database", "server", "deploy", "worker"}
    for service in services.values():
        for other, waits in service.get("depends_on", {}).items():
            needs = {"service_healthy": "healthcheck" in services[other]}
            needs["service_completed_successfully"] = services[other].get("restart") == "no"
            assert needs[waits["condition"]]
        mounted = {mount.partition(":")[0] for mount in service.get("volumes", ())}
        assert mounted <= compose["volumes"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    build = services["server"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()


def test_the_compose_file_contains_no_password_and_fails_if_a_password_is_not_set(compose):
    text = (DEPLOY / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == {"RHEOSTAT_PASSWORD", "POSTGRES_PASSWORD"}
    assert not re.search(r"\$\{\w+(?!\w|:\?)", text) and "$$" not in text
    secret = [value for each in compose["services"].values() for name, value in each.get("environment", {}).items()
              if re.search("PASSWORD|AUTH", name)]  # fmt: skip
    assert len(secret) == 4 and all(value.startswith("${") for value in secret)


def test_the_worker_serves_the_pool_of_the_deployments_and_mounts_their_store(compose, steps):
    pool = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["work_pool"]["name"]
    worker, deploy = compose["services"]["worker"], compose["services"]["deploy"]
    assert worker["command"][:5] == ["prefect", "worker", "start", "--pool", pool]
    assert f"work-pool create {pool} " in deploy["command"][-1] and "deploy --all" in deploy["command"][-1]
    home = next(word.partition("=")[2] for step, words in steps if step == "ENV" for word in words if "HOME=" in word)
    assert worker["volumes"] == [f"store:{home}"]
    made = next(words for step, words in steps if "useradd" in words)
    assert ["install", "-d", "-o", "rheostat", home] == made[made.index("install") :][:5]
    assert deploy["working_dir"] == next(words[0] for step, words in steps if step == "WORKDIR")


def test_the_job_template_has_exactly_one_variable_for_each_placeholder():
    properties = KUBERNETES["variables"]["properties"]
    placed = PLACEHOLDER.findall(json.dumps(KUBERNETES["job_configuration"]))
    assert {*placed} == properties.keys()
    assert all(each["title"] and each["description"].endswith(".") for each in properties.values())
    assert is_valid_schema(KUBERNETES["variables"]) is None
    defaults = {name: each["default"] for name, each in properties.items() if "default" in each}
    assert validate(defaults, KUBERNETES["variables"]) == []


async def test_the_job_template_builds_a_job_with_the_requested_values():
    class Configuration(BaseJobConfiguration):
        job_manifest: dict
        namespace: str

    asked = {"gpus": 2, "image": "team/rheostat", "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    made = await Configuration.from_template_and_values(KUBERNETES, asked, client=object())
    job = made.job_manifest
    assert (job["apiVersion"], job["kind"], job["spec"]["backoffLimit"]) == ("batch/v1", "Job", 0)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["restartPolicy"], pod["tolerations"], made.namespace) == ("Never", asked["tolerations"], "default")
    assert (container["image"], container["resources"]["limits"]["nvidia.com/gpu"]) == ("team/rheostat", 2)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert PLACEHOLDER.findall(json.dumps(pod | {"containers": []})) == []


def test_the_ray_cluster_has_the_required_fields_and_the_installed_version_of_ray(cluster, compose, gpu_compose):
    validate_json(cluster, RAY_CLUSTER)
    spec = cluster["spec"]
    has_gpus = "nvidia.com/gpu" in json.dumps(spec)
    service = (gpu_compose if has_gpus else compose)["services"]["worker"]
    assert spec["rayVersion"] == version("ray")
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == service["image"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    claim = groups[0]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == KUBERNETES["variables"]["properties"]["store_claim"]["default"]
    pages = (ROOT / "docs/deployments.md").read_text()
    assert f"ray://{cluster['metadata']['name']}-head-svc:10001" in pages


def test_every_pod_with_gpus_has_enough_shared_memory_and_tolerates_the_taint_of_gpu_nodes():
    spec = yaml.safe_load((DEPLOY / "kuberay-gpu.yaml").read_text())["spec"]
    assert "nvidia.com/gpu" not in json.dumps(spec["headGroupSpec"]), "the head pod runs no workers"
    for group in spec["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) > 0
        assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        places = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        memory = places["/dev/shm"]["emptyDir"]
        assert memory["medium"] == "Memory" and int(memory["sizeLimit"].removesuffix("Gi")) >= 16

"""`rheostat init`: writes the files of a new job, which trains without any change."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Final

from cyclopts import Parameter

import rheostat.infra
from rheostat.flows.cli.options import format_next_steps
from rheostat.infra.demos import demo_files, demo_names
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import write

Folder = Annotated[
    Path | None,
    Parameter(name="DIR", show_default="with --data: the current folder", help="folder for the new files"),
]
DataName = Annotated[
    str | None,
    Parameter(
        metavar="FILE", help="write a job for this file of problems or dataset on the Hub, instead of an example"
    ),
]
PolicyName = Annotated[
    str | None,
    Parameter(metavar="DIR", help="with --data: directory of the policy in Hugging Face format, or a name on the Hub"),
]
JudgeName = Annotated[
    str | None,
    Parameter(metavar="DIR", help="with --data: directory or name of a judge, for answers that are free texts"),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options that name the parts of a data set that a job reads."""

    prompt_column: Annotated[
        str | None, Parameter(metavar="NAME", show_default="found by its name", help="column with the prompts")
    ] = None
    answer_column: Annotated[
        str | None,
        Parameter(metavar="NAME", show_default="found by its name", help="column with the reference answers"),
    ] = None
    config: Annotated[str | None, Parameter(metavar="NAME", help="configuration of a dataset on the Hub")] = None
    split: Annotated[str | None, Parameter(metavar="NAME", help="split of a dataset on the Hub for training")] = None
    heldout_split: Annotated[
        str | None, Parameter(metavar="NAME", help="split of a dataset on the Hub for evaluation")
    ] = None


DEFAULT_OPTIONS = DataOptions()


ExampleName = Annotated[
    str | None,
    Parameter(metavar="NAME", help="copy a demonstration: a job with the code that it names by `target`"),
]
Deployments = Annotated[
    bool,
    Parameter(
        help="write the files for deployments on a Prefect server instead: prefect.yaml, automations, example jobs"
    ),
]

JOB = """\
# A complete job, which trains a tiny model in about a minute on two CPU cores:
#   rheostat train {job}
# Most answers in problems.jsonl end like `so 14`, and at first most completions do too. The reward in my_rewards.py
# requires `#### 14`, so the share of correct completions with this mark rises from iteration to iteration.
# docs/configuration.md explains every key and its default. The command line can override any key:
#   rheostat train {job} iterations=20 update.learning_rate=1e-4
name = {name}
iterations = 12

# Problems, one JSON object per line. Relative paths start in the folder of this file.
[data]
kind = "file"
path = "problems.jsonl"
prompt_column = "question"
answer_column = "answer" # reference answer, for the warm-up and for rewards
template = "{{prompt}}\\n"
heldout_fraction = 0.1 # share of the problems that is only used for evaluation; or set `heldout_path` to another file

# Model: a tiny one with random weights. To train an existing model in Hugging Face format, remove this table and
# [warmup], and write
#   [policy]
#   kind = "directory"
#   path = "path/to/model"
[policy]
kind = "scratch"
context = 64 # maximum number of tokens of a prompt and its completion together

# Supervised training on the answers, before reinforcement learning.
[warmup]
steps = 900

# Completions that each iteration generates.
[rollout]
prompts = 32
group_size = 8 # completions per prompt, whose rewards are compared with each other

[rollout.sampling]
max_new_tokens = 32

# Rewards of completions. The mean of the first reward is reported as accuracy. `target` names a function in a file next
# to this one, as `file:function`.
[scoring]
rewards = [
    {{ kind = "target", name = "marked", target = "my_rewards:marked", options = {{ mark = "####" }} }},
    # {{ kind = "numeric", pattern = '(\\d+)', weight = 0.1 }}, # adds 0.1 if the last number is correct, even unmarked
]

[algorithm]
kind = "grpo"

[update]
learning_rate = 5e-4

[evaluation]
problems = {heldout} # number of held-out problems for the evaluations before and after training
"""

REWARDS = '''\
"""Reward functions of the job. A reward is a function of the prompt, the completion and the reference answer."""

import re


def marked(prompt: str, completion: str, answer: str, *, mark: str) -> float:
    """Return 1 if the completion ends with the mark and the number with which the reference answer ends, else 0."""
    number = re.findall(r"\\d+", answer)[-1]
    return float(completion.strip().endswith(f" {mark} {number}"))
'''

HELDOUT: Final = 128
PROBLEMS: Final = 1536
MARKED: Final = 0.2
"""Fraction of the example problems whose reference answer ends with the mark `####`, which the example reward
requires."""
STEPS: Final = 3
LARGEST: Final = 20
LARGEST_STEP: Final = 5

JOB_FILES: Final = {
    "job.toml": "configuration",
    "problems.jsonl": "problems",
    "my_rewards.py": "reward function",
}
DEMO_FILES: Final = {
    ".md": "description",
    ".py": "code that the configuration names by `target`",
    ".toml": "configuration",
}
DEPLOYMENT_FILES: Final = {
    "prefect.yaml": "deployments",
    "automations.yaml": "automation that marks runs without heartbeats as Crashed",
    "notifications.yaml": "automations that notify a person about retrains and failures",
    "configs": "example jobs",
}
SHOWN: Final = 6
"""Maximum number of existing files that an error message names."""


def init(
    folder: Folder = None,
    /,
    *,
    data: DataName = None,
    policy: PolicyName = None,
    judge: JudgeName = None,
    columns: DataOptions = DEFAULT_OPTIONS,
    example: ExampleName = None,
    deployments: Deployments = False,
) -> None:
    """Create a job for a file of problems and a policy, an example job to edit, or the files for deployments."""
    inputs = {"policy": policy, "judge": judge, **asdict(columns)}
    chosen = {"--data": data is not None, "--example": example is not None, "--deployments": deployments}
    if len(options := [option for option, is_set in chosen.items() if is_set]) > 1:
        raise BadInput(f"{options[1]} cannot be combined with {options[0]}. Run the command once with each option.")
    if data is not None:
        if policy is None:
            raise BadInput("--data needs --policy DIR, the directory of the model to train.")
        _write_proposed_job(folder or Path(), {"data": data, **inputs})
        return
    if set_names := [name for name, value in inputs.items() if value is not None]:
        option = f"--{set_names[0].replace('_', '-')}"
        raise BadInput(f"{option} needs --data FILE, the file of problems to train on.")
    if folder is None:
        raise BadInput(
            "Name a folder for an example job, as in `rheostat init my-job`, or name your data and model with --data "
            "FILE --policy DIR."
        )
    if deployments:
        _write_deployments(folder)
    elif example is not None:
        _copy_demo(folder, example)
    else:
        _write_example(folder)


def _write_proposed_job(folder: Path, inputs: Mapping[str, str | None]) -> None:
    """Write a job for a file of problems and a policy, and print what was recognized, the plan and the next step.

    Raises BadInput, with nothing written, if the job would not start.
    """
    from rheostat.flows.cli.plan import plan_run
    from rheostat.tasks.config.documents import place_document
    from rheostat.tasks.config.run import override_config
    from rheostat.tasks.proposal import propose_job

    job, here = folder / "job.toml", folder.absolute()
    _require_new(folder, [job.name])
    proposal = propose_job(_run_name(folder.resolve()), str(here), inputs=inputs)
    config = override_config(place_document(proposal.document, here), [], source=str(job))
    plan = plan_run(config)
    _write_files(folder, {job.name: proposal.document.encode()})
    width = max(map(len, proposal.findings))
    findings = "\n".join(f"{label.ljust(width)}  {text}" for label, text in proposal.findings.items())
    write(f"{findings}\n\n{plan.text()}\n\n{job}    configuration, with a reason for every value")
    write(format_next_steps({"train": shlex.join(["rheostat", "train", str(job)])}))


def _write_deployments(folder: Path) -> None:
    """Write the files for deployments on a Prefect server to a folder, and print the commands to run next."""
    _write_files(folder, _read_deployment_files())
    _print_files(folder, DEPLOYMENT_FILES)
    enter = f"cd {shlex.quote(str(folder))} && export PREFECT_PROFILE=rheostat RHEOSTAT_HOME=$PWD"
    steps = {
        "use the server that `rheostat server` started": enter,
        "create the work pool": "prefect work-pool create rheostat --type process",
        "create the deployments": "prefect --no-prompt deploy --all",
    }
    write(format_next_steps(steps))


def _copy_demo(folder: Path, name: str) -> None:
    """Copy the files of a demonstration to a folder, and print the commands to run next. Raises BadInput if there is no
    demonstration of this name."""
    if name not in (names := demo_names()):
        raise BadInput(f"There is no example {name!r}. Choose one of {', '.join(names)}.")
    paths = [path for path in demo_files(name) if path.suffix in DEMO_FILES]
    _write_files(folder, {path.name: path.read_bytes() for path in paths})
    _print_files(folder, {path.name: DEMO_FILES[path.suffix] for path in paths})
    job = folder / "job.toml"
    command = "soup" if "[soup]" in job.read_text().splitlines() else "train"
    steps = {
        "check everything, write nothing": shlex.join(["rheostat", "train", str(job), "--dry-run"]),
        "train": shlex.join(["rheostat", command, str(job)]),
    }
    write(format_next_steps(steps))


def _write_example(folder: Path) -> None:
    """Write an example job (configuration, problems and a reward) to a folder, and print the commands to run next."""
    job = folder / "job.toml"
    texts = {
        "job.toml": JOB.format(
            job=shlex.quote(str(job)), name=json.dumps(_run_name(folder.resolve())), heldout=HELDOUT
        ),
        "problems.jsonl": "".join(f"{json.dumps(problem)}\n" for problem in _generate_problems()),
        "my_rewards.py": REWARDS,
    }
    _write_files(folder, {name: text.encode() for name, text in texts.items()})
    _print_files(folder, JOB_FILES)
    steps = {
        "check everything, write nothing": shlex.join(["rheostat", "train", str(job), "--dry-run"]),
        "train": shlex.join(["rheostat", "train", str(job)]),
    }
    write(format_next_steps(steps))


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write new files to a folder. `files` maps paths in the folder to contents. Raises BadInput, with nothing written,
    if one of the files exists or the folder cannot be created."""
    _require_new(folder, [*files])
    try:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.write(content)
    except OSError as error:
        raise BadInput(
            f"The new files cannot be written to {folder}: {error.strerror}. Name a folder in a directory that you may "
            "write to."
        ) from None


def _require_new(folder: Path, names: Sequence[str]) -> None:
    """Raise BadInput if one of the files `names` exists in the folder, or if the folder cannot be created."""
    above = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not above.is_dir():
        raise BadInput(
            f"{folder} cannot be created, because {above} is not a directory. Name a folder that does not exist yet, "
            "or an empty one."
        )
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        raise BadInput(
            f"{folder} already contains {_list_names(existing)}, so nothing was written. Choose another folder, or "
            "remove these files."
        )


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _print_files(folder: Path, files: Mapping[str, str]) -> None:
    width = max(len(str(folder / name)) for name in files)
    write("\n".join(f"{str(folder / name).ljust(width)}    {what}" for name, what in files.items()))


def _read_deployment_files() -> dict[str, bytes]:
    """Return the contents of the files for deployments on a Prefect server, by path in the new folder."""
    package = Path(rheostat.infra.__file__).parent
    sources = [package / "automations.yaml", package / "notifications.yaml", package / "deploy" / "prefect.yaml"]
    examples = package / "deploy" / "configs"
    files = {path.name: path.read_bytes().replace(b"infra/", b"") for path in sources}
    return files | {
        f"configs/{path.relative_to(examples).as_posix()}": path.read_bytes()
        for path in sorted(examples.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }


def _generate_problems() -> Iterator[dict[str, str]]:
    """Yield the example problems: distinct sums (`question`) with worked solutions (`answer`). All intermediate results
    are between 0 and 20."""
    rng, questions = Random(0), set[str]()
    while len(questions) < PROBLEMS:
        total = rng.randint(0, LARGEST)
        question, steps = str(total), list[str]()
        for _ in range(STEPS):
            after = rng.choice([each for each in range(LARGEST + 1) if 0 < abs(each - total) <= LARGEST_STEP])
            sign = "+" if after > total else "-"
            question += f" {sign} {abs(after - total)}"
            steps.append(f"{total}{sign}{abs(after - total)}={after}")
            total = after
        if question not in questions:
            questions.add(question)
            mark = "####" if rng.random() < MARKED else "so"
            yield {"question": f"{question} =", "answer": f"{' '.join(steps)} {mark} {total}"}


def _run_name(folder: Path) -> str:
    """Derive the name of the new job's run from the folder's name, by replacing characters that a run name may not
    contain."""
    return re.sub(r"[^a-z0-9-]+", "-", folder.name.lower()).strip("-")[:64] or "job"

"""`rheostat init`: a job of the user's own to begin with, which trains as it is written."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

import infra
from infra.errors import BadInput
from infra.terminal import write

Folder = Annotated[Path, Parameter(name="DIR", help="folder to write the files into")]
Deployments = Annotated[
    bool,
    Parameter(help="write prefect.yaml, automations and example jobs instead, for deployments on a Prefect server"),
]

JOB = """\
# A job of your own; it trains as it stands, in less than a minute on two CPU cores:
#   rheostat train {job}
# docs/configuration.md explains every key, with its default; the command line can change any of them, too:
#   rheostat train {job} iterations=8 update.learning_rate=1e-4
name = {name}
iterations = 4

# The problems, one JSON object a line. Relative paths start in the folder of this file.
[data]
kind = "file"
path = "problems.jsonl"
prompt_column = "question"
answer_column = "answer" # what rewards compare with; a worked solution that ends in `#### 72` is fine
heldout_fraction = 0.2 # never learnt from; `heldout_path` names a second file instead

# The model: a tiny one made from nothing. For a real one, in Hugging Face format, remove this table and [warmup]; write
#   [policy]
#   kind = "directory"
#   path = "path/to/model"
[policy]
kind = "scratch"
context = 32 # longest prompt and completion together, in tokens

# Supervised steps on the answers, before reinforcement begins.
[warmup]
steps = 600

# What one iteration generates.
[rollout]
prompts = 16
group_size = 8 # completions of each prompt, compared with each other

[rollout.sampling]
max_new_tokens = 8

# What a completion is worth. The first reward is the one that is reported as accuracy; `target` names a function in a
# file beside this one, as `file:function`.
[scoring]
rewards = [
    {{ kind = "numeric", pattern = '(-?\\d+)' }}, # 1 where the last number of the completion is the answer
    {{ kind = "target", name = "brevity", target = "my_rewards:brevity", weight = 0.1, options = {{ limit = 4 }} }},
]

[algorithm]
kind = "grpo"

[update]
learning_rate = 5e-4

[evaluation]
problems = {heldout} # the first so many that are held out, before and after
"""

REWARDS = '''\
"""Rewards of your own: any function of the prompt, the completion and the reference answer."""


def brevity(prompt: str, completion: str, answer: str, *, limit: int) -> float:
    """1 for a completion of at most `limit` characters, less the longer it is."""
    return min(1.0, limit / max(1, len(completion.strip())))
'''

HELDOUT = 32

JOB_FILES: Final = {
    "job.toml": "the configuration",
    "problems.jsonl": "the problems",
    "my_rewards.py": "a reward",
}
DEPLOYMENT_FILES: Final = {
    "prefect.yaml": "the deployments",
    "automations.yaml": "marks runs without heartbeats as Crashed",
    "notifications.yaml": "tells a person about retrains and failures",
    "configs": "example jobs",
}
SHOWN: Final = 6
"""File names in a message."""


def init(folder: Folder, /, *, deployments: Deployments = False) -> None:
    """Begin a job of your own: a configuration, problems and a reward to change; or the files of deployments."""
    if deployments:
        _write(folder, _deployment_files())
        _explain(folder, DEPLOYMENT_FILES)
        write(
            f"next     cd {shlex.quote(str(folder))} && export PREFECT_PROFILE=rheostat RHEOSTAT_HOME=$PWD\n"
            "         prefect work-pool create rheostat --type process\n"
            "         prefect --no-prompt deploy --all"
        )
        return
    job = folder / "job.toml"
    texts = {
        "job.toml": JOB.format(job=shlex.quote(str(job)), name=json.dumps(_name(folder.resolve())), heldout=HELDOUT),
        "problems.jsonl": "".join(f"{json.dumps(problem)}\n" for problem in _problems()),
        "my_rewards.py": REWARDS,
    }
    _write(folder, {name: text.encode() for name, text in texts.items()})
    _explain(folder, JOB_FILES)
    write(
        f"next     {shlex.join(['rheostat', 'train', str(job), '--dry-run'])}    check everything, write nothing\n"
        f"         {shlex.join(['rheostat', 'train', str(job)])}    train"
    )


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write new files. Raises BadInput if one of them exists; then nothing is written."""
    there = [name for name in files if (folder / name).exists()]
    if there:
        expected, found = (_some(names) for names in ([*files], there))
        raise BadInput(f"{folder}: expected none of {expected}, found {found}; nothing was written")
    try:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.write(content)
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror}") from None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _explain(folder: Path, files: Mapping[str, str]) -> None:
    width = max(len(str(folder / name)) for name in files)
    write("\n".join(f"{str(folder / name).ljust(width)}    {what}" for name, what in files.items()))


def _deployment_files() -> dict[str, bytes]:
    """Return the files of deployments, as they come with this package."""
    package = Path(infra.__file__).parent
    sources = [package / "automations.yaml", package / "notifications.yaml", package / "deploy" / "prefect.yaml"]
    examples = package / "deploy" / "configs"
    files = {path.name: path.read_bytes().replace(b"infra/", b"") for path in sources}
    return files | {
        f"configs/{path.relative_to(examples).as_posix()}": path.read_bytes()
        for path in sorted(examples.rglob("*"))
        if path.is_file()
    }


def _problems() -> list[dict[str, str]]:
    """Sums of two numbers."""
    return [{"question": f"{a} + {b} = ", "answer": str(a + b)} for a in range(1, 21) for b in range(1, 11)]


def _name(folder: Path) -> str:
    """The folder's name, as far as it can be that of a run."""
    return re.sub(r"[^a-z0-9-]+", "-", folder.name.lower()).strip("-")[:64] or "job"

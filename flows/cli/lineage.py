"""Command that traces where a policy comes from, or which policies were trained on a prompt.

It imports neither Prefect nor torch.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.options import DEFAULT_STORE, Store
from infra.errors import BadInput
from infra.terminal import Json, write

if TYPE_CHECKING:
    from tasks.lineage.trace import TracedManifest, TracedRun
    from tasks.lineage.versions import TracedVersion

What = Annotated[
    str | None,
    Parameter(
        name="WHAT",
        show_default=False,
        help="policy: NAME@champion, NAME@N or NAME of a registry, a run, or the beginning of a policy's digest",
    ),
]
PromptId = Annotated[
    str | None, Parameter(metavar="ID", help="list the promoted policies that were trained on this prompt_id")
]
All = Annotated[bool, Parameter(name="--all", help="show all manifests of all iterations")]
OpenLineage = Annotated[
    str | None,
    Parameter(name="--openlineage", metavar="TO", help="send OpenLineage events to a new file or an http(s) address"),
]

Tree = tuple[str, "list[Tree]"]
"""A line of text, and the list of its branches."""
WAY = ("seal", "update", "credit", "scoring", "rollout", "plan")
SHORT = 16
"""Number of digits of a digest in a tree."""


def lineage(
    what: What = None,
    /,
    *,
    prompt: PromptId = None,
    everything: All = False,
    openlineage: OpenLineage = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Trace a policy back to its data, code and configuration, through all earlier champions."""
    from tasks.lineage.versions import trace

    if (what is None) == (prompt is None):
        raise BadInput("lineage: expected a policy, such as assistant@champion, or --prompt ID")
    if what is None:
        assert prompt is not None
        _tell_learners(store, prompt, as_json=as_json)
        return
    versions = trace(store, what)
    if openlineage is not None:
        from tasks.lineage.events import send

        sent = send(versions, store, openlineage)
        write(f"{openlineage}: {sent:,} OpenLineage events")
    elif as_json:
        write(json.dumps([version.model_dump(mode="json") for version in versions], indent=2))
    else:
        write("\n".join(line for version in versions for line in drawn(_version(version, everything=everything))))


def drawn(tree: Tree) -> Iterator[str]:
    """Yield the lines of a tree, drawn with branches."""
    text, below = tree
    yield text
    for number, branch in enumerate(below, start=1):
        first, *others = drawn(branch)
        is_last = number == len(below)
        yield f"{'└─' if is_last else '├─'} {first}"
        yield from (f"{'  ' if is_last else '│ '} {line}" for line in others)


def _version(version: "TracedVersion", *, everything: bool) -> Tree:
    record, below = version.record, list[Tree]()
    if record is None:
        title = f"run {version.name}: in no registry"
    else:
        title = f"{version.registry}@{record.number}: policy {record.policy[:SHORT]}"
        title += ", champion" if version.is_champion else ""
        below += [(f"record {record.number}: {record.kind} by {record.who}, {record.when}: {record.reason}", [])]
        below += [_gate(version)]
        files = version.files or "not kept there"
        below += [(f"files: {files}", [])]
    if version.run is None:
        below += [(f"run {version.name}: not in this store any more", [])]
    else:
        below += [_run(version.run, everything=everything)]
    if version.began_as:
        below += [(f"began as champion {version.registry}@{version.began_as}", [])]
    return title, below


def _gate(version: "TracedVersion") -> Tree:
    gate = version.record.gate if version.record is not None else None
    verdict = str(gate.get("verdict")) if isinstance(gate, dict) else "nobody asked"
    reasons = gate.get("reasons") if isinstance(gate, dict) else None
    below: list[Tree] = [(str(reason), []) for reason in reasons] if isinstance(reasons, list) else []
    compared = [_evaluation(run) for run in version.evaluations]
    return f"gate: {verdict}", below + (compared or [("its evaluations are not in this store any more", [])])


def _evaluation(run: "TracedRun") -> Tree:
    summary = run.find("eval-0000/summary")
    return f"evaluation {run.name}: {'not finished' if summary is None else f'summary {summary.digest[:SHORT]}'}", []


def _run(run: "TracedRun", *, everything: bool) -> Tree:
    below = [(f"configuration {run.fingerprint}, made {run.created}", list[Tree]())]
    for known in run.dependencies:
        libraries = known.dependencies.libraries
        code = {name: f"{len(modules)} modules" for name, modules in known.dependencies.code.items()}
        parts = [f"{name} {libraries[name]}" for name in ("rheostat", "python", "torch") if name in libraries]
        parts += [f"{name} ({modules})" for name, modules in code.items()]
        files: list[Tree] = [
            (f"data {path}: {file.digest[:SHORT]}", []) for path, file in known.dependencies.data.items()
        ]
        below += [(f"from iteration {known.iteration} on: {', '.join(parts)}", files)]
    below += [(f"reward {each.term}: {each.kind}, {_shortened(each.version)}", []) for each in run.rewards]
    first = [each for each in run.manifests if not each.key.startswith(("it-", "eval-"))]
    below += [(_line(each), []) for each in first]
    below += [_iteration(run, number) for number in run.iterations] if everything else _iterations(run)
    below += [(f"deletions: {line}", []) for line in _deleted(run)]
    return f"run {run.name}: policy {run.policy[:SHORT]} after {len(run.iterations)} iterations", below


def _shortened(version: str) -> str:
    what, _, digest = version.partition(" ")
    return version if what == "rheostat" else f"{what} {digest[:SHORT]}"


def _iterations(run: "TracedRun") -> list[Tree]:
    """Return one line with the number of manifests of all iterations, and one with the state of their shards and
    policies."""
    made = [each for number in run.iterations for each in run.of(number)]
    counts = Counter(each.stage.stage for each in made)
    states = Counter(part.state for each in made for part in each.parts)
    text = ", ".join(f"{counts[stage]} {stage}" for stage in sorted(counts, key=_place))
    numbers = f"iterations {run.iterations[0]} to {run.iterations[-1]}" if run.iterations else "no iteration"
    parts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return [(f"{numbers}: {text}", [(f"shards and policies: {parts}", [])])] if made else [(numbers, [])]


def _iteration(run: "TracedRun", number: int) -> Tree:
    made = sorted(run.of(number), key=lambda each: _place(each.stage.stage))
    return f"iteration {number}", [(_line(each), []) for each in made]


def _place(stage: str) -> int:
    """Return the position of a stage on the way from a seal back to the prompts. Auxiliary scores count like credit."""
    return WAY.index(stage) if stage in WAY else WAY.index("credit")


def _line(manifest: "TracedManifest") -> str:
    parts = [
        f"{part.name} {part.digest[:SHORT]}{'' if part.state == 'there' else f' ({part.state})'}"
        for part in manifest.parts
    ]
    made_from = f" from {', '.join(manifest.parents)}" if manifest.parents else ""
    return f"{manifest.key} {manifest.digest[:SHORT]}{''.join(f', {part}' for part in parts)}{made_from}"


def _deleted(run: "TracedRun") -> Sequence[str]:
    from flows.cli.output import deletion_lines

    return deletion_lines(run.deleted)


def _tell_learners(store: str, prompt: str, *, as_json: bool) -> None:
    from tasks.lineage.learners import learners

    found = learners(store, frozenset([prompt]))
    if as_json:
        write(json.dumps([each.model_dump(mode="json") for each in found], indent=2))
    elif not found:
        write(f"prompt {prompt}: no promoted policy of {store} learnt from it")
    else:
        write("\n".join(each.line() for each in found))

"""Command that traces where a policy comes from, or which policies were trained on a prompt.

It imports neither Prefect nor torch.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, Store
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from rheostat.tasks.lineage.trace import TracedManifest, TracedRun
    from rheostat.tasks.lineage.versions import TracedVersion

TracedName = Annotated[
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
"""Node of a tree to print: a line of text and the list of its branches, which are trees too."""
WAY = ("seal", "update", "credit", "scoring", "rollout", "plan")
SHORT = 16
"""Number of digits of a digest in a tree."""
STATE_WORDS = {"there": "stored", "deleted": "deleted", "rewritten": "rewritten", "missing": "missing"}
"""Words that the output uses for the recorded states of stored data."""


def lineage(
    what: TracedName = None,
    /,
    *,
    prompt: PromptId = None,
    everything: All = False,
    openlineage: OpenLineage = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Trace a policy back to its data, code and configuration, through all earlier champions."""
    from rheostat.tasks.lineage.versions import trace

    if (what is None) == (prompt is None):
        raise BadInput("lineage needs either a policy, such as assistant@champion, or --prompt ID, but not both.")
    if what is None:
        assert prompt is not None
        _write_learners(store, prompt, as_json=as_json)
        return
    versions = trace(store, what)
    if openlineage is not None:
        from rheostat.tasks.lineage.events import send

        sent = send(versions, store, openlineage)
        write(f"{sent:,} OpenLineage events sent to {openlineage}")
    elif as_json:
        write(json.dumps([version.model_dump(mode="json") for version in versions], indent=2))
    else:
        write(
            "\n".join(
                line for version in versions for line in draw_tree(_build_version(version, everything=everything))
            )
        )


def draw_tree(tree: Tree) -> Iterator[str]:
    """Yield the lines of a tree as text, with line-drawing characters that connect each node to its branches."""
    text, below = tree
    yield text
    for number, branch in enumerate(below, start=1):
        first, *others = draw_tree(branch)
        is_last = number == len(below)
        yield f"{'└─' if is_last else '├─'} {first}"
        yield from (f"{'  ' if is_last else '│ '} {line}" for line in others)


def _build_version(version: "TracedVersion", *, everything: bool) -> Tree:
    record, below = version.record, list[Tree]()
    if record is None:
        title = f"run {version.name}: not in a registry"
    else:
        title = f"{version.registry}@{record.number}: policy {record.policy[:SHORT]}"
        title += ", champion" if version.is_champion else ""
        below += [(f"record {record.number}: {record.kind} by {record.who}, {record.when}: {record.reason}", [])]
        below += [_build_gate(version)]
        files = version.files or "not stored in the registry"
        below += [(f"files: {files}", [])]
    if version.run is None:
        below += [(f"run {version.name}: no longer in this store", [])]
    else:
        below += [_build_run(version.run, everything=everything)]
    if version.began_as:
        below += [(f"started from champion {version.registry}@{version.began_as}", [])]
    return title, below


def _build_gate(version: "TracedVersion") -> Tree:
    gate = version.record.gate if version.record is not None else None
    verdict = str(gate.get("verdict")) if isinstance(gate, dict) else "no result recorded"
    reasons = gate.get("reasons") if isinstance(gate, dict) else None
    below: list[Tree] = [(str(reason), []) for reason in reasons] if isinstance(reasons, list) else []
    compared = [_build_evaluation(run) for run in version.evaluations]
    return f"gate: {verdict}", below + (compared or [("the evaluations are no longer in this store", [])])


def _build_evaluation(run: "TracedRun") -> Tree:
    summary = run.find("eval-0000/summary")
    return f"evaluation {run.name}: {'not finished' if summary is None else f'summary {summary.digest[:SHORT]}'}", []


def _build_run(run: "TracedRun", *, everything: bool) -> Tree:
    below = [(f"configuration {run.fingerprint}, created {run.created}", list[Tree]())]
    if run.forked_from:
        below.append((f"forked from {run.forked_from}", []))
    for record in run.dependencies:
        libraries = record.dependencies.libraries
        code = {name: f"{len(modules)} modules" for name, modules in record.dependencies.code.items()}
        parts = [f"{name} {libraries[name]}" for name in ("rheostat", "python", "torch") if name in libraries]
        parts += [f"{name} ({modules})" for name, modules in code.items()]
        files: list[Tree] = [
            (f"data {path}: {file.digest[:SHORT]}", []) for path, file in record.dependencies.data.items()
        ]
        below += [(f"from iteration {record.iteration} on: {', '.join(parts)}", files)]
    below += [(f"reward {each.term}: {each.kind}, {_shorten_version(each.version)}", []) for each in run.rewards]
    first = [each for each in run.manifests if not each.key.startswith(("it-", "eval-"))]
    below += [(_describe_manifest(each), []) for each in first]
    below += [_build_iteration(run, number) for number in run.iterations] if everything else _count_iterations(run)
    below += [(f"deletions: {line}", []) for line in _describe_deletions(run)]
    return f"run {run.name}: policy {run.policy[:SHORT]} after {format_count(len(run.iterations), 'iteration')}", below


def _shorten_version(version: str) -> str:
    what, _, digest = version.partition(" ")
    return version if what == "rheostat" else f"{what} {digest[:SHORT]}"


def _count_iterations(run: "TracedRun") -> list[Tree]:
    """Summarize all iterations of a run as a tree of two lines: the number of stored results of each stage, and how
    many of their shards and policies still exist."""
    manifests = [each for number in run.iterations for each in run.of(number)]
    counts = Counter(each.stage.stage for each in manifests)
    states = Counter(STATE_WORDS[part.state] for each in manifests for part in each.parts)
    text = ", ".join(f"{counts[stage]} {stage}" for stage in sorted(counts, key=_stage_position))
    numbers = f"iterations {run.iterations[0]} to {run.iterations[-1]}" if run.iterations else "no iteration"
    parts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return [(f"{numbers}: {text}", [(f"shards and policies: {parts}", [])])] if manifests else [(numbers, [])]


def _build_iteration(run: "TracedRun", number: int) -> Tree:
    manifests = sorted(run.of(number), key=lambda each: _stage_position(each.stage.stage))
    return f"iteration {number}", [(_describe_manifest(each), []) for each in manifests]


def _stage_position(stage: str) -> int:
    """Return the position of a stage in the output. The last stage of an iteration (the seal) is listed first.
    Auxiliary scores have the same position as credit."""
    return WAY.index(stage) if stage in WAY else WAY.index("credit")


def _describe_manifest(manifest: "TracedManifest") -> str:
    parts = [
        f"{part.name} {part.digest[:SHORT]}{'' if part.state == 'there' else f' ({STATE_WORDS[part.state]})'}"
        for part in manifest.parts
    ]
    origin = f" from {', '.join(manifest.parents)}" if manifest.parents else ""
    return f"{manifest.key} {manifest.digest[:SHORT]}{''.join(f', {part}' for part in parts)}{origin}"


def _describe_deletions(run: "TracedRun") -> Sequence[str]:
    from rheostat.flows.cli.output import deletion_lines

    return deletion_lines(run.deleted)


def _write_learners(store: str, prompt: str, *, as_json: bool) -> None:
    from rheostat.tasks.lineage.learners import find_trained_policies

    policies = find_trained_policies(store, frozenset([prompt]))
    if as_json:
        write(json.dumps([each.model_dump(mode="json") for each in policies], indent=2))
    elif not policies:
        write(f"No promoted policy in {store} was trained on prompt {prompt}.")
    else:
        write("\n".join(each.line() for each in policies))

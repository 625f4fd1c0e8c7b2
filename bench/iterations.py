"""Breakdown of the time of whole iterations by stage, and the lengths that each iteration generated."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from bench.cycles import read_cycles
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.models.records.model_input import rollout_inputs
from rheostat.placement.roofline import Generated
from rheostat.tasks.run.keys import iteration_key


@dataclass(frozen=True, slots=True)
class IterationSeconds:
    """Wall-clock seconds of one training iteration, by stage.

    The seconds of stages add up, because one worker generates one shard and stages do not overlap.
    """

    seconds: float
    load: float
    """Seconds in which the vLLM server wakes up, verifies all weight files and loads the weights."""
    generate: float
    write: float
    """Seconds for writing the shard of completions, including its digest and fsync."""
    score: float
    sleep: float
    credit: float
    update: float
    logprobs: float
    """Seconds, within the update, for computing log-probs of the policy that generated the completions."""
    steps: float
    """Seconds, within the update, for forward passes, backward passes and optimizer steps."""
    save: float
    """Seconds, within the update, for writing weights and optimizer state to the store."""
    weights_bytes: float
    """Size in bytes of the weights that the server loaded in the iteration."""

    @property
    def rest(self) -> float:
        """Seconds outside all stages: flows, tasks, commits, reports, and waiting for processes."""
        stages = self.load + self.generate + self.write + self.score + self.sleep + self.credit + self.update
        return self.seconds - stages


def read_iterations(run: Run) -> list[IterationSeconds]:
    """Return the seconds by stage of every finished iteration of a run, in order."""
    return [_iteration(run, cycle.number, seconds=cycle.seconds) for cycle in read_cycles(run)]


def _iteration(run: Run, number: int, *, seconds: float) -> IterationSeconds:
    key = iteration_key(number)
    rollout, scoring = run.manifests(f"{key}/rollout/"), run.manifests(f"{key}/scoring/")
    credit, update = run.require(f"{key}/credit"), run.require(f"{key}/update")
    slept = run.journal(f"placement/{key}/sleep").values()
    return IterationSeconds(
        seconds=seconds,
        load=_sum(rollout, "weights_seconds"),
        generate=_sum(rollout, "generate"),
        write=_sum(rollout, "write"),
        score=_sum(scoring, "worker"),
        sleep=sum(float(str(entry["seconds"])) for entry in slept),
        credit=_seconds(credit)["worker"],
        update=_seconds(update)["worker"],
        logprobs=_seconds(update)["logprobs"],
        steps=_seconds(update)["steps"],
        save=_seconds(update)["save"],
        weights_bytes=_sum(rollout, "weights_bytes"),
    )


def read_lengths(run: Run, number: int) -> Generated:
    """Read the token lengths of the prompts and completions that iteration `number` generated, from its shards."""
    prompts: list[int] = []
    lengths: list[tuple[int, ...]] = []
    for manifest in run.manifests(f"{iteration_key(number)}/rollout/"):
        for shard in manifest.shards:
            table = read_shard(run.store, shard)
            rows = zip(table["prompt_row"].to_pylist(), rollout_inputs(table), strict=True)
            for _, group in groupby(rows, key=itemgetter(0)):  # shards are in the order of prompt rows
                members = [each for _, each in group]
                prompts.append(members[0].num_prompt_tokens)
                lengths.append(tuple(each.num_completion_tokens for each in members))
    return Generated(prompts=tuple(prompts), lengths=tuple(lengths))


def _seconds(manifest: Manifest) -> Mapping[str, float]:
    return manifest.provenance.seconds


def _sum(manifests: list[Manifest], name: str) -> float:
    return sum(_seconds(manifest).get(name, 0.0) for manifest in manifests)

"""Summary of what a run would do (sizes, workers and memory), computed before anything is written."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

import psutil

from rheostat.infra.config import PoolsConfig, Settings
from rheostat.infra.counts import format_count
from rheostat.infra.environments.gpus import num_gpus
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.sandbox import NOBODY, switches_user
from rheostat.infra.store.inputs import format_path
from rheostat.infra.store.storage import open_store
from rheostat.tasks.config.gpus import find_default_float32, find_memory_conflicts, gpu_layout, library_bytes
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.draft import describe_file_rules
from rheostat.tasks.run.dependencies import find_matching_run
from rheostat.tasks.run.hub_inputs import describe_hub_inputs
from rheostat.tasks.run.preflight import describe_images, preflight, with_data_sized_defaults, with_recorded_defaults
from rheostat.tasks.views.estimate import (
    DeviceEstimate,
    accelerator,
    estimate,
    list_loading_notes,
    loading_excess,
    peak_memory_by_part,
)
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.placement import first_placement


class RunPlan(Settings):
    """Summary of what a run would do, which `rheostat train --dry-run` prints."""

    lines: dict[str, str]
    """Descriptions of the parts of the run, such as its policy or its workers. Keys are labels such as "policy"."""
    facts: dict[str, float]
    """Numbers that the input check counted or estimated, by name, such as "train_problems". Numbers of bytes are per
    worker."""
    notes: list[str] = []
    """Sentences that the user should read before the run starts, about changed defaults and about settings that will
    not work as intended."""

    def text(self) -> str:
        """Return the plan as text: one line for each part of the run, then the notes."""
        width = max(map(len, self.lines))
        lines = [f"{name.ljust(width)}  {value}" for name, value in self.lines.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan_run(config: RunConfig, *, accept_change: bool = False) -> RunPlan:
    """Check a job and summarize what its run would do, without writing anything. Raises BadInput if the run itself
    could not start."""
    config = with_recorded_defaults(config)
    run = find_matching_run(config, accept_change=accept_change)
    result = asyncio.run(preflight(config, part="plan"))
    facts = result.facts
    config, adaptations = with_data_sized_defaults(config, facts)
    sealed = 0 if run is None else len(sealed_iterations(run))
    pools, rollout, update = config.pools, config.rollout, config.update
    prompts, completions = rollout.prompts, rollout.prompts * rollout.group_size
    steps = min(update.minibatches, prompts) * update.epochs
    shards = -(-prompts // rollout.shard_prompts)
    remaining = max(0, config.iterations - sealed)
    lines = {
        "run": f"{config.name} in {open_store(config.store).uri.removeprefix('file://')}",
        "state": "new" if run is None else f"continues after iteration {sealed}",
        "iterations": f"{config.iterations}, {remaining} remaining",
        "each": f"{format_count(prompts, 'prompt')} x {rollout.group_size} = {format_count(completions, 'completion')} "
        f"in {format_count(shards, 'shard')} (data files of up to {format_count(rollout.shard_prompts, 'prompt')})"
        f"{_describe_waves(config)}",
        "problems": f"{facts['train_problems']:,.0f} training, {facts['heldout_problems']:,.0f} held out"
        + _describe_dropped({**_find_dropped(facts, "dropped/"), "too_long": facts["too_long"]}),
        **_describe_images(config, facts, "images"),
        **_describe_images(config, facts, "warm-up images"),
        **describe_hub_inputs(config),
        "policy": f"{facts['parameters']:,.0f} parameters, context {facts['context']:,.0f} tokens",
        **_describe_adapter(config, facts),
        "longest": _describe_lengths(config, facts),
        **_describe_warmup(config, facts),
        **_describe_preferences(config, facts),
        "optimizer steps": f"{steps} per iteration, {remaining * steps:,} remaining",
        "evaluations": f"{_describe_evaluations(config)}, {format_count(config.evaluation.problems, 'problem')} each"
        f"{_describe_samples(config)}",
        "controllers": _describe_controllers(config),
        "worker slots": f"{_describe_slots(pools)}{_describe_sharing(config)}",
        "rollout": f"at most {format_count(pools.workers.max, 'worker')} with {_format_memory(facts, 'rollout')} each",
        "engine": rollout.engine.describe(pools),
        **{f"judge {term}": _describe_judge(config, term, facts) for term in config.scoring.model_rewards},
        "scoring": format_count(pools.scoring_workers, "worker"),
        **_describe_teacher(config, facts),
        "update": f"{format_count(pools.update_ranks, 'rank')} with {_format_update_memory(config, facts)} each, "
        f"ZeRO {update.zero_stage}, {update.dtype}"
        + (f", sequence-parallel groups of {update.sequence_parallel}" if update.sequence_parallel > 1 else ""),
        **_describe_gpus(config),
        "threads": f"{pools.threads} per worker",
        "fingerprint": f"{config.fingerprint()} (digest of all settings that results depend on)",
    }
    notes = [*result.notes, *adaptations, *_list_notes(config, facts)]
    return RunPlan(lines=lines, facts=facts, notes=notes)


def plan_memory(config: RunConfig) -> dict[str, str]:
    """Return a description of the estimated peak memory of a rollout worker and of an update rank, and of the memory of
    this machine, by label.

    Raises BadInput in the same cases as the run itself.
    """
    facts = asyncio.run(preflight(with_recorded_defaults(config), part="plan")).facts
    config, _ = with_data_sized_defaults(config, facts)
    return {
        "rollout worker": _format_memory(facts, "rollout"),
        "update rank": _format_update_memory(config, facts),
        "this machine": f"{psutil.virtual_memory().total / 2**20:,.1f} MiB",
        **_describe_gpus(config),
    }


def plan_device(config: RunConfig, device: str, *, completion_tokens: int | None) -> DeviceEstimate:
    """Estimate the shortest possible duration of an iteration, and the memory use, on accelerators of this kind.

    Without `completion_tokens`, completions are assumed to have half of their maximum length. Raises BadInput if the
    accelerator is unknown, the number of tokens is out of range, or the policy is a text-to-image policy, and in the
    same cases as the run itself.
    """
    kind, longest = accelerator(device), config.rollout.sampling.max_new_tokens
    if config.policy.generates_images:
        raise BadInput(
            f"--device {device} estimates the speed of language policies only, but policy.kind = "
            f"{config.policy.label!r} generates pictures. Remove --device."
        )
    tokens = max(1, longest // 2) if completion_tokens is None else completion_tokens
    if not 1 <= tokens <= longest:
        raise BadInput(f"--tokens {tokens} must be between 1 and rollout.sampling.max_new_tokens, which is {longest}.")
    config = with_recorded_defaults(config)
    config, _ = with_data_sized_defaults(config, facts := asyncio.run(preflight(config, part="plan")).facts)
    conflicts = tuple(f"{each}." for each in find_memory_conflicts(config, facts, kind.memory))
    found = estimate(config, facts, kind, completion_tokens=tokens)
    return found.model_copy(update={"conflicts": conflicts})


def _describe_controllers(config: RunConfig) -> str:
    """Describe how many controllers (flows that send work to workers) each role has, and whether they are sub-flows or
    deployed flow runs."""
    count, where = config.controllers.count, config.controllers.where
    place = "sub-flows of this process" if where == "nested" else "runs of Prefect deployments"
    return f"{count} per role, {where}: {place} that give work to the workers"


def _describe_lengths(config: RunConfig, facts: dict[str, float]) -> str:
    prompt, denoising = f"{facts['longest_prompt_tokens']:,.0f}", config.rollout.denoising
    if denoising is None:
        return f"{prompt} prompt + {format_count(config.rollout.sampling.max_new_tokens, 'new token')}"
    trained = "all with noise" if denoising.window is None else str(denoising.window.size)
    steps = format_count(denoising.steps, "denoising step")
    return f"a prompt of {prompt} bytes; {steps}, of which {trained} are trained on"


def _describe_images(config: RunConfig, facts: Mapping[str, float], group: str) -> dict[str, str]:
    """Describe how many images of a group were converted while reading, such as transparent images that get a
    background color. `group` is "images" or "warm-up images". Return an empty dict if no image was converted."""
    text = describe_images(facts, config.data.image_background, group=group)
    return {group: text} if text else {}


def _list_notes(config: RunConfig, facts: dict[str, float]) -> Iterator[str]:
    """Yield a warning for each setting that will not work as configured, or probably not as the user intends."""
    pools, minibatches, prompts = config.pools, config.update.minibatches, config.rollout.prompts
    needed_gpus = gpu_layout(config).count_gpus(pools.workers.min_slots)
    if needed_gpus and pools.ray_address is None and needed_gpus > (available_gpus := num_gpus()):
        yield (
            f"The pools need {format_count(needed_gpus, 'GPU')} (pools.gpus_per_worker, pools.gpus_per_update_rank), "
            f"but this machine has {available_gpus}. The run could not start here. Lower these settings, or set "
            "pools.ray_address to a cluster with enough GPUs."
        )
    yield from list_loading_notes(config, facts)
    if (precision_note := find_default_float32(config)) is not None:
        yield precision_note
    if minibatches > prompts:
        yield (
            f"update.minibatches is {minibatches}, but an iteration has {format_count(prompts, 'prompt')}, so it "
            f"takes {format_count(prompts, 'optimizer step')}. For more steps, raise rollout.prompts."
        )
    step = prompts * config.rollout.group_size // min(minibatches, prompts)
    if pools.update_ranks > step * config.update.sequence_parallel:
        yield (
            f"pools.update_ranks is {pools.update_ranks}, but an optimizer step has {format_count(step, 'completion')}"
            ", so some ranks are idle. Lower pools.update_ranks or update.minibatches, or raise rollout.prompts."
        )
    yield from list_data_notes(config, facts)


def list_data_notes(config: RunConfig, facts: dict[str, float]) -> Iterator[str]:
    """Yield notes about the problems and the policy's files that may surprise the user, such as duplicate problems."""
    if repeated := int(facts["repeated_problems"]):
        others = "is a duplicate of another" if repeated == 1 else "are duplicates of others"
        yield (
            f"{repeated} of {facts['train_problems']:,.0f} training problems {others}. Remove the "
            "duplicates from the data to train equally often on each problem."
        )
    is_set = config.warmup is not None and "worked_answer_fraction" in config.warmup.model_fields_set
    if is_set and facts.get("worked_answers") == 0:
        yield (
            "warmup.worked_answer_fraction has no effect, because no training problem has a worked answer. All "
            "examples train on the reference answers. Remove the key."
        )
    if rules := describe_file_rules(config):
        yield rules
    if "chosen_pad_token" in facts:
        yield (
            f"The policy's tokenizer names no padding token, so token {facts['chosen_pad_token']:.0f} is used for "
            "padding, and stored copies of the policy name it. Set pad_token in tokenizer_config.json to use another "
            "token."
        )
    if chunk := int(facts.get("slow_chunk_tokens", 0)):
        yield (
            f"On this machine, transformers computes state-space layers without fast kernels, in chunks of {chunk} "
            "tokens. Rows are padded to whole chunks, so an iteration may take minutes. Install mamba_ssm and "
            "causal_conv1d (GPUs only)."
        )
    if twins := int(facts.get("near_twins", 0)):
        yield (
            f"{twins} of {facts['heldout_problems']:,.0f} held-out problems differ from a training problem only in "
            "letter case, white space or Unicode normalization. Remove one of each two, so that evaluations measure "
            "unseen problems."
        )
    if (sandboxed := _list_sandboxed(config)) and switches_user():
        yield (
            f"This job runs as root. Sandboxed code ({', '.join(sandboxed)}) runs as user {NOBODY} and can only read "
            "files that every user of this machine can read. If these settings read other files, make the files "
            "readable for all users (chmod o+r), or run the job as another user."
        )


def _list_sandboxed(config: RunConfig) -> list[str]:
    """Return the names of the settings, such as a reward, that make the run execute code in a sandbox."""
    scoring, environment = config.scoring, config.rollout.environment
    settings = [f"reward {term!r}" for term in scoring.code_rewards]
    if scoring.sandbox == "bubblewrap" and any(rule.brings_code for rule in scoring.rules):
        settings.append("scoring.sandbox")
    if environment is not None and environment.sandboxed_by:
        settings.append(environment.sandboxed_by)
    return settings


def _describe_adapter(config: RunConfig, facts: dict[str, float]) -> dict[str, str]:
    lora = config.update.lora
    if lora is None:
        return {}
    kind = f"{'rank-stabilized ' * lora.rank_stabilized}{'DoRA' if lora.dora else 'LoRA'}"
    return {"adapter": f"{kind} of rank {lora.rank}, {facts['trained_parameters']:,.0f} trained parameters"}


def _describe_warmup(config: RunConfig, facts: dict[str, float]) -> dict[str, str]:
    if config.warmup is None or config.warmup.chats is None:
        return {"warm-up": "none" if config.warmup is None else format_count(config.warmup.steps, "step")}
    dropped = facts["too_long_chats"]
    chats = (
        f"{facts['chats']:,.0f} training, {facts['heldout_chats']:,.0f} held out; an epoch has "
        f"{facts['chat_tokens']:,.0f} tokens, of which {facts['trained_chat_tokens']:,.0f} are trained"
    )
    return {
        "warm-up": f"{config.warmup.describe()} ({format_count(facts['chat_steps'], 'step')} in all)",
        "chats": chats + (f"; {dropped:,.0f} left out because they are too long" if dropped else ""),
    }


def _describe_preferences(config: RunConfig, facts: dict[str, float]) -> dict[str, str]:
    if config.preferences is None:
        return {}
    dpo = {} if config.dpo is None else {"DPO": config.dpo.describe(config.preferences.noun)}
    dropped = _describe_dropped(_find_dropped(facts, "dropped_pairs/"))
    return {
        "preferences": f"{format_count(facts['train_pairs'], config.preferences.noun)}, "
        f"{facts['heldout_pairs']:,.0f} held out{dropped}",
        **dpo,
    }


DROPPED: Final = {
    "too_long": "too long",
    "empty": "empty",
    "ties": "ties",
    "mismatched": "completions of different prompts",
}
"""Descriptions of the reasons for which rows of data are left out."""


def _find_dropped(facts: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}


def _describe_dropped(dropped: Mapping[str, float]) -> str:
    """Describe how many rows are left out, by reason. Empty if there are none."""
    return "".join(f"; {number:,.0f} left out ({DROPPED[reason]})" for reason, number in dropped.items() if number)


def _describe_evaluations(config: RunConfig) -> str:
    every = config.evaluation.every
    return "at the start and the end" + (f", every {format_count(every, 'iteration')}" if every else "")


def _describe_samples(config: RunConfig) -> str:
    samples = config.evaluation.samples
    return f", {samples} completions per problem" if samples > 1 else ""


def _describe_waves(config: RunConfig) -> str:
    dynamic, partial = config.rollout.dynamic, config.rollout.partial
    waves = "" if dynamic is None else f", in up to {1 + dynamic.max_extra_waves} waves until enough are informative"
    if partial is None:
        return waves
    seconds = partial.iteration_seconds
    time_limit = "" if seconds is None else f", and {seconds:g} s per shard"
    return f"{waves}, at most {format_count(partial.tokens, 'new token')} of each per iteration{time_limit}"


def _describe_slots(pools: PoolsConfig) -> str:
    """Describe the number of worker slots (places for one worker each). This is a range if the cluster is elastic."""
    return f"{pools.workers.max}" if pools.workers.min is None else f"{pools.workers.min} to {pools.workers.max}"


def _describe_gpus(config: RunConfig) -> dict[str, str]:
    """Describe how many GPUs the run needs, and which of them the worker slots and the update ranks share. Return an
    empty dict if the run uses no GPUs."""
    layout, slots = gpu_layout(config), config.pools.workers.max
    number = layout.count_gpus(slots)
    if not number:
        return {}
    each = layout.max_slots_per_gpu(slots)
    slot_gpus = f"{layout.per_slot:g} for each worker slot" if each == 1 else f"one for up to {each} worker slots"
    parts = [slot_gpus] if layout.per_slot else []
    if layout.shares_gpus:
        separate = number - layout.count_slot_gpus(slots)
        shared = f"{layout.ranks - separate} of {layout.ranks}" if separate else "the"
        parts.append(f"{shared} update ranks use the same GPUs while the workers sleep")
        parts += [f"one for each of {separate} other update ranks"] if separate else []
    elif layout.per_rank:
        parts.append("one for each update rank" if layout.ranks > 1 else f"{layout.per_rank:g} for the update rank")
    return {"GPUs": f"{number}: {', '.join(parts)}"}


def _describe_sharing(config: RunConfig) -> str:
    """Describe which roles share the worker slots (places for one worker each), and how the slots are assigned at the
    start of the run."""
    if not config.scoring.hosted_rewards:
        return ", all for rollout"
    return f", {config.placement.kind}: {first_placement(config).decision.reason}"


def _describe_judge(config: RunConfig, term: str, facts: dict[str, float]) -> str:
    reward = config.scoring.model_rewards[term]
    size = f"{facts[f'{term}_parameters']:,.0f} parameters, " if f"{term}_parameters" in facts else ""
    if reward.kind != "judge":
        return f"{size}{format_count(reward.slots, 'slot')} each"
    answers = f"{format_count(reward.votes, 'vote')} by {reward.verdict.kind}"
    where = f"{format_count(reward.slots, 'slot')} each" if reward.endpoint is None else reward.endpoint.base_url
    return f"{size}{reward.model.kind}, {answers}, {where}"


def _describe_teacher(config: RunConfig, facts: dict[str, float]) -> dict[str, str]:
    if (distillation := config.algorithm.distillation) is None:
        return {}
    specialists = distillation.specialists
    size = f"{'up to ' if specialists else ''}{facts.get('teacher_parameters', 0.0):,.0f} parameters"
    place = "sharded over the update ranks" if config.update.shards_weights else "on every update rank"
    names = ["teacher", *(f"teacher of {each.column} = {', '.join(each.values)}" for each in specialists)]
    lines = dict[str, str]()
    for name, teacher in zip(names, distillation.teachers.values(), strict=True):
        directory, endpoint = teacher.local_model, teacher.endpoint
        if endpoint is not None:
            lines[name] = f"endpoint, {endpoint.base_url}"
        elif teacher.privileged is not None:
            average = "moving average of the policy, " if teacher.privileged.ema_decay else ""
            lines[name] = f"{average or 'policy '}with a privileged prompt ({', '.join(teacher.privileged.fields)})"
        else:
            assert directory is not None, "a teacher is here or elsewhere"
            lines[name] = f"{size}, {format_path(directory.path)}, {place}"
    return lines


def _format_update_memory(config: RunConfig, facts: dict[str, float]) -> str:
    update, on_gpu = config.update, config.pools.gpus_per_update_rank > 0
    libraries = library_bytes(update, facts, ranks=config.pools.update_ranks, on_gpu=on_gpu)
    parts = peak_memory_by_part(facts | libraries, "update")
    names = (*update.offloaded, "writing") if on_gpu else ()  # ranks on GPUs copy weights to machine memory
    offloaded = {name: parts.pop(name) for name in names if name in parts}
    if loading := loading_excess(parts, facts, update):
        parts["loading"] = loading
    return _format_parts(parts, offloaded)


def _format_memory(facts: dict[str, float], role: str) -> str:
    return _format_parts(peak_memory_by_part(facts, role), {})


def _format_parts(parts: Mapping[str, float], offloaded: Mapping[str, float]) -> str:
    """Describe the estimated peak memory of one worker as a sum of its parts. Parts that are offloaded to CPU memory
    are listed separately."""
    parts = {name: value / 2**20 for name, value in parts.items()}
    detail = " + ".join(f"{name} {value:,.1f}" for name, value in parts.items())
    size = f"{sum(offloaded.values()) / 2**20:,.1f} MiB of machine memory"
    addition = f", and {size} ({' + '.join(offloaded)})" if offloaded else ""
    return f"{sum(parts.values()):,.1f} MiB ({detail}{'' if 'cuda' in parts else '; libraries not counted'}){addition}"

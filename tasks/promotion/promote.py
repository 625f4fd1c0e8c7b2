"""End of a retrain: the decision is recorded in the registry, and the files of a promoted policy are copied there."""

import logging
from functools import partial

from rheostat.infra.config import Settings
from rheostat.infra.processes.watch import run_apart
from rheostat.infra.renamed import with_present_names
from rheostat.infra.store.bundles import BundleRef, publish_bundle
from rheostat.infra.store.registry import POLICIES, Kind, Registry, RegistryRecord, open_registry
from rheostat.infra.store.runs import Run, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.promotion import PromotionConfig
from rheostat.models.records.versions import policy_of
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.events import emit_record
from rheostat.tasks.promotion.draft import Draft, trained_ids_key
from rheostat.tasks.promotion.gate import GateResult
from rheostat.tasks.promotion.mirror import mirror_address, try_sync_to_mlflow
from rheostat.tasks.promotion.registry import prune, record_number, timestamp
from rheostat.tasks.promotion.suites import promotion_rules
from rheostat.tasks.run.keys import PROMPTS
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.run.stages import stage
from rheostat.tasks.run.target_sources import rheostat_version
from rheostat.tasks.views.card import CARD, model_card
from rheostat.tasks.views.policy_export import export_policy
from rheostat.tasks.views.summary import RunSummary, summary_lines

logger = logging.getLogger(__name__)


class Retrained(Settings):
    """Outcome of a finished retrain: the training run and the decision about promotion."""

    trained: RunSummary
    """Summary of the training run."""
    record: RegistryRecord | None = None
    """Registry record with the decision and all measurements, or None if no registry is configured."""

    def text(self) -> str:
        """Describe the training run, the reasons of the decision and the registry record, as lines for the terminal."""
        lines = [f"run      {self.trained.path}", summary_lines(self.trained)]
        if self.record is not None:
            lines += [f"gate     {reason}" for reason in GateResult.model_validate(self.record.gate).reasons]
            lines.append(f"record   {self.record.number}: {self.record.kind}")
        return "\n".join(lines)


def find_verdict(config: RunConfig) -> RegistryRecord | None:
    """Return the newest registry record about a retrain, or None if no decision is recorded yet."""
    registry = open_registry(config.store, promotion_rules(config).registry)
    known = [record for record in registry.records() if record.run == config.name and record.kind != "rollback"]
    return known[-1] if known else None


@stage("promotion")
async def record_verdict(config: RunConfig, draft: Draft, gate: GateResult) -> RegistryRecord | None:
    """Record in the registry whether a retrained policy becomes the champion. If it does, or if a person has to approve
    it, its files are copied to the registry first.

    Returns None if the champion changed meanwhile, because the challenger was not compared with the new champion.
    """
    rules, run = promotion_rules(config), open_run(config.store, config.name)
    registry = open_registry(config.store, rules.registry)
    kind: Kind = gate.verdict
    if kind == "promote" and rules.approve == "manual":
        kind = "proposal"
    bundle = None
    if kind in ("promote", "proposal") and record_number(registry.champion()) == gate.opponent:
        bundle = _store_files(registry, run, config, rules, gate, draft)
    policy = policy_of(policy_after(run, config.iterations))

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord | None:
        if record_number(champion) != gate.opponent:
            return None
        return RegistryRecord(
            number=number,
            kind=kind,
            policy=policy.digest,
            bundle=bundle,
            run=run.name,
            iteration=config.iterations,
            previous=gate.opponent,
            gate=gate.model_dump(mode="json"),
            reason="; ".join(gate.reasons),
            who=f"retrain {run.name}",
            when=timestamp(),
            version=rheostat_version(),
        )

    recorded_result = registry.append(record)
    if recorded_result is None:
        logger.info(
            "registry %s: the champion changed meanwhile; %s is compared with the new one", registry.name, run.name
        )
        return None
    logger.info(
        "registry %s, record %d: %s: %s",
        registry.name,
        recorded_result.number,
        recorded_result.kind,
        recorded_result.reason,
    )
    emit_record(registry.name, recorded_result)
    prune(registry, rules.keep)
    return recorded_result


async def sync_mirror(config: RunConfig) -> None:
    """Update the MLflow mirror of the registry if a mirror is configured. A failure is only logged as a warning."""
    if (address := mirror_address()) is None:
        return
    registry = open_registry(config.store, promotion_rules(config).registry)
    if (problem := await run_apart(partial(try_sync_to_mlflow, registry, address))) is not None:
        logger.warning("registry %s is not synced to MLflow yet: %s", registry.name, problem)


def _store_files(
    registry: Registry, run: Run, config: RunConfig, promotion: PromotionConfig, gate: GateResult, draft: Draft
) -> BundleRef:
    """Copy a policy with a model card to the registry, and store the ids of all problems that it and the champions
    before it were trained on."""
    prompts = read_shard(run.store, run.require(PROMPTS["train"]).shards[0])["prompt_id"].to_pylist()
    earlier = registry.store.find(draft.exclude_ids_key) if draft.exclude_ids_key else None
    problem_ids = sorted({*prompts, *(earlier or b"").decode().split()})
    registry.store.put(trained_ids_key(run.name), "".join(f"{name}\n" for name in problem_ids).encode())
    with registry.store.scratch() as scratch:
        directory = scratch / "policy"
        exported = export_policy(run, directory, iteration=config.iterations, dtype=None)
        lineage = {
            "registry": registry.name,
            "run": run.name,
            "fingerprint": run.record.fingerprint,
            "iterations": str(config.iterations),
            "policy": exported.digest,
            "previous champion": str(draft.champion or "none"),
            "problems trained on": str(len(problem_ids)),
        }
        card = model_card(
            promotion.card,
            title=registry.name,
            lineage=lineage,
            config=with_present_names(run.record.config, RunConfig),
            evaluations=gate.reasons,
        )
        (directory / CARD).write_text(card)
        return publish_bundle(registry.store, directory, prefix=POLICIES)

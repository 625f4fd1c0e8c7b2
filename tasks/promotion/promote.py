"""What becomes of a challenger: a record in the registry and, where it is promoted, its own directory there."""

import logging

from infra.config import Settings
from infra.errors import BadInput
from infra.store.bundles import BundleRef, publish_bundle
from infra.store.registry import POLICIES, Kind, Registry, RegistryRecord, open_registry
from infra.store.runs import Run, open_run
from infra.store.shards import read_shard
from models.config.promotion import PromotionConfig
from models.records.versions import policy_of
from tasks.config.run import RunConfig
from tasks.promotion.card import CARD, model_card
from tasks.promotion.draft import Draft, learnt_key
from tasks.promotion.gate import GateResult
from tasks.promotion.registry import now, number_of, prune
from tasks.reporting import RunSummary, summary_lines
from tasks.run.dependencies import rheostat_version
from tasks.run.keys import PROMPTS, StageKey
from tasks.run.stages import stage
from tasks.views.export import export_policy

logger = logging.getLogger(__name__)


class Retrained(Settings):
    """A retrain that has ended."""

    trained: RunSummary
    """Its run."""
    verdict: GateResult | None = None
    """What the gate said; none without a registry."""
    record: RegistryRecord | None = None
    """What the registry keeps of it; none without a registry."""

    def text(self) -> str:
        """What became of it, in lines."""
        lines = [f"run      {self.trained.path}", summary_lines(self.trained)]
        if self.record is not None and self.verdict is not None:
            lines += [f"gate     {reason}" for reason in self.verdict.reasons]
            lines.append(f"record   {self.record.number}: {self.record.kind}")
        return "\n".join(lines)


@stage("promotion")
async def conclude(config: RunConfig, draft: Draft, verdict: GateResult) -> RegistryRecord:
    """Record what the gate said of a challenger, and have its files in the registry first if it is promoted.

    Where it was recorded before, that record stands. Raises BadInput if another champion came meanwhile, with whom it
    was not compared.
    """
    promotion = config.promotion
    assert promotion is not None, "a gate has a registry"
    registry, run = open_registry(config.store, promotion.registry), open_run(config.store, config.name)
    known = [record for record in registry.records() if record.run == run.name and record.kind != "rollback"]
    if known:
        return known[-1]
    kind: Kind = verdict.verdict
    if kind == "promote" and promotion.approve == "manual":
        kind = "proposal"
    bundle = None
    if kind in ("promote", "proposal"):
        bundle = _keep(registry, run, config, promotion, verdict, draft)
    policy = policy_of(run.require(StageKey.policy(config.iterations)))

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord:
        if number_of(champion) != draft.champion and kind in ("promote", "proposal"):
            raise BadInput(
                f"registry {registry.name!r}: {run.name!r} was compared with record {draft.champion}, and record "
                f"{number_of(champion)} is champion now: retrain again under another name"
            )
        return RegistryRecord(
            number=number,
            kind=kind,
            policy=policy.digest,
            bundle=bundle,
            run=run.name,
            iteration=config.iterations,
            previous=draft.champion,
            gate=verdict.model_dump(mode="json"),
            reason="; ".join(verdict.reasons),
            who=f"retrain {run.name}",
            when=now(),
            version=rheostat_version(),
        )

    made = registry.append(record)
    assert made is not None
    logger.info("registry %s, record %d: %s: %s", registry.name, made.number, made.kind, made.reason)
    prune(registry, promotion.keep)
    return made


def _keep(
    registry: Registry, run: Run, config: RunConfig, promotion: PromotionConfig, verdict: GateResult, draft: Draft
) -> BundleRef:
    """Publish a policy as one directory with its card, and name what it and those before it have learnt from."""
    prompts = read_shard(run.store, run.require(PROMPTS["train"]).shards[0])["prompt_id"].to_pylist()
    before = open_registry(config.store, registry.name).store.find(_relative(draft)) if draft.without else None
    learnt = sorted({*prompts, *(before or b"").decode().split()})
    registry.store.put(learnt_key(run.name), "".join(f"{name}\n" for name in learnt).encode())
    with registry.store.scratch() as scratch:
        directory = scratch / "policy"
        exported = export_policy(run, directory, iteration=config.iterations, dtype=None)
        lineage = {
            "registry": registry.name,
            "run": run.name,
            "fingerprint": run.record.fingerprint,
            "iterations": str(config.iterations),
            "policy": exported.digest,
            "champion before": str(draft.champion or "none"),
            "problems learnt from": str(len(learnt)),
        }
        card = model_card(
            promotion.card,
            title=registry.name,
            run=run.name,
            lineage=lineage,
            config=run.record.config,
            verdict=verdict,
        )
        (directory / CARD).write_text(card)
        return publish_bundle(registry.store, directory, prefix=POLICIES)


def _relative(draft: Draft) -> str:
    return "learnt/" + draft.without.rpartition("/")[2]

"""Draft of a retrain: the name of the new run, the policy that training starts from, and the problems to leave out.

A draft is decided once, when the retrain is triggered first, and is reused if the retrain is triggered again.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Final

from rheostat.infra.config import Settings, Since
from rheostat.infra.errors import BadInput
from rheostat.infra.store.checksums import seal, unseal
from rheostat.infra.store.registry import RETRAINS, Registry, open_registry
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.models.config.file_rules import CURRENT_RULES, find_file_version, with_file_version
from rheostat.models.config.promotion import PromotionConfig
from rheostat.tasks.config.run import RunConfig, validate_again
from rheostat.tasks.views.run_list import read_run_line

logger = logging.getLogger(__name__)

TRAINED_IDS: Final = "learnt"
"""Folder of a registry that contains, for each run, a list of the problems that its policy was trained on."""


class Draft(Settings):
    """Decisions that are made once per retrain, when it is first triggered, so that a resumed retrain does the same."""

    run: str
    """Name of the run that the retrain creates."""
    champion: int
    """Number of the champion's registry record when the retrain began, or 0 if there was no champion."""
    policy: str
    """Directory of the champion's policy, from which training starts. Empty if there was no champion."""
    without: str
    """File with the ids of the prompts that the retrain leaves out. Empty if none are left out."""
    data_version: Annotated[int | None, Since("0.2.0", before=None)] = None
    """Version of the rules by which the champion's run read its files of problems (`FileRules.version`), 2 if the
    configuration of the retrain sets this version for all files, or None if the champion's run read no files or its
    record was deleted."""
    keeps_set_versions: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether files whose version is set in the configuration keep this version. False in drafts of earlier
    versions."""

    @property
    def exclude_ids_key(self) -> str:
        """Key, in the registry, of the list of prompts to leave out. Empty if no prompts are left out."""
        return f"{TRAINED_IDS}/{self.without.rpartition('/')[2]}" if self.without else ""

    def start_config(self, config: RunConfig) -> RunConfig:
        """Return the configuration of the retrain's run. It starts from the champion and skips training on data (SFT,
        DPO), which the champion has already had. If the champion's files were read by version 1 of the rules, the
        retrain reads files without a set version by version 1 too, or else training problems could become held-out
        problems."""
        if not self.policy:
            return config
        excluded = Path(self.without) if self.without else config.data.exclude_ids_path
        configured = config.data.model_copy(update={"exclude_ids_path": excluded})
        data = configured
        if self.data_version == 1 and self.keeps_set_versions:
            data = with_file_version(configured, 1, keeps_set=True)
        elif self.data_version == 1 and find_file_version(configured.model_dump(mode="json")) == CURRENT_RULES:
            data = with_file_version(configured, 1)
        if data != configured:
            logger.info("data.version = 1 for run %s, because the champion was trained by these rules", self.run)
        start = {"policy": config.policy.with_path(Path(self.policy)), "warmup": None, "dpo": None}
        return validate_again(config.model_copy(update={"data": data, **start}), source=f"retrain {self.run}")


def with_date(config: RunConfig, day: date) -> RunConfig:
    """Return the configuration with the date appended to the name of the run."""
    return config.model_copy(update={"name": RunConfig(name=f"{config.name}-{day:%Y%m%d}", data=config.data).name})


def find_unfinished(config: RunConfig, today: date) -> date | None:
    """Return the day of the newest earlier retrain if that retrain is not finished, so that the caller can continue
    it.

    Return None if the retrain of `today` was begun already, since the same command continues that one.
    """
    registry = None if config.promotion is None else open_registry(config.store, config.promotion.registry)
    drafted = [] if registry is None else [name.removesuffix(".json") for name in registry.store.children(RETRAINS)]
    days = _days_of(config.name, [*drafted, *list_runs(config.store)])
    newest = max((day for day in days if day <= today), default=today)
    name = with_date(config, newest).name
    if newest == today:
        return None
    if registry is not None and name in drafted:
        return None if any(record.run == name for record in registry.records()) else newest
    return None if read_run_line(config.store, name).status == "done" else newest


def _days_of(name: str, retrains: Iterable[str]) -> Iterator[date]:
    """Yield the date at the end of each run name in `retrains` that consists of the configured name and a date."""
    for each in retrains:
        if (match := re.fullmatch(rf"{re.escape(name)}-(\d{{8}})", each)) is not None:
            with suppress(ValueError):  # digits that are no day
                yield date.fromisoformat(match[1])


def draft_retrain(config: RunConfig) -> Draft:
    """Return the decisions for the configured retrain (run name, start policy, excluded problems). They are made
    and stored on the first call."""
    promotion = config.promotion
    if promotion is None:
        return Draft(run=config.name, champion=0, policy="", without="")
    registry = open_registry(config.store, promotion.registry)
    drafted = read_draft(registry, config.name)
    if drafted is None:
        draft = _create_draft(config, promotion, registry)
        if registry.store.put(draft_key(config.name), seal(draft.model_dump(mode="json"))):
            return draft
        drafted = read_draft(registry, config.name)
    assert drafted is not None, "another has put it first"
    return drafted


def read_draft(registry: Registry, run: str) -> Draft | None:
    """Return the decisions that a retrain made about a run (start policy, excluded problems). Return None if the
    run was not created by a retrain of this registry."""
    content = registry.store.find(draft_key(run))
    where = f"registry {registry.name!r}: {draft_key(run)}"
    return None if content is None else Draft.model_validate(unseal(content, where=where))


def _create_draft(config: RunConfig, promotion: PromotionConfig, registry: Registry) -> Draft:
    champion = registry.champion()
    if champion is None:
        return Draft(run=config.name, champion=0, policy="", without="")
    policy = registry.locate(champion)
    if promotion.problems == "new" and config.data.exclude_ids_path is not None:
        raise BadInput(
            "data.exclude_ids_path and promotion.problems = 'new' are both set, but both select problems to leave "
            "out. Remove one of them."
        )
    without = registry.store.locate(trained_ids_key(champion.run)) if promotion.problems == "new" else ""
    version = _find_data_version(config.store, registry, champion.run)
    if version == 1 and not _files_without_version(config):
        version = CURRENT_RULES
    return Draft(
        run=config.name,
        champion=champion.number,
        policy=policy,
        without=without,
        data_version=version,
        keeps_set_versions=True,
    )


def _files_without_version(config: RunConfig) -> bool:
    """Return whether version 1 of the rules applies to a file if the files without a set version are read by it."""
    return find_file_version(with_file_version(config.data, 1, keeps_set=True).model_dump(mode="json")) == 1


def describe_file_rules(config: RunConfig) -> str | None:
    """Return a sentence about the rules by which a retrain of this job would read its files, if the champion's run read
    them by version 1. Otherwise return None."""
    registry = None if config.promotion is None else open_registry(config.store, config.promotion.registry)
    champion = None if registry is None else registry.champion()
    if registry is None or champion is None or _find_data_version(config.store, registry, champion.run) != 1:
        return None
    if find_file_version(config.data.model_dump(mode="json")) != CURRENT_RULES:
        return None
    if with_file_version(config.data, 1, keeps_set=True) != config.data:
        return (
            f"The champion {champion.run} was trained with data.version = 1, so `rheostat retrain` reads files without "
            "a set version by version 1. Set data.version = 2 to use the new rules."
        )
    return (
        f"data.version = 2 is set, but the champion {champion.run} was trained with version 1, which splits files "
        "differently. Problems on which the champion was trained may be held out in a retrain. Remove data.version to "
        "keep the champion's rules."
    )


def _find_data_version(store: str, registry: Registry, run: str) -> int | None:
    """Return the version of the rules by which a run read its data files, from the record of the run or of its
    retrain.

    Return None if the run read no files, or if neither is known.
    """
    if run in list_runs(store):
        return find_file_version(open_run(store, run).record.config.get("data"))
    draft = read_draft(registry, run)
    return None if draft is None else draft.data_version


def draft_key(run: str) -> str:
    """Return the registry key under which the decisions of a retrain are stored."""
    return f"{RETRAINS}/{run}.json"


def trained_ids_key(run: str) -> str:
    """Return the registry key of the list of prompt_ids on which a promoted run, and the champions before it, were
    trained."""
    return f"{TRAINED_IDS}/{run}.txt"

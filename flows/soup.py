"""Flow for soups. Several policies (backbones) are trained from the same start policy on different mixes of rewards.
They are merged for every preference between the rewards, and the merges are evaluated."""

import logging

from prefect import flow

from rheostat.flows.evaluation import evaluate
from rheostat.flows.train import train
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.preflight import is_run_complete
from rheostat.tasks.soup.parts import (
    PreferencePoint,
    Statistics,
    backbone_runs,
    beta_of,
    evaluation_run,
    expert_runs,
    merge_points,
    oracle_points,
    oracle_runs,
    search_iterations,
    soup_settings,
    standardize,
    start_run,
    statistics_run,
)
from rheostat.tasks.soup.record import SoupRecord, choose_beta, commit_soup

logger = logging.getLogger(__name__)


@flow(name="soup", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def soup(config: RunConfig, accept_change: bool = False) -> SoupRecord:
    """Train and evaluate a policy for every preference between the rewards of a run, by merging the weights of
    separately trained policies. If the flow is started again, it continues from the results in the store.

    Every part is a separate run: the start, the backbones, and the evaluation of each merge on the same problems with
    the same seeds.

    Args:
        config: Configuration of the run, with `soup`.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    settings = soup_settings(config)
    await _train([start_run(config)], accept_change)
    await _evaluate_runs([statistics_run(config)])
    statistics = standardize(config)
    if settings.method == "oracle":
        await _train(oracle_runs(config, statistics), accept_change)
        points = await _evaluate(config, [*oracle_points(config, statistics)])
        return commit_soup(config, statistics, points, beta=1.0, candidates={})
    candidates = await _search(config, statistics, accept_change)
    beta = next(iter(candidates), beta_of(settings))
    await _train([*backbone_runs(config, statistics, beta), *expert_runs(config, statistics)], accept_change)
    points = await _evaluate(config, [*merge_points(config, statistics, beta)])
    return commit_soup(config, statistics, points, beta=beta, candidates=candidates)


async def _search(config: RunConfig, statistics: Statistics, accept_change: bool) -> dict[float, float]:
    """Find the best value of β, the weight of a policy's main reward in the mix of rewards that it trains on. For each
    value in `soup.candidates`, train the policies for a part of the iterations, merge them, and measure the rewards of
    the merges. Return the hypervolume of these rewards by β, the best first, or an empty dict if no candidates are
    configured."""
    iterations, points = search_iterations(config), dict[float, list[PreferencePoint]]()
    for beta in soup_settings(config).candidates if soup_settings(config).mixes else ():
        await _train(backbone_runs(config, statistics, beta, iterations=iterations), accept_change)
        points[beta] = await _evaluate(config, [*merge_points(config, statistics, beta, search=True)])
    return choose_beta(config, statistics, points)


async def _train(runs: list[RunConfig], accept_change: bool) -> None:
    for run in runs:
        if not is_run_complete(run):
            logger.info("run %s: training", run.name)
            await train.with_options(persist_result=False)(run, accept_change=accept_change)


async def _evaluate(config: RunConfig, points: list[PreferencePoint]) -> list[PreferencePoint]:
    await _evaluate_runs([evaluation_run(config, point) for point in points])
    return points


async def _evaluate_runs(runs: list[RunConfig]) -> None:
    for run in runs:
        if not is_run_complete(run):
            logger.info("run %s: evaluation", run.name)
            await evaluate.with_options(persist_result=False)(run)

"""Ranks, ZeRO stages, sequence parallelism, offloading and recomputation do not change the result of an update."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rheostat.infra.errors import BadInput
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.optimizers import Adam8bit, Muon
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import UpdateWork
from rheostat.models.training.layouts import StateLayout, convert_state
from tests.support.mixtures import publish_mixture, replayed_work
from tests.support.processes import preload
from tests.support.seeing import publish_seeing, seen_work
from tests.support.training import publish_scratch
from tests.support.update_workers import (
    DORA,
    LORA,
    UNCLIPPED,
    Job,
    distance,
    fetch_part,
    load_trained,
    run_on_ranks,
    start_worker,
    update_once,
    update_work,
)

preload(__name__)
pytestmark = pytest.mark.system

LAYOUT = {"zero_stage": 0, "sequence_parallel": 1, "offload": "none", "activation_checkpointing": False}
"""Settings that must give the weights that one plain rank trains."""
ONE_RANK = StateLayout(world_size=1, zero_stage=0, dtype="float32")
SLICES, AGAIN = {"sequence_parallel": 2}, {"activation_checkpointing": True}
CLIPPED = {"minibatches": 2, "max_grad_norm": 1.0}
ROUTERS = {"router_loss": 0.5, "microbatch_tokens": 60}
REPLAY = {"router_replay": "rollout", "microbatch_tokens": 60}
EIGHT = {"optimizer": Adam8bit()}
MUON = {"optimizer": Muon()}

STAGES = [{"zero_stage": stage} for stage in range(4)]
HALF = [{"dtype": "bfloat16"} | stage for stage in STAGES]
OFFLOADED = [{"zero_stage": stage, "offload": "optimizer"} for stage in (1, 2, 3)]
OFFLOADED += [{"zero_stage": 3, "offload": "parameters"}]
RECOMPUTED = [SLICES | AGAIN | STAGES[0], SLICES | AGAIN | STAGES[3]]
CONTINUED = [{"samples": "continued"} | CLIPPED | stage for stage in STAGES]
CONTINUED += [{"samples": "continued bfloat16"} | CLIPPED | stage for stage in HALF[2:]]
GROUPS = {
    "stages": (2, [*STAGES, *HALF, *OFFLOADED, CLIPPED | STAGES[2]]),
    "adapters": (2, [{"lora": LORA} | row for row in (*STAGES, *HALF)]),
    "dora": (2, [{"lora": DORA} | row for row in (*STAGES, HALF[3], SLICES | STAGES[0], SLICES | AGAIN | STAGES[3])]),
    "optimizers": (2, [MUON, EIGHT, EIGHT | STAGES[2]]),
    "slices": (
        2,
        [SLICES | row for row in (*STAGES, MUON, HALF[0], CLIPPED | {"lora": LORA} | STAGES[2])] + RECOMPUTED,
    ),
    "continued": (2, CONTINUED),
    "experts": (
        2,
        [
            *({"samples": "mixture"} | ROUTERS | slices for slices in ({}, SLICES)),
            {"samples": "replay", "router_loss": 0.5} | REPLAY,
            *({"samples": "replay"} | REPLAY | stage for stage in STAGES[2:]),
        ],
    ),
    "images": (2, [{"samples": kind} | stage for kind in ("idefics3", "qwen3_vl") for stage in STAGES]),
    "three ranks": (3, [MUON, EIGHT, EIGHT | STAGES[2], CONTINUED[3]]),
    "four ranks": (4, [SLICES | row for row in (*STAGES, MUON)]),
}
"""Changes of `UNCLIPPED` that a number of ranks train with in one group. Of two ranks, one has no images."""
RESTARTED = ("stages", "adapters", "dora", "optimizers", "slices")
SAME_BITS = [
    *(("stages", row, {"zero_stage": row["zero_stage"]}) for row in OFFLOADED),
    *(("stages", row, HALF[0]) for row in HALF[1:]),
    *(("slices", row, {key: row[key] for key in row if key not in AGAIN}) for row in RECOMPUTED),
]
"""Rows that must have exactly the bits of another row."""
TURNED = 0.01
"""Share of weights whose first step may have the other sign in bfloat16.

The first step of Adam moves each weight by the learning rate in the direction of its gradient's sign. Sums of bfloat16
in another order differ by about 1% of a typical gradient, which turns the signs of the 1% of gradients below that.
"""


def name_of(settings: dict) -> str:
    """Return a name that differs from the names of all other settings."""
    adapters = {LORA: "yes", DORA: "dora"}
    values = (getattr(value, "kind", adapters[value] if key == "lora" else value) for key, value in settings.items())
    return ", ".join(f"{key}={value}" for key, value in zip(settings, values, strict=True))


def rows_of(*groups: str) -> list:
    """Return test parameters: a group and one of its rows."""
    return [
        pytest.param(group, settings, id=f"{group}: {name_of(settings)}")
        for group in groups
        for settings in GROUPS[group][1]
    ]


def config_of(settings: dict) -> UpdateConfig:
    return UNCLIPPED.model_copy(update={key: value for key, value in settings.items() if key != "samples"})


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("parallelism"))


@pytest.fixture(scope="module")
def works(uri) -> dict[str, UpdateWork]:
    """First update by kind of samples."""
    mixture, policy = publish_mixture(uri), publish_scratch(f"{uri}/run", Path(uri, "scratch"))
    works = {"dense": update_work(uri, policy), "mixture": update_work(uri, mixture)}
    works["replay"] = replayed_work(uri, mixture)
    for kind in ("idefics3", "qwen3_vl"):
        directory = Path(uri, kind)
        works[kind] = seen_work(uri, publish_seeing(f"{uri}/run", directory, kind), directory, [0, 1])
    for name, settings in (("continued", STAGES[0]), ("continued bfloat16", HALF[2])):
        works[name] = update_work(uri, update_once(uri, policy, config_of(CLIPPED | settings)).model)
    return works


def follow_up(uri: str, outcome: Outcome) -> list[UpdateWork]:
    return [update_work(uri, outcome.model)]


@pytest.fixture(scope="module")
def run_group(uri, works) -> Callable[[str], dict[str, list[Outcome]]]:
    """Function that returns the outcomes of a group's rows, two updates of each row that is restarted."""

    @cache
    def run(group: str) -> dict[str, list[Outcome]]:
        ranks, rows = GROUPS[group]
        second = {"follow": follow_up, "poisons": True} if group in RESTARTED else {}
        jobs = {name_of(row): Job(config_of(row), [works[row.get("samples", "dense")]], **second) for row in rows}
        return run_on_ranks(uri, jobs, ranks=ranks)

    return run


@pytest.fixture(scope="module")
def restart_group(uri, run_group) -> Callable[[str], dict[str, list[Outcome]]]:
    """Function that returns the outcomes of the second update of a group's rows, by ranks in new processes."""

    @cache
    def restart(group: str) -> dict[str, list[Outcome]]:
        hot, (ranks, rows) = run_group(group), GROUPS[group]
        firsts = {name_of(row): (config_of(row), hot[name_of(row)][0]) for row in rows}
        jobs = {name: Job(config, follow_up(uri, first)) for name, (config, first) in firsts.items()}
        return run_on_ranks(uri, jobs, ranks=ranks)

    return restart


@pytest.fixture(scope="module")
def one_rank(uri, works) -> Callable[[dict], Outcome]:
    """Function that returns the outcome of a row's update on one plain rank, in one micro-batch."""
    outcomes = {}

    def update(settings: dict) -> Outcome:
        plain = {key: value for key, value in settings.items() if key not in LAYOUT}
        plain |= STAGES[2] if plain.get("samples") == "continued bfloat16" else {}  # as the update before
        if (name := name_of(plain)) not in outcomes:
            config = config_of(plain | {"microbatch_tokens": 9999})
            outcomes[name] = start_worker(uri, config).update(works[plain.get("samples", "dense")])
        return outcomes[name]

    return update


def state_of(uri: str, outcome: Outcome, layout: StateLayout, sizes: list[int]) -> dict[str, torch.Tensor]:
    """Return an optimizer state as one rank without ZeRO has it, in one vector for each kind of moment."""
    directory = fetch_part(uri, outcome, "state")
    parts = [directory / f"rank-{rank:05d}.safetensors" for rank in range(layout.world_size)]
    one = layout.model_copy(update={"world_size": 1, "zero_stage": 0})
    return dict(convert_state(parts, layout, one, rank=0, sizes=sizes, shapes=[(sum(sizes),)]))


def sizes_of(uri: str, outcome: Outcome) -> list[int]:
    """Return the sizes of the trained parameters, from the state of one plain rank."""
    state = load_file(fetch_part(uri, outcome, "state") / "rank-00000.safetensors")
    return [state[f"exp_avg.{index}"].numel() for index in range(sum(name.startswith("exp_avg.") for name in state))]


def moments_of(uri: str, outcome: Outcome) -> dict[str, torch.Tensor]:
    """Return the first moments in the state of rank 0; Muon has all of them on every rank."""
    state = load_file(fetch_part(uri, outcome, "state") / "rank-00000.safetensors")
    return {name: state[name] for name in state if name.startswith(("exp_avg.", "momentum_buffer."))}


def first_value(name: str, base: dict[str, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of an adapter's tensor before the first step: zeros for B, and norms of rows for magnitudes."""
    layer, found, _ = name.removeprefix("base_model.model.").partition(".lora_magnitude_vector")
    return base[f"{layer}.weight"].norm(dim=1) if found else torch.zeros_like(tensor)


@pytest.mark.parametrize(("group", "settings"), rows_of(*GROUPS))
def test_parallel_ranks_train_the_same_weights_as_one_rank(uri, works, one_rank, run_group, group, settings):
    found, alone = run_group(group)[name_of(settings)][0], one_rank(settings)
    optimizer, kind = settings.get("optimizer"), settings.get("samples", "dense")
    exact = settings.get("dtype") != "bfloat16"
    if exact and "minibatches" not in settings:
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
        if optimizer is None:
            layout = StateLayout(world_size=GROUPS[group][0], zero_stage=settings.get("zero_stage", 0), dtype="float32")
            sizes = sizes_of(uri, alone)
            moments = (state_of(uri, *each, sizes)["exp_avg.0"] for each in ((found, layout), (alone, ONE_RANK)))
            atol = 2e-7 if kind in ("mixture", "replay") else 1e-7  # of a tenth of the gradient
            torch.testing.assert_close(*moments, rtol=0, atol=atol)
        elif optimizer == Muon():
            torch.testing.assert_close(moments_of(uri, found), moments_of(uri, alone), rtol=0, atol=1e-7)
    before, new, expected = (load_trained(uri, model) for model in (works[kind].policy, found.model, alone.model))
    if "lora" in settings:  # the other half of an adapter is random, and has no gradient in the first step
        new, expected = ({name: each[name] for name in each if ".lora_A." not in name} for each in (new, expected))
        before = {name: first_value(name, before, expected[name]) for name in expected}
    for name in [name for name in new if name.endswith("k_proj.bias")]:  # the softmax does not depend on this bias
        del before[name], new[name], expected[name]
    share = 2 * TURNED**0.5 if not exact else 1e-3 if optimizer is None else 0.02  # a turned step is off by two steps
    assert distance(new, expected) <= share * distance(before, expected)


@pytest.mark.parametrize(("group", "settings"), rows_of(*RESTARTED))
def test_ranks_in_new_processes_continue_with_the_same_bits(works, run_group, restart_group, group, settings):
    name = name_of(settings)
    second = run_group(group)[name][1].model
    assert restart_group(group)[name][0].model == second
    if "lora" in settings:
        assert second.weights == works["dense"].policy.weights


@pytest.mark.parametrize(("group", "settings", "plain"), SAME_BITS)
def test_layouts_that_do_the_same_arithmetic_end_at_the_same_bits(run_group, group, settings, plain):
    outcomes = [run_group(group)[name_of(each)] for each in (settings, plain)]
    found, expected = ([each.model.weights for each in updates] for updates in outcomes)
    assert found == expected
    if "activation_checkpointing" in settings:
        assert [each.metrics for each in outcomes[0]] == [each.metrics for each in outcomes[1]]


@pytest.mark.parametrize(("group", "settings"), [*rows_of("continued"), ("three ranks", CONTINUED[3])])
def test_an_optimizer_state_continues_on_other_ranks_and_stages(uri, works, one_rank, run_group, group, settings):
    found, alone, dtype = run_group(group)[name_of(settings)][0], one_rank(settings), settings.get("dtype", "float32")
    work = works[settings["samples"]]
    first, sizes = Outcome(model=work.policy, metrics={}), sizes_of(uri, one_rank({}))
    one = ONE_RANK.model_copy(update={"dtype": dtype, "zero_stage": 0 if dtype == "float32" else 2})
    there = one.model_copy(update={"world_size": GROUPS[group][0], "zero_stage": settings["zero_stage"]})
    before, expected, state = (
        state_of(uri, outcome, layout, sizes) for outcome, layout in ((first, one), (alone, one), (found, there))
    )
    assert state["step.0"] == expected["step.0"] == before["step.0"] + CLIPPED["minibatches"]
    share = 1e-3 if dtype == "float32" else 0.1
    for name in expected:
        apart, moved = (torch.linalg.vector_norm(each[name] - expected[name]) for each in (state, before))
        assert apart <= share * moved
    weights = [load_trained(uri, model) for model in (found.model, alone.model, work.policy)]
    assert distance(weights[0], weights[1]) <= share * distance(weights[2], weights[1])


def test_a_state_in_bfloat16_continues_at_other_stages_of_the_same_ranks_with_the_same_bits(uri, run_group):
    moves = [(HALF[0], HALF[3]), (HALF[3], HALF[0]), (HALF[0], HALF[3] | {"offload": "parameters"})]
    for start, end in moves:
        first, second = run_group("stages")[name_of(start)][:2]
        [moved] = run_on_ranks(uri, {"moved": Job(config_of(end), follow_up(uri, first))})["moved"]
        assert moved.model.weights == second.model.weights, (start, end)


def test_an_unsharded_state_continues_on_one_rank_and_sharded_8_bit_moments_do_not(uri, run_group):
    whole, sharded = (run_group("optimizers")[name_of(row)][0].model for row in (MUON, EIGHT | STAGES[2]))
    assert update_once(uri, whole, config_of(MUON)).metrics["quarantined"] == 0
    with pytest.raises(BadInput, match=r"written by 2 ranks at .* adam8bit "):
        update_once(uri, sharded, config_of(EIGHT | STAGES[2]))

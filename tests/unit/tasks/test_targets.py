"""Classes of users, with the files in docs/extending.md: read, written, sent to workers, and refused."""

import json
import math
import pickle
import sys
import tomllib
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import register_demo
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.variants import Variant, check_implementation
from rheostat.models.algorithms.advantages import check_algorithm, token_advantages
from rheostat.models.commands.preflight import check
from rheostat.models.config.algorithms import Algorithm, Grpo
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.engines import EngineSettings, SamplingConfig
from rheostat.models.data.problems import load_problems
from rheostat.models.engines.protocol import Request, build_engine, check_implemented
from rheostat.models.inspection.directory import inspect_directory, inspect_policy
from rheostat.models.inspection.facts import Inputs
from rheostat.models.modeling.initial import iterate_texts
from rheostat.models.modeling.initial import write_policy as write_initial
from rheostat.models.objectives.policy_losses import policy_loss
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from rheostat.placement.policies.build import build_policy
from rheostat.tasks.config.run import RunConfig, override_config
from rheostat.tasks.run.dependencies import dependencies_of
from tests.support.demos import ArithmeticData
from tests.support.experiences import NAN, Drawn, experience
from tests.support.losses import doubles, pass_tokens
from tests.support.pages import EXTENDING, write_page
from tests.support.placements import plan_inputs
from tests.support.policies import VOCABULARY, write_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the page's files and some invalid ones. The modules are unloaded afterwards."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_page(EXTENDING, folder)
    (folder / "my_faults.py").write_text(FAULTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


FAULTS = """
from rheostat.models.config.algorithms import Algorithm, GroupRelative
from rheostat.models.config.data import DataSource
from rheostat.models.config.engines import EngineSettings, SamplingConfig
from rheostat.models.config.objectives import PolicyLoss
from rheostat.models.config.policy import PolicySource

class Bare(Algorithm):
    pass

class Lost(Algorithm):
    implementation = "my_faults:credti"

class Baseless(GroupRelative):
    pass

class Best(GroupRelative):
    relative = "my_faults:numbers_of"

class Greedy(Algorithm):
    implementation = "my_faults:credit"

def credit(experience, algorithm, more):
    return None

class Half(EngineSettings):
    implementation = "my_faults:HalfEngine"

class HalfEngine:
    def __init__(self, settings, *, adapter_rank): ...
    def load(self, directory, policy, *, adapter=None): ...

class Numbers(DataSource):
    implementation = "my_faults:numbers"
    broken: bool = False

def numbers(data, split, seed):
    if data.broken:
        raise OSError("no such bucket")
    return [1, 2]

class Loose(PolicyLoss):
    implementation = "my_faults:loose"

def loose(logprobs, old):
    return None

class Blind(PolicySource):
    implementation = "my_policy_model:write"

class Seedless(PolicySource):
    implementation = "my_faults:write_seedless"
    inspection = "my_policy_model:inspect"

def write_seedless(policy, directory, *, texts):
    return 1

class Textless(PolicySource):
    implementation = "my_policy_model:write"
    inspection = "my_faults:inspect_textless"

def inspect_textless(policy):
    return None

class Mute(PolicySource):
    implementation = "my_policy_model:write"
    inspection = "my_faults:inspect_nothing"

def inspect_nothing(policy, texts):
    return None

class Staged(DataSource):
    implementation = "my_data:sums"
    checks = {"polcy": "my_faults:check"}

class Unchecked(DataSource):
    implementation = "my_data:sums"
    checks = {"settings": "my_faults:check"}
    largest: int = 20

def check(data):
    return None
"""


def read(folder: Path, *overrides: str) -> RunConfig:
    return override_config(tomllib.loads((folder / "mine.toml").read_text()), overrides, source="mine.toml")


def test_a_configuration_has_objects_of_the_classes_that_it_names(folder):
    config = read(folder)
    parts = [config.algorithm, config.update.loss, config.rollout.engine, config.data, config.policy]
    assert [type(part).__name__ for part in parts] == ["Winners", "SoftClip", "Monkeys", "Sums", "SmallOlmo"]
    assert config.algorithm.overlong.buffer == 4
    assert config.update.loss.aggregation.kind == "sequence"
    assert pickle.loads(pickle.dumps(config.algorithm)) == config.algorithm, "workers receive the same object"
    given = RunConfig(data=ArithmeticData(), algorithm=config.algorithm, evaluation={"problems": 1})
    assert RunConfig.model_validate_json(given.model_dump_json()).algorithm == config.algorithm


def test_a_configuration_is_written_as_it_was_read_with_every_default(folder):
    config = read(folder)
    identity = config.identity()
    algorithm = identity["algorithm"]
    assert (algorithm["kind"], algorithm["target"]) == ("target", "my_algorithm:Winners")
    assert algorithm["options"]["exponent"] == 0.5 and algorithm["options"]["mask_truncated"] is False
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(config.model_dump()) == config
    assert RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))).identity() == identity


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.target=my_algoritm:Winners", ["algorithm", "'my_algoritm'"]),
        ("algorithm.target=my_algorithm:Winner", ["'Winner'", "'Winners'"]),
        ("algorithm.target=my_algorithm:winners", ["rheostat.models.config.algorithms:Algorithm", "<f"]),
        ("algorithm.target=my_loss:SoftClip", ["rheostat.models.config.algorithms:Algorithm", "<class"]),
        ("algorithm.target=my_faults:Bare", ["class variable 'implementation'"]),
        ("algorithm.target=my_faults:Baseless", ["class variable 'relative'"]),
        ("algorithm.options.exponnent=2", ["'exponnent'", "'exponent'"]),
        ("algorithm.options.exponent=-1", ["exponent", "greater than 0", "-1"]),
        ("algorithm.exponent=1", ["'algorithm.exponent'"]),
        ("update.loss.target=my_los:SoftClip", ["update.loss", "'my_los'"]),
        ("rollout.engine.target=my_engine:Monkey", ["rollout.engine", "'Monkey'"]),
        ("data.options.largest=many", ["data", "'my_data:Sums'", "largest", "integer"]),
        ("data.target=my_data", ["data.target", "module:function"]),
        ("policy.target=my_policy:SmallOlm", ["policy", "'SmallOlm'", "'SmallOlmo'"]),
        ("policy.target=my_data:Sums", ["rheostat.models.config.policy:PolicySource", "<class"]),
        ("policy.target=my_faults:Blind policy.options=", ["class variable 'inspection'"]),
        ("policy.options.width=18", ["policy", "'my_policy:SmallOlmo'", "width", "multiple of 4"]),
        ("rollout.group_size=1", ["1", "my_algorithm:Winners", "group"]),
        ("algorithm.options.exponent=2 update.loss.kind=gspo", ["algorithm.options.exponent 2", "'gspo'"]),
    ],
)
def test_a_class_or_option_that_does_not_fit_is_refused_when_the_configuration_is_read(folder, override, expected):
    with pytest.raises(BadInput) as refused:
        read(folder, *override.split())
    assert "\n" not in str(refused.value)
    assert [part for part in expected if part not in str(refused.value)] == []


def fault(folder: Path, part: str, name: str) -> Variant:
    return attrgetter(part)(read(folder, f"{part}.target=my_faults:{name}", f"{part}.options="))


def check_loss(loss: Variant) -> None:
    check_implementation(loss, "logprobs_N", "old_N", where="loss", named=("tokens", "config"))


def check_engine(engine: Variant) -> None:
    check_implemented(engine, name="rollout.engine")


@pytest.mark.parametrize(
    ("check", "part", "name", "expected"),
    [
        (check_algorithm, "algorithm", "Lost", ["'my_faults:Lost'", "'credti'", "'credit'"]),
        (check_algorithm, "algorithm", "Best", ["'my_faults:Best'", "'my_faults:numbers_of'"]),
        (check_algorithm, "algorithm", "Greedy", ["(experience, algorithm)", "(experience, algorithm, more)"]),
        (check_loss, "update.loss", "Loose", ["(logprobs_N, old_N, tokens=…, config=…)"]),
        (
            check_engine,
            "rollout.engine",
            "Half",
            ["producer, loaded_digest, sleep, close, step_sums, score_continuations, generate"],
        ),
    ],
)
def test_an_implementation_that_does_not_fit_is_refused_before_anything_starts(folder, check, part, name, expected):
    with pytest.raises(BadInput) as refused:
        check(fault(folder, part, name))
    assert [part for part in expected if part not in str(refused.value)] == []
    check_engine(read(folder).rollout.engine)


def test_a_data_source_returns_problems_and_its_exceptions_are_bad_input(folder):
    assert load_problems(read(folder).data, "heldout", 0)[0].prompt == "1 + 0 ="
    with pytest.raises(BadInput, match=r"'my_faults:Numbers'.*Problem.*int"):
        load_problems(fault(folder, "data", "Numbers"), "train", 0)
    broken = fault(folder, "data", "Numbers").model_copy(update={"broken": True})
    with pytest.raises(BadInput, match="OSError: no such bucket"):
        load_problems(broken, "train", 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Seedless", ["policy 'my_faults:Seedless'", "(policy, directory, texts=…, seed=…)"]),
        ("Textless", ["'my_faults:inspect_textless'", "(policy, texts)"]),
        ("Mute", ["'my_faults:inspect_nothing' must return", "inspection.directory.Inspected", "None"]),
    ],
)
def test_code_of_a_policy_that_does_not_fit_is_refused_before_anything_starts(folder, name, expected):
    with pytest.raises(BadInput) as refused:
        inspect_policy(fault(folder, "policy", name), ["1 + 1 = 2"])
    assert [part for part in expected if part not in str(refused.value)] == []


def test_the_policy_of_the_page_has_the_described_sizes_and_the_same_files_for_the_same_seed(folder, tmp_path):
    config = read(folder)
    texts = [*iterate_texts(config.data, 0)]
    described = inspect_policy(config.policy, texts)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert write_initial(config.policy, tmp_path / name, texts=texts, seed=3) == described.shape.parameters
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and "model.safetensors" in one
    found = inspect_directory(tmp_path / "one", is_trained=True)
    assert (found.shape, found.outline) == (described.shape, described.outline)
    assert described.sizes()["layers"] == 2


@pytest.mark.parametrize(("policy", "is_cached"), [("scratch", True), ("my_policy:SmallOlmo", False)])
def test_checks_of_a_policy_of_a_user_are_not_cached(folder, tmp_path, policy, is_cached):
    register_demo("dialogue/measures:MeasuresData")
    data = "data={kind='target',target='measures:MeasuresData',options={train_problems=64,heldout_problems=8}}"
    chosen = f"policy={{kind='target',target='{policy}'}}" if ":" in policy else f"policy.kind={policy}"
    sizes = ("rollout.prompts=4", "rollout.sampling.max_new_tokens=8", "evaluation.problems=4")
    config = override_config({}, [data, chosen, *sizes], source="job.toml")
    check(Inputs.model_validate_json(config.model_dump_json()), cache=tmp_path / "checks")
    assert (tmp_path / "checks").exists() == is_cached


def test_code_of_a_policy_and_of_the_shape_of_a_judge_are_dependencies_of_a_run(folder):
    shape = "{kind='target',target='my_policy:SmallOlmo'}"
    config = read(folder, f"scoring.rewards=[{{kind='judge',model={{kind='trained',shape={shape}}}}}]")
    for name in ("policy my_policy:SmallOlmo", "judge judge my_policy:SmallOlmo"):
        assert dependencies_of(config).code[name].keys() == {"my_policy", "my_policy_model"}


def test_the_algorithm_of_the_page_assigns_the_reward_above_the_mean_to_every_token(folder):
    algorithm = read(folder, "algorithm.options=").algorithm
    found = token_advantages(experience(Drawn([1, 0, 0, NAN], [2, 1, 2, 1])), algorithm)
    np.testing.assert_allclose(found.advantages_T, [2 / 3, 2 / 3, 0, 0, 0, NAN])
    rooted = read(folder).algorithm.model_copy(update={"overlong": None})
    found = token_advantages(experience(Drawn([1, 0], [1, 1])), rooted)
    np.testing.assert_allclose(found.advantages_T, [0.5**0.5, 0])


def test_the_loss_of_the_page_decreases_as_the_ratio_departs_from_1(folder):
    tokens = pass_tokens([2], behaviour=[0.0, 0.0], advantages=[3.0, 3.0])
    logprobs_N = doubles([1.0, 1.5]).log().requires_grad_()
    terms = policy_loss(logprobs_N, torch.zeros(2, dtype=torch.float64), tokens=tokens, config=read(folder).update.loss)
    terms.loss_N.sum().backward()
    assert logprobs_N.grad.tolist() == pytest.approx([-3.0, -3.0 * math.exp(-2.0 * 0.5)])


def test_the_engine_of_the_page_samples_by_seed_independently_of_the_batch(folder, tmp_path):
    write_policy(tmp_path)
    engine = build_engine(read(folder).rollout.engine)
    engine.load(tmp_path, ModelVersion(version=0, weights=BundleRef(key="policies/d1", digest="d1", bytes=0)))
    assert engine.loaded_digest() == "d1"
    sampling = SamplingConfig(max_new_tokens=8)
    prompt = ModelInput.from_prompt([5, 6])
    requests = [Request(row=row, inputs=(prompt, prompt), seeds=(3 * row, 3 * row + 1)) for row in range(4)]
    together = engine.generate(requests, sampling)
    assert together == [answers for request in requests for answers in engine.generate([request], sampling)]
    for completion in (one for answers in together for one in answers):
        assert completion.logprobs == (-math.log(VOCABULARY),) * len(completion.tokens)
    [[whole]] = engine.generate([Request(row=0, inputs=(prompt,), seeds=(3,))], sampling)
    [[cut]] = engine.generate([Request(row=0, inputs=(prompt,), seeds=(3,), budget=3)], sampling)
    [[rest]] = engine.generate([Request(row=0, inputs=(prompt.append_completion(cut.tokens),), seeds=(3,))], sampling)
    assert (cut.tokens + rest.tokens, rest.text) == (whole.tokens, whole.text)


def test_the_placement_of_the_page_follows_its_option(folder):
    plan = build_policy(read(folder).placement).plan(plan_inputs(workers=5)).plan
    assert (plan.rollout, plan.scoring) == (2, 3)


def test_built_in_classes_name_their_implementation_like_classes_of_users():
    for variant in (Algorithm, EngineSettings):
        for built_in in variant.__subclasses__():
            if built_in.__module__.startswith("rheostat.models.") and hasattr(built_in, "implementation"):
                assert built_in.implementation.startswith("rheostat.models.")
    check_algorithm(Grpo())


def test_the_former_name_of_a_label_still_works_with_a_warning():
    with pytest.warns(FutureWarning, match="known_as is deprecated .* Use label"):
        assert Grpo().known_as == "grpo"


# ---- checks that the classes bring
def check_mine(folder: Path, *overrides: str, cache: Path | None = None, parts: list[str] | None = None) -> CheckResult:
    inputs = Inputs.model_validate_json(read(folder, *overrides).model_dump_json())
    return check(inputs, cache=cache, report=(parts if parts is not None else []).append)


def test_the_check_of_a_users_class_runs_with_the_checks_of_its_base_class(folder, tmp_path):
    parts: list[str] = []
    result = check_mine(folder, "evaluation.problems=8", cache=tmp_path / "checks", parts=parts)
    assert result.facts["longest_sum_tokens"] > 0
    assert result.facts["train_problems"] > 0, "the base class counts the problems"
    assert f"The longest sum has {result.facts['longest_sum_tokens']:.0f} tokens." in result.notes
    assert parts.count("data") == 4, "once for each stage of the base class, and once for its own"
    assert not (tmp_path / "checks").exists(), "the code of the check is no part of the key of the cache"


def test_the_check_of_a_users_class_refuses_a_job(folder):
    with pytest.raises(BadInput, match=r"data: the longest sum has \d+ tokens, but options.max_tokens is 1"):
        check_mine(folder, "data.options.max_tokens=1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Staged", r"my_faults:Staged: checks has the key 'polcy', which is no stage, did you mean 'policy'\?"),
        ("Unchecked", r"data: check 'my_faults:check' is called with the arguments \(part, facts, where\)"),
    ],
)
def test_a_check_that_cannot_be_called_is_refused(folder, name, message):
    with pytest.raises(BadInput, match=message):
        check_mine(folder, f"data.target=my_faults:{name}", "data.options=")

"""Print tensors that mergekit merged, as TOML, for tests/unit/models/mergekit.toml. Runs in an environment that has
mergekit but not Rheostat:

python -m venv /tmp/mergekit && /tmp/mergekit/bin/pip install mergekit==0.1.5
/tmp/mergekit/bin/python tests/support/mergekit_values.py > tests/unit/models/mergekit.toml
"""

import random
import sys

SIZE = 15
WEIGHTS = (0.5, 0.3, -0.1)
POSITIVE = (0.5, 0.3, 0.4)

CASES = {
    "slerp_0.3": {"method": "slerp", "t": 0.3},
    "slerp_1.5": {"method": "slerp", "t": 1.5},
    "slerp_parallel": {"method": "slerp", "t": 0.4, "noise": 0.01},
    "slerp_zero": {"method": "slerp", "t": 0.4, "noise": None},
    "ties_0.2": {"method": "ties", "density": 0.2, "scale": 1.0},
    "ties_0.55": {"method": "ties", "density": 0.55, "scale": 0.7},
    "ties_1.0": {"method": "ties", "density": 1.0, "scale": 1.0},
    "dare_linear_0.4": {"method": "dare_linear", "density": 0.4},
    "dare_ties_0.4": {"method": "dare_ties", "density": 0.4},
    "dare_ties_1.0": {"method": "dare_ties", "density": 1.0},
}
"""Merge methods with their settings. `noise` is the size of the difference between the two policies, or None if the
second policy is zero."""


def draw_policies(noise: "float | None" = 0.5, policies: int = 3) -> list[list[float]]:
    """Return the values of a base model and of policies that differ from the base model."""
    numbers = random.Random(7)
    base = [numbers.gauss(0, 1) for _ in range(SIZE)]
    changed = [[value + (noise or 0) * numbers.gauss(0, 1) for value in base] for _ in range(policies)]
    return [base, *changed] if noise is not None else [base, base, [0.0] * SIZE]


def draw_uniform() -> list[list[float]]:
    """Return uniform random numbers for the masks of DARE: a value is kept if its number is below the density."""
    numbers = random.Random(8)
    return [[numbers.random() for _ in range(SIZE)] for _ in WEIGHTS]


def merge_with_mergekit(case: "dict[str, object]") -> list[float]:
    """Merge one tensor with mergekit. As in the paper of DARE, differences are divided by the density, which needs
    `rescale = false` and divided weights, because mergekit's `rescale` divides by the kept share of the L1 norm."""
    import torch
    from mergekit.merge_methods.base import TensorGroup
    from mergekit.merge_methods.registry import get
    from mergekit.merge_methods.slerp import slerp

    base, *policies = (torch.tensor(values) for values in draw_policies(case.get("noise", 0.5)))
    if case["method"] == "slerp":
        return slerp(torch.tensor([case["t"]]), policies[0][None], policies[1][None])[0].tolist()
    masks = iter(draw_uniform())
    torch.bernoulli = lambda chances: (torch.tensor(next(masks)) < chances).float()
    is_ties, density = case["method"] == "ties", case["density"]
    weights = [weight if is_ties else weight / density for weight in (POSITIVE if is_ties else WEIGHTS)]
    group = TensorGroup.from_tensors([base, *policies], base_index=0)
    parameters = {
        "weight": dict(enumerate(weights, start=1)),
        "density": dict.fromkeys(range(1, 4), density),
        "int8_mask": False, "normalize": is_ties, "rescale": False, "lambda": case.get("scale", 1.0),
    }  # fmt: skip
    return get(case["method"]).merge_group(group, **parameters).tolist()


if __name__ == "__main__":
    sys.stdout.write("# Printed by mergekit 0.1.5: see tests/support/mergekit_values.py.\n")
    for name, case in CASES.items():
        sys.stdout.write(f'"{name}" = [{", ".join(f"{value:.8f}" for value in merge_with_mergekit(case))}]\n')

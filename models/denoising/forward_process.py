"""Denoisers that are trained on finished pictures of a policy, to which new noise is added.

Each row of a batch is one picture. The completion tokens are indices of denoising steps, and noise is added to the
picture at the noise level before each of these steps. Shapes: N noised pictures of a micro-batch, D latents of a
picture.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rheostat.models.denoising.steps import StepInput, StepModule
from rheostat.models.modeling.layout import MicroBatch
from rheostat.models.records.seeds import derive_seed


class PictureErrors(StepModule):
    """Denoiser that returns the error of the picture that it predicts from each noised picture (N x D).

    The noise depends only on the picture and the denoising step. Policies before and after an optimizer step, the
    reference, all ranks, all epochs and repeated updates therefore use the same noise.
    """

    _errors: tuple[Tensor, Tensor]
    """Errors of the predicted pictures in the last forward pass (N x D), and the noise levels (N)."""

    def prepare_inputs(self, batch: MicroBatch, device: torch.device) -> Any:  # noqa: ANN401 -- StepInput
        """Return a micro-batch as a `StepInput`. `states_ND` are the noised pictures, and `next_ND` are the velocities
        from the stored pictures to the noise."""
        count = len(batch.targets_N)
        if not count:
            return super().prepare_inputs(batch, device)
        pictures, noises = [], []
        rows = {*batch.rows_N.tolist()}
        states = {row: self.pictures.states(batch.inputs[row].images[-1], steps=0)[0] for row in rows}
        for row, step in zip(batch.rows_N.tolist(), batch.targets_N.tolist(), strict=True):
            digest = batch.inputs[row].images[-1]
            pictures.append(states[row])
            rng = np.random.Generator(np.random.Philox(derive_seed("forward process", digest, step)))
            noises.append(rng.standard_normal(pictures[-1].size, dtype=np.float32))
        clean_ND, noise_ND = (torch.from_numpy(np.stack(part)).to(device) for part in (pictures, noises))
        steps_N = torch.from_numpy(batch.targets_N).to(device)
        levels_N1 = self._levels(steps_N)[:, None]
        return StepInput(
            states_ND=(1 - levels_N1) * clean_ND + levels_N1 * noise_ND,
            next_ND=noise_ND - clean_ND,
            steps_N=steps_N,
            condition=self.setup.encode_prompts(batch.inputs, batch.rows_N.tolist()),
            empty_condition=self.setup.encode_empty_prompt(count, self.model),
            num_trained=count,
        )

    def forward(self, inputs: StepInput) -> Tensor:
        """Return the error of each predicted picture, t·(v − v̂) at noise level t, in float32 (N x D)."""
        predicted_ND = self.setup.predict(
            self.model, inputs.states_ND, inputs.steps_N, inputs.condition, inputs.empty_condition
        )
        levels_N = self._levels(inputs.steps_N)
        errors_ND = levels_N[:, None] * (inputs.next_ND - predicted_ND)
        self._errors = (errors_ND[: inputs.num_trained], levels_N[: inputs.num_trained])
        return self._errors[0]

    @property
    def means(self) -> Tensor:
        """Errors of the predicted pictures in the last forward pass (N x D)."""
        return self._errors[0]

    def divergence(self, means_ND: Tensor) -> Tensor:
        """Return, for each noised picture, the mean squared difference between the velocities that this denoiser
        predicted in the last forward pass and the velocities of another denoiser (N). `means_ND` are the errors of the
        pictures that the other denoiser predicts."""
        errors_ND, levels_N = self._errors
        return ((errors_ND - means_ND) / levels_N[:, None]).square().mean(1)

    def _levels(self, steps_N: Tensor) -> Tensor:
        return torch.tensor(self.setup.schedule.levels, dtype=torch.float32, device=steps_N.device)[steps_N]

"""Sums and maxima of token statistics, over passes, steps and ranks."""

import torch
from torch import Tensor


class MetricSums:
    """Collects statistics on the device; nothing is read back before the end, so no pass waits for one."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the sum of each tensor's elements; it may have none."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, values: dict[str, Tensor]) -> None:
        """Raise each maximum, which starts at 0, to the greatest of the tensor's elements."""
        for name, value in values.items():
            most = torch.nn.functional.pad(value.detach().double(), (1, 0)).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], most) if name in self._maxima else most

    def packed(self) -> tuple[Tensor, Tensor]:
        """Sums and maxima as two vectors, to be combined over ranks; every rank must have counted the same names."""
        return torch.stack(list(self._sums.values())), torch.stack(list(self._maxima.values()))

    def unpacked(self, sums: Tensor, maxima: Tensor) -> tuple[dict[str, float], dict[str, float]]:
        """Name the elements of the two vectors again."""
        return (
            dict(zip(self._sums, sums.tolist(), strict=True)),
            dict(zip(self._maxima, maxima.tolist(), strict=True)),
        )

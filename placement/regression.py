"""Lines through summed statistics, of which neither part may be negative."""

from infra.config import Settings

LEAST_VARIATION = 0.01
"""Below this squared coefficient of variation of x nothing tells base from slope."""


class LineSums(Settings):
    """Sufficient statistics of y on x, exponentially forgotten."""

    count: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def plus(self, other: "LineSums", *, decay: float = 1.0) -> "LineSums":
        """Return these sums, faded by `decay`, with others added."""
        return LineSums(
            count=decay * self.count + other.count,
            x=decay * self.x + other.x,
            xx=decay * self.xx + other.xx,
            y=decay * self.y + other.y,
            xy=decay * self.xy + other.xy,
        )


def fit_line(sums: LineSums, *, prior: tuple[float, float]) -> tuple[float, float]:
    """Return (base, slope), both at least 0, with the least squared error; the prior where there is nothing to fit.

    Where x hardly varied, the mean of y is kept and parted as in the prior.
    """
    if sums.count <= 0 or sums.x <= 0:
        return prior
    variance = sums.count * sums.xx - sums.x**2
    if variance <= LEAST_VARIATION * sums.x**2:
        return _scaled(sums, prior)
    slope = (sums.count * sums.xy - sums.x * sums.y) / variance
    base = (sums.y - slope * sums.x) / sums.count
    if slope < 0:
        return max(sums.y / sums.count, 0.0), 0.0
    if base < 0:
        return 0.0, max(sums.xy / sums.xx, 0.0)
    return base, slope


def _scaled(sums: LineSums, prior: tuple[float, float]) -> tuple[float, float]:
    mean = max(sums.y / sums.count, 0.0)
    expected = prior[0] + prior[1] * sums.x / sums.count
    if expected <= 0:
        return mean, 0.0
    return prior[0] * mean / expected, prior[1] * mean / expected

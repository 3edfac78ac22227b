"""LossScale: what the loss is multiplied with before gradients are taken, so that small ones survive in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh_tensor.base.errors import refuse, shown

_FIRST, _LARGEST, _INTERVAL = 2.0**16, 2.0**24, 2000  # torch.amp.GradScaler's first scale and interval


@dataclass(frozen=True)
class LossScale:
    """A scale; a dynamic one is halved by a step whose gradients overflow, which is left out, and doubled after every
    `interval` steps that do not.

    good   steps without an overflow since it was changed

    >>> LossScale.make("dynamic").after_overflow().value
    32768.0
    """

    value: float
    dynamic: bool = False
    good: int = 0
    interval: int = _INTERVAL

    @staticmethod
    def make(given: object) -> LossScale | None:
        """What `loss_scale=` says: None, a number above 0, or "dynamic"."""
        if given is None:
            return None
        if given == "dynamic":
            return LossScale(_FIRST, dynamic=True)
        if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < float("inf"):
            return LossScale(float(given))
        return refuse(f"loss_scale={shown(given)}", fix='use "dynamic", a number above 0, or None')

    @property
    def can_fall(self) -> bool:
        """Whether a smaller one is to be tried."""
        return self.dynamic and self.value > 1.0

    def after_overflow(self) -> LossScale:
        """The scale of the next step, after one that was left out."""
        return replace(self, value=max(1.0, self.value / 2), good=0)

    def after_step(self) -> LossScale:
        """The scale of the next step, after one that was taken."""
        if not self.dynamic:
            return self
        if self.good + 1 < self.interval:
            return replace(self, good=self.good + 1)
        return replace(self, value=min(_LARGEST, self.value * 2), good=0)

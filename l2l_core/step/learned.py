"""What metered steps have learned, for later ones like them; see `meter.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from l2l_core.step.traffic import Metered

Layers = frozenset[tuple[str, tuple[bool, ...]]]  # key, and of every parameter whether it is trained


class Known:
    """Of one kind of step: it serves steps of the same shape with the same layers."""

    def __init__(self) -> None:
        self.shape: Any = None
        self.layers: Layers = frozenset()
        self._metered: Metered | None = None

    def find(self, shape: Any, layers: Layers) -> Metered | None:
        """What to replay in a step; None if it must be metered."""
        return self._metered if (shape, layers) == (self.shape, self.layers) else None

    def learn(self, shape: Any, layers: Layers, metered: Metered) -> None:
        """A step is over that was metered, or went as it was foretold."""
        self.shape, self.layers, self._metered = shape, layers, metered

    def snapshot(self) -> Callable[[], None]:
        """Keep what is known; the result forgets what was learned since."""
        shape, layers, metered = self.shape, self.layers, self._metered

        def put_back() -> None:
            self.shape, self.layers, self._metered = shape, layers, metered

        return put_back

    def any_of(self, shape: Any, layers: Layers) -> Metered | None:
        """What there is about all of these layers, and maybe about more."""
        return self._metered if shape == self.shape and layers <= self.layers else None


class KnownInPart(Known):
    """Of steps that leave some layers out, others every time: it is enough that each layer was in a step that was metered.

    Where layers are missing, events are not in the order of the metered step: the meter books the most that an event of
    their kind had.
    """

    def __init__(self, whole: Known) -> None:
        super().__init__()
        self._whole = whole

    def find(self, shape: Any, layers: Layers) -> Metered | None:
        return self._whole.any_of(shape, layers) or self.any_of(shape, layers)

    def learn(self, shape: Any, layers: Layers, metered: Metered) -> None:
        if self.find(shape, layers) is not None:
            return
        if shape == self.shape and self._metered is not None:
            layers, metered = layers | self.layers, metered.joined(self._metered)
        super().learn(shape, layers, metered)

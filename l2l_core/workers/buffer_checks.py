"""Checks that no forward changes a buffer: several workers would train it on different rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from l2l_core._torch import NormBase
from l2l_core.eps.blocks import Unit

_REMEDY = (
    "Use layers without such state (GroupNorm or LayerNorm instead of BatchNorm), or put that part into evaluation mode before "
    'the relay is made and each time after model.train(). Or give each worker separate buffers: Workers(buffers="own")'
)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse layers with running statistics in training mode.

    Raises:
        ValueError: names the first such layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, NormBase) and module.track_running_stats and module.training:
            raise ValueError(_buffer_changed_message(f"{name} ({type(module).__name__})"))


class BufferCheck:
    """Comparison of all buffers with their values at the time of construction.

    Args:
        units: the shell and the layers.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._values = [unit.buffers.copy() for unit in units]

    def __call__(self) -> None:
        """Compare all buffers.

        Raises:
            ValueError: a buffer has changed; names its layer.
        """
        for unit, values in zip(self._units, self._values, strict=True):
            if not unit.buffers.equal(values):
                raise ValueError(_buffer_changed_message(unit.name))


def _buffer_changed_message(where: str) -> str:
    return (
        f"the forward of {where} changes a buffer in every micro-batch; with several workers its values would depend on the rows "
        f"of each worker. {_REMEDY}"
    )

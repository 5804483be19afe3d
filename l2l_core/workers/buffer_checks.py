"""What several workers would train otherwise than one: refused, with the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from l2l_core._torch import NormBase
from l2l_core.eps.blocks import Unit

_REMEDY = (
    "Use layers without such state (GroupNorm or LayerNorm instead of BatchNorm), or put that part into evaluation mode before "
    'the relay is made and each time after model.train(). Or let each worker have its own: Workers(buffers="own")'
)


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse layers whose running statistics each worker would have of its own rows alone.

    Raises:
        ValueError: names one.
    """
    for name, module in model.named_modules():
        if isinstance(module, NormBase) and module.track_running_stats and module.training:
            raise ValueError(_buffer_changed_message(f"{name} ({type(module).__name__})"))


class BufferCheck:
    """Checks that no forward has changed a buffer since this was made.

    Args:
        units: the shell and the layers.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._values = [unit.buffers.copy() for unit in units]

    def __call__(self) -> None:
        """Look at all of them.

        Raises:
            ValueError: a buffer has other values; names its layer. Nothing has been updated in this step.
        """
        for unit, values in zip(self._units, self._values, strict=True):
            if not unit.buffers.equal(values):
                raise ValueError(_buffer_changed_message(unit.name))


def _buffer_changed_message(where: str) -> str:
    return (
        f"the forward of {where} changes a buffer from micro-batch to micro-batch, in the order of one worker's: several workers "
        f"would each have values of their own rows. {_REMEDY}"
    )

"""Comparison of a saved session with the relay and the scheduler that are to resume it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from l2l_core import Relay
from l2l_core.saves import describe_differences
from workbench.session.lr_scheduler import LRSchedulerAdapter
from workbench.session.save_folder import SavedSession

_ADVICE = "or start afresh, which keeps the save"


class ResumeCheck:
    """Decides whether a save can be resumed, before anything of it but its summary is read.

    Args:
        relay, scheduler: the session's.

    Attributes:
        shapes: shape and type of each weight and buffer before any edit, by name; empty if they are not known.
    """

    def __init__(self, relay: Relay, scheduler: LRSchedulerAdapter) -> None:
        self._relay, self._scheduler = relay, scheduler
        self.shapes: Mapping[str, str] = {} if relay.journal else _shapes_of(relay)

    def summary(self) -> dict[str, Any]:
        """Return the part of a save's summary that is compared."""
        return {"journal": len(self._relay.journal), "shapes": self.shapes, "scheduler": self._scheduler.name}

    def is_in_state_of(self, save: SavedSession) -> bool:
        """Return True if the relay has made just the steps and edits of the save."""
        relay = self._relay
        made = relay.steps, relay.branch, len(relay.journal)
        return relay.steps > 0 and made == (save.step, save.branch, save.summary["journal"])

    def checked(self, save: SavedSession) -> SavedSession:
        """Return the save with the reason why it cannot be resumed here, if there is one."""
        return save if save.why_not else replace(save, why_not=self._why_not(save))

    def _why_not(self, save: SavedSession) -> str:
        relay, scheduler = self._relay, save.summary["scheduler"]
        if not self.is_in_state_of(save) and (relay.steps or relay.journal or len(relay.branches) > 1):
            return (
                f"{save.path} is of step {save.step} of {save.branch}, and this relay has made {relay.steps} steps and "
                f"{len(relay.journal)} edits on {relay.branch}: make the model and the relay again to resume, {_ADVICE}"
            )
        shapes = save.summary["shapes"]
        if shapes and self.shapes and (unlike := describe_differences("save", shapes, self.shapes)):
            return f"{save.path} is of another model ({unlike}): make the model as it was then, {_ADVICE}"
        if scheduler != self._scheduler.name:
            return (
                f"{save.path} was saved with the learning rate scheduler {scheduler}, and this workbench has "
                f"{self._scheduler.name}: give scheduler= as it was then, {_ADVICE}"
            )
        return ""


def _shapes_of(relay: Relay) -> dict[str, str]:
    named = [*relay.model.named_parameters(), *relay.model.named_buffers()]
    return {name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in named}

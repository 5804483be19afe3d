"""Refusals of edits after which layers would get what the model keeps for the position of others.

The rows run before the edits and with them. Refused are edits with which the model fails, leaves out a layer, gives a layer other
arguments than before, uses the outputs of other layers, or has another result although they are to keep its function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from l2l_core.edits import Drop, Edit, Editor, InverseEdit
from l2l_core.eps.blocks import Unit
from l2l_core.layer_evidence import LayerEvidence
from l2l_core.surgery import results_are_close

logger = logging.getLogger("l2l_core")

Block = Callable[[], AbstractContextManager[object]]
Change = Literal["deeper", "shallower", "same function"]


class _EditedModelError(ValueError):
    """The model failed with edits that were tried."""


class EditCheck:
    """Check of the edits of one relay.

    Args:
        editor: has the stacks, and the things that depend on positions.
        evidence: runs the rows.
    """

    def __init__(self, editor: Editor, evidence: LayerEvidence) -> None:
        self._editor, self._evidence = editor, evidence
        # First names of stacks that ran with another depth, and how it differed
        self._tried = set[tuple[str, Change]]()

    def check(self, edits: Sequence[Edit], rows: Any, observing: Block, trying: Block) -> None:
        """Raise ValueError for edits that must not be made; a warning is logged where the rows themselves fail.

        Args:
            edits: edits that move layers.
            rows: rows of a batch.
            observing: a block in which rows may run, and that restores all state.
            trying: the same with the edits made.
        """
        positions = self._editor.positions
        positions.failure = None
        try:
            with observing():
                self._evidence.observe(rows)
        except Exception as error:
            # Of the batch and not of the edit, which is refused if something may be read by position
            self._note_failed_rows(error)
            return
        changes_depth = any(getattr(edit, "changes_depth", True) for edit in edits)
        # Not of an inverse, which removes what may have been trained since
        preserves = all(
            getattr(edit, "preserves_function", False) and not isinstance(edit, InverseEdit) for edit in edits
        )
        how: Change = "shallower" if all(isinstance(edit, Drop) for edit in edits) else "deeper"
        is_alike = all(code.has_equal_arguments for code in positions.code_between.values()) and not positions.some_used
        if is_alike and (not changes_depth or self._has_run("same function" if preserves else how)):
            return
        try:
            with trying():
                after, idle = self._run_edited(rows)
        except _EditedModelError:
            if self._run_unedited(rows, observing) is None:
                return
            raise
        if not idle and not preserves:
            return
        unedited = self._run_unedited(rows, observing)
        if unedited is None:
            return
        before, ran = unedited
        self._check_idle(idle, ran)
        if preserves:
            with observing():
                self._check_function(rows, before, after)

    def _has_run(self, how: Change) -> bool:
        """Return whether plain stacks ran with such a change of depth; what ran deeper has not its number written out."""
        registry = self._editor.registry
        return self._evidence.is_plain and all(
            (registry.first_name(each), how) in self._tried for each in registry.stacks
        )

    def _run_unedited(self, rows: Any, observing: Block) -> tuple[Any, set[Unit]] | None:
        """Return the result without the edits, and the layers that ran; None if nothing can be compared, since it fails."""
        try:
            with observing():
                return self._evidence.run(rows)
        except Exception as error:
            self._note_failed_rows(error)
            return None

    def _run_edited(self, rows: Any) -> tuple[Any, list[str]]:
        """Run the model with edits that are tried; return its result, and the names of layers that did not run.

        Raises:
            _EditedModelError: the model fails.
            ValueError: a layer is given other arguments than when observed, or others are used at the end.
        """
        positions, registry, evidence = self._editor.positions, self._editor.registry, self._evidence
        names = {unit.module: unit.name for unit in registry.layers}
        unlike = not all(code.has_equal_arguments for code in positions.code_between.values())
        used = dict[str, list[nn.Module]]()
        try:
            now, (after, ran) = evidence.code_between() if unlike else {}, evidence.run(rows)
            if positions.some_used:
                used = evidence.used_layers(rows)
        except MemoryError:
            raise
        except Exception as error:
            raise _EditedModelError(
                f"with these edits the model's own code fails on rows of a batch ({type(error).__name__}: {error}). It may need "
                "something for every position: make that a member of the layer (in its __init__: self.scale = "
                "nn.Parameter(torch.ones(()))) and use it in the layer's forward, so that a new layer has its own. If it runs "
                "layers in pairs, change both of a pair in one apply()"
            ) from error
        positions.check_arguments(now, names)
        positions.check_used(used, {registry.first_name(stack): stack for stack in registry.stacks})
        if not ran.issuperset(registry.layers):  # unless it draws the layers that run
            ran |= evidence.run_with_other_random(rows)[1]
        for stack in registry.stacks:
            name = registry.first_name(stack)
            first = len(registry.first_structure.stacks[name])
            if len(stack) != first:
                self._tried.add((name, "deeper" if len(stack) > first else "shallower"))
        return after, [unit.name for unit in registry.layers if unit not in ran]

    def _check_idle(self, idle: Sequence[str], ran: set[Unit]) -> None:
        """Refuse edits with which the model leaves out layers, by name, if it runs all of them without the edits."""
        if idle and ran.issuperset(self._editor.registry.layers):
            self._tried.clear()
            raise ValueError(
                f"with these edits the model's forward would not run {', '.join(idle)}, and "
                "without them it runs all layers. Its code may have their number written out, as range(12): let it run all "
                "that there are, as for layer in self.layers. If it leaves layers out on purpose, force=True applies the edits"
            )

    def _check_function(self, rows: Any, before: Any, after: Any) -> None:
        """Refuse edits that are to keep the model's function, if its result was another one."""
        if not results_are_close(before, after):
            if not results_are_close(before, self._evidence.run_with_other_random(rows)[0]):
                return  # random, so that the results cannot be compared
            raise ValueError(
                "these edits would not keep the model's function, although the new layers return their hidden state: on rows of "
                f"a batch its result is {_shown(after)} in place of {_shown(before)}. Its own code, or a hook, does more with "
                "every layer than hand its output on, such as a norm, a mask or a sum of all outputs. Use init='copy' or "
                "'fresh', with which a new layer need not be the identity; where only some layers have such a hook or mask, "
                "like= another layer, which gives the new one its own"
            )
        registry = self._editor.registry
        self._tried |= {(registry.first_name(each), "same function") for each in registry.stacks}

    def _note_failed_rows(self, error: Exception) -> None:
        self._editor.positions.failure = error
        logger.warning("the rows of a batch failed, so edits are not checked for what depends on positions: %s", error)


def _shown(result: Any) -> str:
    one = isinstance(result, torch.Tensor) and result.numel() == 1
    return f"{float(result):.6g}" if one else "another tensor"

"""The plan of a step in a notebook: read, edited by hand, simulated at once, and run."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets

from l2l_core import Relay, StepPlan, StepResult
from l2l_core.batches import Batch
from workbench.panels.controls import control_layout, make_box, make_button, make_dropdown, make_row
from workbench.panels.display import Bundle, StillDisplay
from workbench.panels.key_capture import KeyCapture
from workbench.panels.latest_executor import LatestExecutor
from workbench.panels.notebook_cells import register_in_cell
from workbench.panels.panel import failure_html
from workbench.panels.plan_editor import PlanEditor
from workbench.panels.style import style_sheet
from workbench.pictures import LANE_NAMES, Picture, Table, bundle_of, format_seconds
from workbench.plans import PlanDraft, describe
from workbench.what_if import PlannedStep, PlanSimulator, actions_of, common_axis, draw_plans, plans_table, spans_of

OWN, SERIAL = "relay's own plan", "serial relay"
_KEYS = (
    "Click or arrow keys: select. Drag or Shift + arrow keys: move. Enter: edit. +: add. Delete: remove. "
    "Ctrl + Z: undo."
)
_NOT_COMPARED = {
    "first": "not compared with training in core, since a step of this kind was compared before",
    "never": "not compared with training in core, since verify='never'",
}


class PlanView:
    """The plan of a step as text beside its simulated lanes; every change is checked and simulated at once.

    ``PlanView(relay, batch)`` as the last expression of a cell displays it. Nothing is trained before Apply, which runs one
    step on the batch by the plan and shows its measured figures beside the simulated ones.

    Args:
        relay: an open relay with one worker.
        batch: as for `Relay.step`.

    Attributes:
        result: result of the last step by Apply; None before.

    Raises:
        TypeError: `relay` is no relay.
        ValueError: steps of this relay have no plan, or cannot be simulated; the message has a remedy.

    Example:
        >>> from workbench import PlanView
        >>> view = PlanView(relay, batch)  # at the end of a cell, `view` shows it
        >>> view.wait_until_idle()
        True
        >>> view.apply()
        >>> view.wait_until_idle(), relay.steps
        (True, 1)
        >>> view.close()
    """

    def __init__(self, relay: Relay, batch: Batch) -> None:
        if not isinstance(relay, Relay):
            raise TypeError(f"PlanView takes a Relay, not a {type(relay).__name__}: PlanView(relay, batch)")
        if relay.workers > 1:
            raise ValueError(f"the relay has {relay.workers} workers, whose steps take no plan: use one worker")
        self._relay, self._batch = relay, batch
        relay.plan(batch)  # refuses a relay whose steps have no plan, with the reason
        self._simulator = PlanSimulator.of(relay, batch)  # finds the order of layers, too
        alone = replace(relay.config, ahead=0, schedule="breadth_first")
        self._presets = {OWN: relay.plan(batch), SERIAL: relay.plan(batch, alone)}
        self._draft = PlanDraft(self._presets[OWN])
        self._own = self._step = self._simulate_own()
        self._measured: PlannedStep | None = None
        self._axis_s = 0.0
        self.result: StepResult | None = None
        self._drawing = threading.RLock()  # of the widgets, which the thread of the simulation sets too
        self._executor = LatestExecutor("plan")
        self._build()
        self._display = StillDisplay(self.widget, self.still)
        self._draw_step(self._own)
        self._draw_plan()
        register_in_cell(self)

    def _simulate_own(self) -> PlannedStep:
        try:
            return self._simulator.run(self._draft.plan)
        except ValueError as error:
            reason = str(error).partition(". ")[0]
            raise ValueError(
                f"the steps of this model cannot be simulated by a plan: {reason}. Read the plan with print(relay.plan(batch)), "
                "and the actions that ran with print(relay.step(batch).plan)"
            ) from error

    @property
    def plan(self) -> StepPlan:
        """The plan as edited, for `Relay.step`; it may break rules. Setting it is a change like any other."""
        return self._draft.plan

    @plan.setter
    def plan(self, plan: StepPlan) -> None:
        self._change(lambda: self._draft.set_plan(plan))

    def wait_until_idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until the plan is simulated; return False after `timeout_s` seconds."""
        return self._executor.wait(timeout_s)

    def close(self, wait: bool = True) -> None:
        """Remove the widget from the page and leave the still in the notebook. Does nothing the second time."""
        self._display.close()

    # -- controls ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._editor = PlanEditor(self._on_message, self._on_select)
        self._apply = self._button("Apply", "check", "Train one step on the batch by this plan", self.apply)
        self._apply.button_style = "primary"
        change = self._change
        self._undo = self._button(
            "Undo", "undo", "Take back the last change of the plan", lambda: change(self._draft.undo)
        )
        self._redo = self._button("Redo", "repeat", "Make the change again", lambda: change(self._draft.redo))
        self._preset = make_dropdown("begin with", self._presets, "220px")
        self._preset.observe(lambda _: self._reset(), "value")
        reset = self._button("Reset", "refresh", "Restore the plan that is chosen here", self._reset)
        self._words = [
            self._button(
                "Edit", "pencil", "Edit the word of the selected action", lambda: self._editor.open_input(False)
            ),
            self._button("Add", "plus", "Add an action after the selected one", lambda: self._editor.open_input(True)),
            self._button("Remove", "trash", "Remove the selected action", lambda: change(self._draft.remove)),
        ]
        self._note = ipywidgets.HTML()
        buttons = make_row(self._apply, self._undo, self._redo, *self._words, self._preset, reset)
        keys = ipywidgets.HTML(f'<div class="l2l-caption">{escape(_KEYS)}</div>')
        parts = (style_sheet(), buttons, self._note, self._editor, keys, self._build_text(), KeyCapture())
        self.widget = make_box(ipywidgets.VBox, "l2l-workbench", *parts)

    def _build_text(self) -> ipywidgets.Box:
        """Return the plan as one text, behind a button."""
        button = ipywidgets.ToggleButton(
            description="The plan as text",
            icon="caret-right",
            tooltip="Open or close the text",
            layout={"width": "auto"},
        )
        self._text = ipywidgets.Textarea(description="plan", **control_layout("auto"))
        self._text.layout.display = "none"
        self._text.observe(lambda change: self._on_text(change["new"]), "value")

        def toggle(change: Mapping[str, Any]) -> None:
            button.icon = "caret-down" if change["new"] else "caret-right"
            self._text.layout.display = "" if change["new"] else "none"

        button.observe(toggle, "value")
        box = make_box(ipywidgets.VBox, "l2l-behind", button, self._text)
        box.add_class("l2l-plan-as-text")
        return box

    def _button(self, label: str, icon: str, tooltip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = make_button(label, icon, tooltip)
        button.on_click(lambda _: action())
        return button

    def _reset(self) -> None:
        self._change(lambda: self._draft.set_plan(self._presets[self._preset.value]))

    def _on_select(self, index: int) -> None:
        with self._drawing:
            self._draft.select(index)
            self._draw_selected()

    def _on_text(self, text: str) -> None:
        if text != str(self._draft.plan):
            self._change(lambda: self._draft.set_text(text), typed=True)

    def _on_message(self, content: Mapping[str, Any]) -> None:
        """Make the change that a message of the page wishes, if it is about the plan as it is now."""
        draft, seen = self._draft, content["version"] == self._editor.version
        if seen:
            draft.select(content["selected"])
        keys: dict[str, Callable[[], bool]] = {
            "earlier": lambda: draft.shift(-1),
            "later": lambda: draft.shift(1),
            "up": lambda: draft.shift_line(-1),
            "down": lambda: draft.shift_line(1),
            "remove": draft.remove,
        }
        if "key" in content:  # keys come faster than their answers, and act on the selected action
            self._change(keys[content["key"]])
        for name, method in {"undo": draft.undo, "redo": draft.redo}.items():
            if name in content:
                self._change(method)
        for name, edit in {"drop": draft.move, "write": draft.write, "insert": draft.insert}.items():
            if name in content and seen:
                self._change(lambda edit=edit, name=name: edit(*content[name]))
        if "none" in content:
            self._editor.message = _message_html("no action is selected. Remedy: click one, or use the arrow keys")
        elif "cancel" in content:
            self._draw_message()

    def _change(self, change: Callable[[], bool], typed: bool = False) -> None:
        """Make a change, check the plan, and simulate it if it keeps the rules; show why it cannot be read."""
        with self._drawing:
            try:
                changed = change()
            except ValueError as error:
                self._editor.message = _message_html(str(error))
                return
            if changed:
                self._note.value = ""
                self._draw_plan(typed)
            else:
                self._draw_message()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _draw_plan(self, typed: bool = False) -> None:
        """Show the changed plan and the rule that it breaks, if any; `typed`: its text is shown already."""
        draft, editor, error = self._draft, self._editor, self._draft.error
        with self._drawing, editor.hold_sync():
            editor.set_lines(draft.lines)
            editor.selected = draft.selected
            editor.wrong = -1 if error is None else error.index
            editor.is_stale = error is not None
            self._draw_selected()
            self._draw_message()
            if not typed:
                self._text.value = str(draft.plan)
            self._text.rows = len(draft.lines) + 2
            self._apply.disabled = error is not None
            self._undo.disabled, self._redo.disabled = not draft.can_undo, not draft.can_redo
        if error is None:
            self._executor.submit(self._simulate)

    def _simulate(self) -> None:
        with self._drawing:
            plan, error = self._draft.plan, self._draft.error
        if error is not None:
            return
        try:
            step = self._simulator.run(plan)
        except Exception as error:
            with self._drawing:
                if plan is self._draft.plan:
                    self._editor.is_stale = True
                    self._editor.message = failure_html(
                        f"This plan cannot be simulated: {error}", traceback.format_exc()
                    )
            return
        with self._drawing:
            if plan is self._draft.plan:
                self._draw_step(step)
        self._display.update()

    def _draw_step(self, step: PlannedStep) -> None:
        """Show a simulated step beside that of the relay's own plan."""
        self._step, self._axis_s = step, common_axis(self._own, step, self._axis_s)
        with self._editor.hold_sync():
            self._editor.picture = draw_plans(self._own, step, self._axis_s)
            self._editor.spans = spans_of(step, self._axis_s)
            self._editor.figures = self._table.to_html(folded=False)
            self._editor.is_stale = False
            self._draw_selected()

    @property
    def _table(self) -> Table:
        measured = self._measured if self._measured is not None and self._measured.plan == self._step.plan else None
        return plans_table(self._own, self._step, measured)

    def _draw_message(self) -> None:
        error = self._draft.error
        self._editor.message = "" if error is None else _message_html(str(error))

    def _draw_selected(self) -> None:
        """Describe the selected action, with the times of its events if they are simulated."""
        action, step = self._draft.selected_action, self._step
        if action is None:
            self._editor.about = "No action is selected."
            return
        words = describe(action)
        text = f"<strong>{escape(words[:1].upper() + words[1:])}.</strong>"
        if step.plan is self._draft.plan:
            text += f" Simulated: {escape(_describe_times(step, self._draft.selected))}."
        self._editor.about = text

    # -- running -------------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Train one step on the batch by the plan, as the button Apply does; an error is shown."""
        self._executor.wait()  # a simulation would take time from the step
        self._apply.disabled, self._note.value = True, _caption("a step by this plan is trained ...")
        try:
            self.result = result = self._relay.step(self._batch, plan=self._draft.plan)
        except Exception as error:
            self._note.value = failure_html(str(error), traceback.format_exc())
            return
        finally:
            self._apply.disabled = self._draft.error is not None
        verified = result.verified or _NOT_COMPARED.get(str(self._relay.config.verify), "no comparison was due")
        words = f"step {result.trace.step + 1} by this plan: loss {result.loss:.4g}, {format_seconds(result.seconds)}; {verified}"
        with self._drawing:
            self._measured = PlannedStep.measured(result)
            self._draw_step(self._step)
            self._note.value = _caption(words)
        self._display.update()

    # -- on the page ---------------------------------------------------------------------------------------------------

    def still(self) -> Bundle:
        """Return the plan that was simulated last, with picture and figures, for a page without a kernel."""
        step = self._step
        bundle = bundle_of([Picture(draw_plans(self._own, step, self._axis_s), self._table)])
        text = str(step.plan)
        return {
            **bundle,
            "text/html": f'<pre>{escape(text)}</pre><div style="max-width:780px">{bundle["text/html"]}</div>',
            "text/plain": f"{text}\n\n{bundle['text/plain']}",
        }

    def _ipython_display_(self) -> None:
        self._display.open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._display.bundle()


def _describe_times(step: PlannedStep, index: int) -> str:
    """Return lanes and times of an action's events."""
    events = step.trace.events
    own = [event for event, action in zip(events, actions_of(step.plan, events), strict=True) if action == index]
    found = []
    for lane in dict.fromkeys(event.lane for event in own):
        on = [event for event in own if event.lane == lane]
        first, last = min(event.start_s for event in on), max(event.stop_s for event in on)
        found.append(f"{LANE_NAMES[lane]} from {format_seconds(first)} to {format_seconds(last)}")
    return "; ".join(found) or "no event"


def _message_html(message: str) -> str:
    rule, _, remedy = message.partition(". Remedy: ")
    then = f"<p>Remedy: {escape(remedy)}.</p>" if remedy else ""
    return f'<div class="l2l-failure" role="alert"><strong>{escape(rule)}</strong>{then}</div>'


def _caption(words: str) -> str:
    return f'<div class="l2l-caption" role="status">{escape(words)}</div>'

"""The top of a bench over a lab: the buttons of a run, the plan that the next step follows, and why some ways have none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

import ipywidgets

from workbench.panels.header_panel import HeaderPanel
from workbench.pictures import Picture, Table, header_picture
from workbench.plans import LabSession, PlanChoice
from workbench.session import Snapshot


class PlanHeaderPanel(HeaderPanel):
    """Shows the state, the buttons, and one button per way; those without a plan are grey, and the line below says why."""

    source_type = LabSession

    def _build_settings(self) -> list[ipywidgets.DOMWidget]:
        self._plan_buttons: dict[str, ipywidgets.Button] = {}
        self._button_row, self._status = ipywidgets.HBox(layout={"flex_flow": "row wrap"}), ipywidgets.HTML()
        self._button_row.add_class("l2l-plans")
        self._status.layout.width = "100%"
        self._add_plan_buttons()
        return [self._button_row, self._status]

    def _update_controls(self, snapshot: Snapshot) -> None:
        self._add_plan_buttons()
        chosen = self.session.chosen
        for name, button in self._plan_buttons.items():
            button.button_style = "info" if name == chosen.name else ""
            button.icon = "check" if name == chosen.name else ""
        self._status.value = _describe_plan(chosen, self.session.choices, snapshot.budget_bytes)

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        words = [(choice.name, choice.words(snapshot.budget_bytes)) for choice in self.session.choices]
        note = f"The next step follows {self.session.chosen.name}."
        return [Picture(header_picture(snapshot).svg, Table("Plans", ("way", "what a step needs"), words, note))]

    def _add_plan_buttons(self) -> None:
        """Make a button for every choice that has none yet."""
        for choice in [choice for choice in self.session.choices if choice.name not in self._plan_buttons]:
            self._plan_buttons[choice.name] = button = ipywidgets.Button(
                description=choice.name,
                tooltip=choice.words(self.session.snapshot().budget_bytes),
                disabled=choice.plan is None,
                layout={"width": "auto"},
            )
            button.on_click(self._guard(partial(self.session.follow, choice.name)))
        if len(self._button_row.children) != len(self._plan_buttons) + 1:
            self._button_row.children = (ipywidgets.Label("plan"), *self._plan_buttons.values())


def _describe_plan(chosen: PlanChoice, choices: Sequence[PlanChoice], budget_bytes: int | None) -> str:
    """What the next step needs, and behind a fold why some ways have no plan."""
    line = f"The next step follows <b>{escape(chosen.name)}</b>: {escape(chosen.describe(budget_bytes))}."
    without = [choice for choice in choices if choice.plan is None]
    if not without:
        return f'<div class="l2l-caption">{line}</div>'
    names = escape(", ".join(choice.name for choice in without))
    why = "".join(f"<li>{escape(choice.reason)}</li>" for choice in without)
    return f'<div class="l2l-caption">{line}<details><summary>Why not {names}</summary><ul>{why}</ul></details></div>'

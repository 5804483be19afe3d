"""Header of a lab bench: buttons of a run, and the plan that the next step executes."""

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
    """State, buttons, and one button per strategy; strategies without a plan are disabled, with the reason below."""

    source_type = LabSession
    session: LabSession

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
        rows = [(choice.name, choice.describe(snapshot.budget_bytes)) for choice in self.session.choices]
        note = f"The next step follows {self.session.chosen.name}."
        table = Table("Plans", ("strategy", "memory and layer forwards of a step"), rows, note)
        return [Picture(header_picture(snapshot).svg, table)]

    def _add_plan_buttons(self) -> None:
        """Add buttons of new choices."""
        for choice in (one for one in self.session.choices if one.name not in self._plan_buttons):
            self._plan_buttons[choice.name] = button = ipywidgets.Button(
                description=choice.name,
                tooltip=choice.describe(self.session.snapshot().budget_bytes),
                disabled=choice.plan is None,
                layout={"width": "auto"},
            )
            button.on_click(self._guard(partial(self.session.follow, choice.name)))
        if len(self._button_row.children) != len(self._plan_buttons) + 1:
            self._button_row.children = (ipywidgets.Label("plan"), *self._plan_buttons.values())


def _describe_plan(chosen: PlanChoice, choices: Sequence[PlanChoice], budget_bytes: int | None) -> str:
    """Return the plan of the next step and a collapsed list of reasons why strategies have no plan, as HTML."""
    line = f"The next step follows <b>{escape(chosen.name)}</b>: {escape(chosen.describe(budget_bytes))}."
    without = [choice for choice in choices if choice.plan is None]
    if not without:
        return f'<div class="l2l-caption">{line}</div>'
    names = escape(", ".join(choice.name for choice in without))
    reasons = "".join(f"<li>{escape(choice.reason)}</li>" for choice in without)
    return (
        f'<div class="l2l-caption">{line}<details><summary>Why not {names}</summary><ul>{reasons}</ul></details></div>'
    )

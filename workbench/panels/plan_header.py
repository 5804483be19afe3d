"""The top of a bench over a lab: the buttons of a run, the plan that the next step follows, and why some ways have none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

import ipywidgets

from workbench.panels.header import HeaderPanel
from workbench.pictures import Picture, Table, header_picture
from workbench.plans import Choice, LabSession
from workbench.session import Snapshot


class PlanHeaderPanel(HeaderPanel):
    """Shows the state, the buttons, and one button per way; those without a plan are grey, and the line below says why."""

    looks_at = LabSession

    def _build_settings(self) -> list[ipywidgets.DOMWidget]:
        self._ways: dict[str, ipywidgets.Button] = {}
        self._buttons, self._line = ipywidgets.HBox(layout={"flex_flow": "row wrap"}), ipywidgets.HTML()
        self._buttons.add_class("l2l-plans")
        self._line.layout.width = "100%"
        self._offer_all()
        return [self._buttons, self._line]

    def _follow(self, now: Snapshot) -> None:
        self._offer_all()
        chosen = self.session.chosen
        for name, button in self._ways.items():
            button.button_style = "info" if name == chosen.name else ""
            button.icon = "check" if name == chosen.name else ""
        self._line.value = _said(chosen, self.session.choices, now.budget_bytes)

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        words = [(choice.name, choice.words(now.budget_bytes)) for choice in self.session.choices]
        note = f"The next step follows {self.session.chosen.name}."
        return [Picture(header_picture(now).svg, Table("Plans", ("way", "what a step needs"), words, note))]

    def _offer_all(self) -> None:
        """Make a button for every choice that has none yet."""
        for choice in [choice for choice in self.session.choices if choice.name not in self._ways]:
            self._ways[choice.name] = button = ipywidgets.Button(
                description=choice.name,
                tooltip=choice.words(self.session.snapshot().budget_bytes),
                disabled=choice.plan is None,
                layout={"width": "auto"},
            )
            button.on_click(self._guarded(partial(self.session.follow, choice.name)))
        if len(self._buttons.children) != len(self._ways) + 1:
            self._buttons.children = (ipywidgets.Label("plan"), *self._ways.values())


def _said(chosen: Choice, choices: Sequence[Choice], budget_bytes: int | None) -> str:
    """What the next step needs, and behind a fold why some ways have no plan."""
    line = f"The next step follows <b>{escape(chosen.name)}</b>: {escape(chosen.words(budget_bytes))}."
    without = [choice for choice in choices if choice.plan is None]
    if not without:
        return f'<div class="l2l-caption">{line}</div>'
    names = escape(", ".join(choice.name for choice in without))
    why = "".join(f"<li>{escape(choice.why)}</li>" for choice in without)
    return f'<div class="l2l-caption">{line}<details><summary>Why not {names}</summary><ul>{why}</ul></details></div>'

"""Selecting and editing layers in pictures, and the end of the session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from panel_reading import html_of
from patience import HANG_S
from sessions import make_batches, mse, train
from torch import nn

from l2l_core import Drop, Relay
from workbench.app import Workbench
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.selection import shared_selection
from workbench.session.session import Session


@pytest.fixture
def bench(relay: Relay) -> Iterator[Workbench]:
    made = Workbench(relay, make_batches())
    train(made.session, 1)
    yield made
    made.close()


def picker_of(bench: Workbench) -> LayerPicker:
    (picker,) = [one for one in _below(bench.widget) if isinstance(one, LayerPicker)]
    return picker


def keys(bench: Workbench) -> str:
    bench.session.wait(HANG_S)
    return " ".join(row.key for row in bench.snapshot().layers)


def send(picker: LayerPicker, **content: object) -> None:
    picker._handle_custom_msg(content, [])


def test_selection_in_the_page_is_shared(bench: Workbench) -> None:
    picker, selection = picker_of(bench), shared_selection(bench.session)
    picker.chosen = "L002"
    assert selection.key == "L002"
    selection.choose("L001")
    assert picker.chosen == "L001"
    bench.session.edit(Drop("L001"))
    assert keys(bench) == "L000 L002 L003"
    bench._show(bench.snapshot())
    assert picker.chosen == "" and selection.key is None


def test_every_picture_has_the_keys_of_its_layers(bench: Workbench) -> None:
    for view in ("relay", "time", "memory", "layers", "figures"):
        bench.views.show_view(view)
        bench._show(bench.snapshot())
        drawn = " ".join(html_of(panel) for panel in bench.views.visible_panels)
        assert set(re.findall(r'data-key="(\w+)"', drawn)) == {"L000", "L001", "L002", "L003"}, view


@pytest.mark.parametrize(
    ("content", "after"),
    [
        ({"move": ["L000", "L002"]}, "L001 L002 L000 L003"),
        ({"move": ["L003", "L001"]}, "L000 L003 L001 L002"),
        ({"insert": "L001", "behind": False}, "L000 L004 L001 L002 L003"),
        ({"insert": "L003", "behind": True}, "L000 L001 L002 L003 L004"),
        ({"insert": "L009", "behind": True}, "L000 L001 L002 L003"),
    ],
)
def test_pointer_edits_can_be_undone(bench: Workbench, content: dict[str, object], after: str) -> None:
    send(picker_of(bench), **content)
    assert keys(bench) == after
    if after != "L000 L001 L002 L003":
        bench.undo()
        assert keys(bench) == "L000 L001 L002 L003"


def test_impossible_move_is_refused(bench: Workbench) -> None:
    send(picker_of(bench), move=["L000", "L777"])
    assert keys(bench) == "L000 L001 L002 L003"
    refusal = bench.snapshot().refusal
    assert refusal is not None and "L777" in refusal.message
    train(bench.session, 1)


def test_a_layer_in_no_stack_is_refused_with_the_reason() -> None:
    class Apart(nn.Module):
        """A model with layers in no list."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = Apart()
    with (
        Relay(model, partial(torch.optim.SGD, lr=0.1), layers=[model.a, model.b], loss=mse) as relay,
        Session(relay, [(torch.randn(4, 4), torch.randn(4, 4))]) as session,
    ):
        send(LayerPicker(session), insert="L000", behind=True)
        session.wait(HANG_S)
        refusal = session.snapshot().refusal
        assert refusal is not None and "L000" in refusal.message


def test_enter_shows_the_card(bench: Workbench) -> None:
    send(picker_of(bench), open=True)
    assert bench.views.buttons.value == "layers"


def test_ended_session_ignores_edits(bench: Workbench, relay: Relay) -> None:
    picker = picker_of(bench)
    assert picker.can_edit and not picker.disabled
    with Session(relay, make_batches()):  # takes the relay over
        bench._show(bench.snapshot())
        assert picker.disabled
        send(picker, move=["L000", "L002"])
        assert [row.key for row in bench.snapshot().layers] == ["L000", "L001", "L002", "L003"]


def test_standalone_panel_has_a_layer_picker(session: Session) -> None:
    panel = LayersPanel(session)
    panel._ipython_display_()
    (picker,) = [one for one in _below(panel._display._widget) if isinstance(one, LayerPicker)]
    picker.chosen = "L003"
    assert shared_selection(session).key == "L003"
    panel.close()


def _below(widget: object) -> list[object]:
    return [widget, *(one for child in getattr(widget, "children", ()) for one in _below(child))]

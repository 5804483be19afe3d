"""Layers touched in pictures: one choice for a board, edits by pointer, and nothing of it once the session has ended."""

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


def touch_of(bench: Workbench) -> LayerPicker:
    (touch,) = [one for one in _below(bench.widget) if isinstance(one, LayerPicker)]
    return touch


def keys(bench: Workbench) -> str:
    bench.session.wait(HANG_S)
    return " ".join(row.key for row in bench.snapshot().layers)


def send(touch: LayerPicker, **content: object) -> None:
    touch._handle_custom_msg(content, [])


def test_a_choice_in_the_page_is_that_of_the_board_and_goes_with_its_layer(bench: Workbench) -> None:
    touch, selection = touch_of(bench), shared_selection(bench.session)
    touch.chosen = "L002"
    assert selection.key == "L002"
    selection.choose("L001")
    assert touch.chosen == "L001"
    bench.session.edit(Drop("L001"))
    assert keys(bench) == "L000 L002 L003"
    bench._show(bench.snapshot())
    assert touch.chosen == "" and selection.key is None


def test_every_picture_says_of_which_layer_its_parts_are(bench: Workbench) -> None:
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
def test_what_a_pointer_does_is_an_edit_that_can_be_undone(
    bench: Workbench, content: dict[str, object], after: str
) -> None:
    send(touch_of(bench), **content)
    assert keys(bench) == after
    if after != "L000 L001 L002 L003":
        bench.undo()
        assert keys(bench) == "L000 L001 L002 L003"


def test_a_move_that_cannot_be_is_refused_and_training_goes_on(bench: Workbench) -> None:
    send(touch_of(bench), move=["L000", "L777"])
    assert keys(bench) == "L000 L001 L002 L003"
    refusal = bench.snapshot().refusal
    assert refusal is not None and "L777" in refusal.message
    train(bench.session, 1)


def test_a_layer_in_no_stack_is_refused_with_the_reason() -> None:
    class Apart(nn.Module):
        """Layers that no list holds."""

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


def test_enter_turns_to_the_card(bench: Workbench) -> None:
    send(touch_of(bench), open=True)
    assert bench.views.buttons.value == "layers"


def test_an_ended_session_takes_no_edits(bench: Workbench, relay: Relay) -> None:
    touch = touch_of(bench)
    assert touch.steers and not touch.disabled
    with Session(relay, make_batches()):  # takes the relay over
        bench._show(bench.snapshot())
        assert touch.disabled
        send(touch, move=["L000", "L002"])
        assert [row.key for row in bench.snapshot().layers] == ["L000", "L001", "L002", "L003"]


def test_a_panel_alone_can_be_touched(session: Session) -> None:
    panel = LayersPanel(session)
    panel._ipython_display_()
    (touch,) = [one for one in _below(panel._display._widget) if isinstance(one, LayerPicker)]
    touch.chosen = "L003"
    assert shared_selection(session).key == "L003"
    panel.close()


def _below(widget: object) -> list[object]:
    return [widget, *(one for child in getattr(widget, "children", ()) for one in _below(child))]

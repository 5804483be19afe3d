"""Views, tour, verdict and explained terms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape

import ipywidgets
import pytest
from ipywidgets.widgets import widget as registry
from panel_reading import find, html_of
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Relay
from workbench.app import Workbench
from workbench.panels.tour import HIGHLIGHT_CLASS, TOUR_STOPS
from workbench.panels.verdict_panel import WINDOW, BoundsPanel, MeanCost, VerdictPanel
from workbench.pictures.glossary import GLOSSARY, glossary_table, term_html
from workbench.pictures.step_verdict import Cost, costs_of, largest_cost, plain_text, verdict_of
from workbench.session.session import Session


def visible(bench: Workbench) -> list[str]:
    return [name for name in bench.views.names if bench.views.boxes[name].layout.display != "none"]


def test_only_the_visible_view_is_drawn(relay: Relay) -> None:
    with_table = Workbench(relay, make_batches(), view="layers")
    assert visible(with_table) == ["layers"]
    train(with_table.session, 1)
    with_table._show(with_table.snapshot())
    drawn = {type(panel): html_of(panel) for panel in with_table.panels}
    table, heat = (
        next(text for kind, text in drawn.items() if kind.__name__ == name) for name in ("LayersPanel", "HeatPanel")
    )
    assert "L000" in table and "L000" not in heat
    with_table.views.show_view("figures")
    assert visible(with_table) == ["figures"]
    heat = next(html_of(panel) for panel in with_table.panels if type(panel).__name__ == "HeatPanel")
    assert "L000" in heat, "a selected view is drawn at once"
    with_table.close()


def test_views_can_be_stacked(relay: Relay) -> None:
    bench = Workbench(relay, make_batches(), view=["memory", "relay"])
    assert set(visible(bench)) == {"memory", "relay"} and bench.views.are_stacked
    kinds = [type(panel).__name__ for panel in bench.panels]
    assert kinds == ["HeaderPanel", "VerdictPanel", "MemoryPanel", "ExportPanel", "RelayPanel"], "in the given order"
    with pytest.raises(ValueError, match="view='time': there is no view 'time'; there are 'memory', 'relay'"):
        bench.views.show_view("time")
    bench.close()


@pytest.mark.parametrize("view", ["time", ["memory", "relay"]])
def test_a_closed_workbench_leaves_no_widgets(relay: Relay, view: str | Sequence[str]) -> None:
    def alive() -> set[str]:
        return set(registry._instances)

    before = alive()
    bench = Workbench(relay, make_batches(), view=view)
    bench._ipython_display_()
    made = alive() - before
    bench.close()
    left = {type(registry._instances[key]).__name__ for key in alive() - before}
    assert len(made) > 50 and not left


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("tiem", "view='tiem': there is no view 'tiem'; there are 'relay', 'time', "),
        (["relay", "tiem"], "there is no view 'tiem'"),
        ([], "shows nothing: give one or several of 'relay'"),
    ],
)
def test_unknown_view_is_refused_before_the_session_starts(
    relay: Relay, view: str | Sequence[str], message: str
) -> None:
    with Session(relay, make_batches()) as session:
        with pytest.raises(ValueError, match=message):
            Workbench(relay, make_batches(), view=view)
        train(session, 1)
        assert session.snapshot().step == 1, "the relay was not taken over"


def test_every_view_is_in_the_still(relay: Relay) -> None:
    bench = Workbench(relay, make_batches(), view="memory")
    train(bench.session, 1)
    text = bench._repr_mimebundle_()["text/plain"]
    assert all(words in text for words in ("Timeline", "Memory at its peaks", "Loss", "lasts"))
    bench.close()


def test_tour_highlights_its_stops_and_can_be_left(relay: Relay) -> None:
    bench = Workbench(relay, make_batches())

    def press(words: str) -> None:
        button = next(one for one in everything(bench.widget) if getattr(one, "description", "") == words)
        button.click()

    def pointed() -> int:
        return sum(
            HIGHLIGHT_CLASS in one._dom_classes for one in everything(bench.widget) if hasattr(one, "_dom_classes")
        )

    press("Tour")
    for stop in TOUR_STOPS:
        assert pointed() == 1
        if stop.view:
            assert visible(bench) == [stop.view] and HIGHLIGHT_CLASS in bench.views.boxes[stop.view]._dom_classes
        press("Done" if stop is TOUR_STOPS[-1] else "Next")
    assert pointed() == 0
    press("Tour")
    press("Next")
    press("Leave")
    assert pointed() == 0 and visible(bench) == ["relay"]
    bench.close()


def everything(widget: ipywidgets.Widget) -> list[ipywidgets.Widget]:
    return [widget, *(below for child in getattr(widget, "children", ()) for below in everything(child))]


# The verdict ----------------------------------------------------------------------------------------------------------


def test_verdict_is_that_of_the_trace(session: Session) -> None:
    panel = VerdictPanel(session)
    panel.show(session.snapshot())
    assert "press Run" in html_of(panel)
    train(session, 1)
    now = session.snapshot()
    panel.show(now)
    last = now.last
    assert last is not None
    assert f"{100 * last.overlap():.0f} % of copies" in html_of(panel) and "step 1" in html_of(panel)
    why = BoundsPanel(session)
    why.show(now)
    find(why, "Why: the bound of each phase").value = True
    text = unescape(html_of(why))
    assert all(bound.phase in text and bound.advice in text for bound in last.bound_by())


@pytest.mark.parametrize("budget", [None, 10_000_000])
def test_verdict_shows_the_spare_memory(session: Session, budget: int | None) -> None:
    train(session, 1)
    last = session.snapshot().last
    assert last is not None
    cost = largest_cost(costs_of(last, last.bound_by()))
    words = plain_text(verdict_of(last, cost, budget, 10**9))
    peak = last.peak_bytes("device")
    assert ("to spare" in words) == (budget is not None) and "(1 GB in core)" in words
    assert "in core" not in plain_text(verdict_of(last, cost, budget, peak)), "not if it equals the peak of the relay"


def test_a_slow_link_is_named() -> None:
    with make_relay() as slow, Session(slow, make_batches()) as session:
        session.reconfigure(h2d_bytes_per_s=2e4, d2h_bytes_per_s=2e4)
        session.step()
        last = session.wait(HANG_S).last
        assert last is not None
        words = plain_text(verdict_of(last, largest_cost(costs_of(last, last.bound_by())), None, None))
        assert re.search(r"waiting for copies to the (device|host) costs \d+ % of the step; .* would help$", words), (
            words
        )


def cost(lane: str, share: float) -> list[Cost]:
    return [Cost(lane, share, {}), Cost("idle", 0.2, {})]


def test_verdict_stands_while_single_steps_vary(session: Session) -> None:
    train(session, 1)
    step, means = session.snapshot().shown, MeanCost()
    assert step is not None
    shares = [0.5, 0.1] * 10  # in every other step, Python costs more than the copies
    named = [means.add(step, cost("h2d", share)) for share in shares]
    assert {one.lane for one in named} == {"h2d"} and named[-1].share == pytest.approx(0.3)
    slower = [means.add(step, cost("h2d", 0.0)).lane for _ in range(WINDOW)]
    assert slower[0] == "h2d" and slower[-1] == "idle", "a change that lasts is named within ten steps"
    assert sum(a != b for a, b in zip(slower, slower[1:], strict=False)) == 1
    steps_of_the_branch = means.add(replace(step, branch="other"), cost("h2d", 0.9))
    assert (steps_of_the_branch.lane, steps_of_the_branch.share) == ("h2d", 0.9), "nothing of another branch"


def test_terms_have_accessible_explanations() -> None:
    text = term_html("stash", "the <stash>")
    assert 'tabindex="0"' in text and GLOSSARY["stash"] in text and "&lt;stash&gt;" in text
    assert len(glossary_table().rows) == len(GLOSSARY)
    with pytest.raises(KeyError):
        term_html("flux")

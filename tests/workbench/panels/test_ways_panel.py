"""Ways side by side: what is chosen is shown, what cannot be shown says why, and a still keeps it."""

from dataclasses import replace
from typing import Any

import pytest
from some_ways import ROWS, recomputing

import workbench
from l2l_core.strategies import StrategyTable
from workbench.panels.layer_picker import LayerPicker
from workbench.panels.ways import Ways

ONE, OTHER = recomputing(), replace(recomputing(), name="Other", seconds=0.006)
TABLE = StrategyTable([ONE, OTHER, ROWS[3]], 100)


def shown(ways: Ways) -> str:
    return ways._plan.value


def touch_of(ways: Ways) -> LayerPicker:
    (touch,) = [one for one in ways.widget.children if isinstance(one, LayerPicker)]
    return touch


def test_the_best_way_is_shown_first_and_then_the_one_that_is_touched() -> None:
    ways = workbench.Ways(TABLE)
    touch = touch_of(ways)
    assert ways.chosen is ONE and touch.chosen == "way-0" and "Full &lt;b&gt;" in shown(ways)
    touch.chosen = "way-1"
    assert ways.chosen is OTHER and "Other" in shown(ways)
    touch.chosen = "way-2"
    assert "no plan within 1 B" in shown(ways) and "<svg" not in shown(ways)
    touch.chosen = ""
    assert ways.chosen is None and shown(ways) == ""
    ways.close(), ways.close()


def test_all_plans_are_drawn_on_the_same_axes() -> None:
    ways = Ways(TABLE)
    axes = set()
    for i in range(2):
        touch_of(ways).chosen = f"way-{i}"
        axes.add(tuple(words for words in ("0", "6 ms", "100 B", "200 B") if f">{words}<" in shown(ways)))
    assert len(axes) == 1 and len(axes.pop()) >= 3
    ways.close()


def test_the_still_has_the_chosen_way_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    ways = Ways(TABLE)
    touch_of(ways).chosen = "way-1"
    still: dict[str, Any] = ways.still()
    assert still["text/html"].count("<svg") == 2 and still["image/svg+xml"].count("Other") >= 1
    assert 'class="l2l-chosen"><th scope="row">2 Other' in still["text/html"]
    assert "Plan: Fck0 Fall1." in still["text/plain"] and "90 B" in still["text/plain"]
    assert ways._repr_mimebundle_().keys() - still.keys() == {"application/vnd.jupyter.widget-view+json"}
    ways._ipython_display_()  # no notebook: it is printed
    assert "step, simulated" in capsys.readouterr().out
    ways.close()
    assert ways._repr_mimebundle_().keys() == still.keys()


def test_something_else_than_a_table_is_refused() -> None:
    with pytest.raises(TypeError, match="lab.compare"):
        Ways([ONE])  # type: ignore[arg-type]

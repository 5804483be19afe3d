"""The comparison of strategies: selection, plan and still."""

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


def picker_of(ways: Ways) -> LayerPicker:
    (picker,) = [one for one in ways.widget.children if isinstance(one, LayerPicker)]
    return picker


def test_best_strategy_is_shown_first() -> None:
    ways = workbench.Ways(TABLE)
    picker = picker_of(ways)
    assert ways.chosen is ONE and picker.chosen == "way-0" and "Full &lt;b&gt;" in shown(ways)
    picker.chosen = "way-1"
    assert ways.chosen is OTHER and "Other" in shown(ways)
    picker.chosen = "way-2"
    assert "no plan within 1 B" in shown(ways) and "<svg" not in shown(ways)
    picker.chosen = ""
    assert ways.chosen is None and shown(ways) == ""
    ways.close(), ways.close()


def test_all_plans_are_drawn_on_the_same_axes() -> None:
    ways = Ways(TABLE)
    axes = set()
    for i in range(2):
        picker_of(ways).chosen = f"way-{i}"
        axes.add(tuple(words for words in ("0", "6 ms", "100 B", "200 B") if f">{words}<" in shown(ways)))
    assert len(axes) == 1 and len(axes.pop()) >= 3
    ways.close()


def test_still_has_the_selected_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    ways = Ways(TABLE)
    picker_of(ways).chosen = "way-1"
    still: dict[str, Any] = ways.still()
    assert still["text/html"].count("<svg") == 2 and still["image/svg+xml"].count("Other") >= 1
    assert 'class="l2l-chosen"><th scope="row">2 Other' in still["text/html"]
    assert "Plan: Fck0 Fall1." in still["text/plain"] and "90 B" in still["text/plain"]
    assert ways._repr_mimebundle_().keys() - still.keys() == {"application/vnd.jupyter.widget-view+json"}
    ways._ipython_display_()  # outside of notebooks, text is printed
    assert "step, simulated" in capsys.readouterr().out
    ways.close()
    assert ways._repr_mimebundle_().keys() == still.keys()


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="lab.compare"):
        Ways([ONE])  # type: ignore[arg-type]

"""The what-if view: forecast, sliders, suggestions, Apply, Reset and Fit."""

from __future__ import annotations

from typing import Any

import pytest
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import enter, held, make_batches, make_relay, train, wait_until

from l2l_core import Drop, EmulatedDevice, Relay, RelayConfig
from workbench.panels.display import WIDGET_VIEW_TYPE
from workbench.panels.what_if_panel import WhatIf, WhatIfPanel
from workbench.session.session import Session


@pytest.fixture
def what_if(session: Session) -> WhatIfPanel:
    """Open what-if panel after two steps."""
    panel = WhatIfPanel(session)
    train(session, 2)
    shown(panel)
    assert panel.wait_until_idle()
    return panel


def answer(panel: WhatIfPanel, values: dict[str, Any]) -> str:
    """Set controls by their labels and return the HTML of the panel."""
    for words, value in values.items():
        find(panel, words).value = value
    assert panel.wait_until_idle()
    return html_of(panel)


def test_slider_changes_the_answer_and_no_setting(what_if: WhatIfPanel) -> None:
    output = answer(what_if, {"layers": 96, "stash on": "host"})
    assert "layers 4 → 96; stash on device → host" in output and "what if, simulated" in output
    assert "settings of step 2, simulated" in output and "By formula: layers repeated or left out." in output
    now = what_if.session.snapshot()
    assert now.step == 2 and not now.queued and now.config == RelayConfig(seed=0, micro_batches=2, verify="never")


def test_forecast_of_the_next_step_is_compared_with_it(session: Session) -> None:
    panel = WhatIfPanel(session)
    shown(panel)
    assert panel.wait_until_idle() and "a guess by formula" in html_of(panel)
    train(session, 3)
    shown(panel)
    assert panel.wait_until_idle() and "next step, forecast" in html_of(panel)
    assert ", forecast " not in html_of(panel).replace("step, forecast<", ""), "a guess is not compared"
    train(session, 1)
    shown(panel)
    assert panel.wait_until_idle() and "step 4, measured: " in html_of(panel) and "(exact)" in html_of(panel)
    output = panel._forecast_error
    for micro_batches in (3, 2):  # changed and restored: this forecast is for the next step
        session.reconfigure(micro_batches=micro_batches)
        shown(panel)
        assert panel.wait_until_idle() and panel._forecast_error == output


def test_unchanged_settings_make_no_difference_and_figures_have_margins(what_if: WhatIfPanel) -> None:
    for step in (3, 4):
        output = answer(what_if, {})
        assert "as long as before (0%)" in output and "The settings of the last step." in output
        train(what_if.session, 1)
        shown(what_if)
        assert what_if.wait_until_idle() and f"settings of step {step}, simulated" in html_of(what_if)
    output = html_of(what_if)
    assert "±: mean error of the last 2 forecasts against the measured steps." in output
    assert " ± " in what_if._line.value.partition("mean error")[0], "in the forecast of the next step, too"


def test_rehearsal_forecasts_the_first_step(session: Session) -> None:
    panel = WhatIfPanel(session)
    shown(panel)
    find(panel, "Rehearse").click()
    wait_until(lambda: "simulated with the costs of a rehearsal" in panel._line.value)
    assert panel.wait_until_idle() and session.snapshot().step == 0
    assert "simulated with the costs of a rehearsal" in html_of(panel).lower().replace(panel._line.value.lower(), "")
    train(session, 1)
    shown(panel)
    assert panel.wait_until_idle() and "step 1, measured: " in html_of(panel) and "(exact)" in html_of(panel)
    assert find(panel, "Rehearse").layout.display == "none"


def test_failed_rehearsal_shows_the_reason(relay: Relay) -> None:
    with Session(relay, iter(())) as session:
        panel = WhatIfPanel(session)
        find(panel, "Rehearse").click()
        wait_until(lambda: "There is no rehearsal: there is no further batch" in html_of(panel))
        assert not find(panel, "Rehearse").disabled


def test_apply_sets_the_settings_and_explains_the_rest(what_if: WhatIfPanel) -> None:
    session = what_if.session
    output = answer(
        what_if,
        {
            "micro-batches": 3, "layers ahead": 2, "stash on": "host", "precision": "bf16", "link to device": 5e8,
            "layers": 6, "width": 2.0,
        },
    )  # fmt: skip
    assert "precision fp32 → bf16" in output
    find(what_if, "Apply").click()
    session.wait(HANG_S)
    expected = RelayConfig(seed=0, micro_batches=3, ahead=2, stash="host", precision="bf16", verify="never")
    assert session.relay.config == expected
    assert session.relay.device.figures()["h2d_bytes_per_s"] == 5e8
    assert session.relay.device.figures()["d2h_bytes_per_s"] is None
    output = html_of(what_if)
    assert "set for the next step; layers: use an edit below" in output and "width: use another model" in output
    train(session, 1)
    now = shown(what_if)
    assert what_if.wait_until_idle() and now.last is not None and now.last.settings["precision"] == "bf16"
    assert "<strong>layers 4 → 6; width × 1 → × 2</strong>" in html_of(what_if), (
        "changes that cannot be set stay in the question"
    )


def test_resident_weights_and_kept_graphs(what_if: WhatIfPanel) -> None:
    session = what_if.session
    stay, keep, ahead = (find(what_if, words) for words in ("weights that stay", "graphs kept", "layers ahead"))
    assert [value for _, value in stay.options] == [value for _, value in keep.options] == [0, 1, 2, 3, 4]
    output = answer(what_if, {"graphs kept": 4})
    assert stay.value == 2, "with the two slots of streaming, as many as graphs"
    assert "weights that stay 0 → 2; graphs kept 0 → 4" in output and "a recompute as long as forward" in output
    answer(what_if, {"weights that stay": 1})
    assert keep.value == 3
    answer(what_if, {"layers ahead": 0})
    assert (stay.value, keep.value) == (1, 2)
    answer(what_if, {"layers": 48})
    assert [value for _, value in keep.options][-2:] == [32, 48]
    answer(what_if, {"layers": 1})
    assert (stay.value, keep.value) == (1, 1) and [value for _, value in keep.options] == [0, 1]
    answer(what_if, {"layers": 4, "layers ahead": 1, "weights that stay": 2, "graphs kept": 4})
    find(what_if, "Apply").click()
    session.wait(HANG_S)
    assert (session.relay.config.resident, session.relay.config.keep) == (2, 4)
    train(session, 2)
    shown(what_if)
    assert what_if.wait_until_idle() and "The settings of the last step." in html_of(what_if)
    find(what_if, "graphs kept").value = 0
    assert what_if.wait_until_idle() and "graphs kept 4 → 0" in html_of(what_if)
    find(what_if, "Reset").click()
    assert what_if.wait_until_idle() and (stay.value, keep.value) == (2, 4)


def test_settings_beyond_the_number_of_layers_are_shown() -> None:
    with (
        make_relay(RelayConfig(seed=0, micro_batches=2, resident=1, keep=9)) as relay,
        Session(relay, make_batches()) as made,
    ):
        panel = WhatIfPanel(made)
        train(made, 2)
        shown(panel)
        assert panel.wait_until_idle() and find(panel, "graphs kept").value == 9
        assert "The settings of the last step." in html_of(panel)


def test_step_that_does_not_fit_has_a_suggestion() -> None:
    with make_relay(RelayConfig(seed=0, micro_batches=6, ahead=0, stash="host")) as relay:
        needed = relay.step(make_batches()[0]).peak_device_bytes
    device = EmulatedDevice(memory_bytes=int(1.2 * needed))
    with make_relay(RelayConfig(seed=0, micro_batches=6, ahead=0, stash="host"), device) as relay:
        with Session(relay, make_batches(), probe=False) as session:
            panel = WhatIfPanel(session)
            train(session, 1)
            shown(panel)
            assert panel.wait_until_idle() and panel._fit_suggestion.widget.layout.display == "none", "this step fits"
            session.reconfigure(ahead=3, stash="device")
            session.wait(HANG_S)
            shown(panel)
            assert panel.wait_until_idle() and "which is too much" in html_of(panel)
            assert panel._fit_suggestion.widget.layout.display == "" and "on the device, by the forecast" in html_of(
                panel
            )
            find(panel, "Use these settings for the next step; by the forecast it then fits").click()
            session.wait(HANG_S)
            shown(panel)
            assert panel.wait_until_idle() and "which is too much" not in html_of(panel)
            assert panel._fit_suggestion.widget.layout.display == "none"
            train(session, 1)
            now = session.snapshot()
            assert now.failure is None and now.step == 2 and now.config.ahead < 3 and now.config.micro_batches == 6


def test_reset_restores_the_next_step(what_if: WhatIfPanel) -> None:
    session = what_if.session
    answer(what_if, {"layers": 96})
    session.reconfigure(micro_batches=5, h2d_bytes_per_s=3e6)
    session.wait(HANG_S)
    shown(what_if)
    values = [find(what_if, words).value for words in ("layers", "micro-batches", "link to device")]
    assert values == [96, 5, 3e6], "values set by the user stay"
    assert find(what_if, "link to device").label == "3 MB/s"
    find(what_if, "Reset").click()
    assert what_if.wait_until_idle() and find(what_if, "layers").value == 4
    assert "micro-batches 2 → 5; link to the device no limit → 3 MB/s" in html_of(what_if)
    session.edit(Drop("L001"))
    session.wait(HANG_S)
    shown(what_if)
    assert find(what_if, "layers").value == 3


def test_another_depth_suggests_edits(what_if: WhatIfPanel) -> None:
    session = what_if.session
    assert not suggested(what_if)
    answer(what_if, {"layers": 6})
    assert suggested(what_if) == ["Insert 2 layers", "Duplicate 2 layers"]
    output = html_of(what_if)
    assert "workbench.edit(*(Insert(at) for at in range(4, 6)))" in output and "the model computes the same" in output
    assert "workbench.edit(Duplicate(slice(2, 4), &quot;top&quot;))" in output
    find(what_if, "Insert 2 layers").click()
    session.wait(HANG_S)
    now = shown(what_if)
    assert len(now.layers) == 6 and now.journal[-1].preserves_function and what_if.wait_until_idle()
    assert not suggested(what_if) and "Insert 2 layers: done" in html_of(what_if)
    answer(what_if, {"layers": 3})
    assert suggested(what_if) == ["Drop 3 layers"] and "workbench.edit(Drop(slice(3, 6)))" in html_of(what_if)
    with held(session.relay):
        session.step()
        enter(session.relay)
        find(what_if, "Drop 3 layers").click()
        assert "Drop 3 layers: waits for step 3 to end, place 1 in the queue" in html_of(what_if)
    session.wait(HANG_S)
    assert [row.key for row in shown(what_if).layers] == ["L000", "L001", "L002"]


def suggested(panel: WhatIfPanel) -> list[str]:
    return [row.children[0].description for row in panel._depth_suggestions._rows if row.layout.display != "none"]


def test_what_if_follows_the_newest_step(what_if: WhatIfPanel) -> None:
    assert "settings of step 2, simulated" in html_of(what_if)
    train(what_if.session, 1)
    shown(what_if)
    assert what_if.wait_until_idle() and "settings of step 3, simulated" in html_of(what_if)


def test_refused_apply_shows_the_reason(what_if: WhatIfPanel) -> None:
    answer(what_if, {"layers ahead": 3})
    what_if.session.close()
    find(what_if, "Apply").click()
    assert "this session is closed: make a new one" in html_of(what_if)


def test_only_the_newest_question_is_answered(what_if: WhatIfPanel) -> None:
    for depth in (8, 16, 32, 64, 128):
        find(what_if, "layers").value = depth
    assert what_if.wait_until_idle()
    assert "layers 4 → 128" in html_of(what_if)


def test_what_if_without_a_session(session: Session) -> None:
    train(session, 1)
    trace = session.snapshot().last
    assert trace is not None
    shown_alone = WhatIf(trace, depth=50)
    bundle = shown_alone._repr_mimebundle_()
    assert {WIDGET_VIEW_TYPE, "text/html", "image/svg+xml", "text/plain"} <= set(bundle)
    assert shown_alone.answer.question.depth == 50 and "what if, simulated" in bundle["text/html"]
    with pytest.raises(ValueError, match="depth=0"):
        WhatIf(trace, depth=0)
    with pytest.raises(TypeError, match="is not a step"):
        WhatIf(3)  # type: ignore[arg-type]


def test_fit_proposes_settings_with_reasons_and_use_applies_them(session: Session) -> None:
    panel = WhatIfPanel(session)
    train(session, 1)
    find(panel, "Fit").click()
    wait_until(lambda: "proposed" in html_of(panel))
    before = session.wait(HANG_S)
    assert "All weights stay on the device during a step, and micro-batches go through all layers" in html_of(panel)
    assert before.config == RelayConfig(seed=0, micro_batches=2, verify="never"), "a proposal is not in force"
    assert not before.changes and not before.changed_from and not find(panel, "Fit").disabled
    use = find(panel, "Use these settings from the next step on")
    assert use.layout.display == "" and "keep=4" in use.description
    use.click()
    now = session.wait(HANG_S)
    assert "in force from the next step on" in html_of(panel) and use.layout.display == "none"
    assert now.config == session.relay.config and now.config.keep == 4
    session.reconfigure(seed=3)  # keeps the other settings
    session.wait(HANG_S)
    assert session.relay.config.keep == 4
    assert "keep" in now.changes[-1].what or "graphs" in now.changes[-1].what


def test_fit_without_result_changes_nothing(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        relay.device.ledger.limit_bytes = 100
        panel = WhatIfPanel(session)
        find(panel, "Fit").click()
        wait_until(lambda: "No settings were found" in html_of(panel))
        assert "Remedy: give the device that much" in html_of(panel)
        assert session.relay.config == RelayConfig(seed=0, micro_batches=2, verify="never")
    with Session(relay, iter(())) as session:
        panel = WhatIfPanel(session)
        find(panel, "Fit").click()
        wait_until(lambda: "there is no further batch: there is no step to find settings for" in html_of(panel))

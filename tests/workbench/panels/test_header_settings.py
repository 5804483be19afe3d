"""Sliders of the header: they set the next step and follow settings changed elsewhere."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Device, EmulatedDevice, RelayConfig
from workbench.panels.header_panel import HeaderPanel
from workbench.session.session import Session


def test_slider_changes_a_setting_once(header: HeaderPanel) -> None:
    session = header.session
    find(header, "micro-batches").value = 3
    session.wait(HANG_S)
    for _ in range(3):
        shown(header)
    find(header, "layers ahead").value = 2
    find(header, "stash on").value = "host"
    session.wait(HANG_S)
    shown(header)
    assert session.relay.config == RelayConfig(seed=0, micro_batches=3, ahead=2, stash="host", verify="never")
    assert [change.what for change in session.snapshot().changes] == [
        "micro_batches 2 → 3, ahead 1 → 2, stash device → host"
    ]


def test_controls_follow_other_changes_without_echo(header: HeaderPanel) -> None:
    session = header.session
    session.reconfigure(
        micro_batches=5, ahead=7, stash="host", h2d_bytes_per_s=3_000_000
    )  # three of them are no options
    session.wait(HANG_S)
    for _ in range(2):
        shown(header)
    values = [find(header, words).value for words in ("micro-batches", "layers ahead", "stash on", "emulated link")]
    assert values == [5, 7, "host", 3e6]
    assert find(header, "emulated link").label == "3 MB/s"
    assert find(header, "micro-batches").options[3:6] == (("4", 4), ("5", 5), ("6", 6)), "in order"
    session.wait(HANG_S)
    assert len(session.snapshot().changes) == 1
    session.reconfigure(h2d_bytes_per_s=None)
    shown(header)
    assert find(header, "emulated link").value == math.inf


def test_stale_snapshot_does_not_reset_a_slider(header: HeaderPanel) -> None:
    session, slider = header.session, find(header, "micro-batches")
    old = session.snapshot()
    slider.value = 4
    header.show(old)
    assert slider.value == 4
    later = session.snapshot()
    slider.value = 8
    header.show(later)  # has 4, an older value than the slider's
    assert slider.value == 8
    session.wait(HANG_S)
    shown(header)
    assert slider.value == session.relay.config.micro_batches == 8
    assert [change.what for change in session.snapshot().changes] == ["micro_batches 2 → 8"]


def test_click_during_a_redraw_is_not_lost(header: HeaderPanel) -> None:
    session = header.session
    drawing, proceed = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        drawing.set()
        assert proceed.wait(HANG_S)

    find(header, "layers ahead").observe(wait, "value")
    session.reconfigure(ahead=3)
    thread = threading.Thread(target=shown, args=(header,))
    thread.start()
    assert drawing.wait(HANG_S)  # while the panel sets that slider
    find(header, "Step").click()
    find(header, "micro-batches").value = 4
    proceed.set()
    thread.join(HANG_S)
    now = session.wait(HANG_S)
    assert now.step == 1 and now.config.micro_batches == 4


def test_the_link_is_set_in_both_directions(header: HeaderPanel) -> None:
    link = find(header, "emulated link")
    assert link.value == math.inf
    link.value = 1e8
    header.session.wait(HANG_S)
    figures = header.session.relay.device.figures()
    assert figures["h2d_bytes_per_s"] == figures["d2h_bytes_per_s"] == 1e8
    link.value = math.inf
    header.session.wait(HANG_S)
    assert header.session.relay.device.figures()["h2d_bytes_per_s"] is None


def test_sliders_start_at_the_settings() -> None:
    device = EmulatedDevice(h2d_bytes_per_s=7e6)
    with (
        make_relay(RelayConfig(seed=0, micro_batches=5, ahead=6), device) as relay,
        Session(relay, make_batches()) as session,
    ):
        header = HeaderPanel(session)
        values = [find(header, words).value for words in ("micro-batches", "layers ahead", "emulated link")]
        shown(header)
        assert values == [5, 6, 7e6]
        assert session.snapshot().changes == ()


class Chip(Device):
    """A device with the behaviour of an emulated one, whose link cannot be set."""

    in_host_memory = True

    def __init__(self) -> None:
        self._inside = EmulatedDevice()
        self.name, self.torch_device, self.ledger = "chip", torch.device("cpu"), self._inside.ledger

    def figures(self) -> dict[str, Any]:
        return {"memory_bytes": None}

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._inside.host_empty(numel, dtype)

    def issue(self, *args: Any, **named: Any) -> Any:
        return self._inside.issue(*args, **named)

    def start_timer(self, *args: Any, **named: Any) -> Any:
        return self._inside.start_timer(*args, **named)

    def close(self) -> None:
        self._inside.close()


def test_real_link_has_no_slider() -> None:
    with make_relay(device=Chip()) as relay, Session(relay, make_batches()) as session:
        header = HeaderPanel(session)
        train(session, 1)
        shown(header)
        assert "chip" in html_of(header) and "could not be drawn" not in html_of(header)
        assert not [one for one in widgets_of(header) if getattr(one, "description", "") == "emulated link"]


def test_every_setting_in_force_is_shown_and_reset_restores_the_start(header: HeaderPanel) -> None:
    session, reset = header.session, find(header, "Reset settings")
    start = session.relay.config
    assert "settings in force: micro_batches=2 · verify=never" in html_of(header)
    assert reset.layout.display == "none"
    session.reconfigure(resident=1, keep=2, h2d_bytes_per_s=3_000_000)
    session.wait(HANG_S)
    shown(header)
    output = html_of(header)
    assert "<strong>resident=1</strong> (was 0) · <strong>keep=2</strong> (was 0)" in output
    assert "<strong>h2d_bytes_per_s=3000000</strong> (was None)" in output and reset.layout.display == ""
    reset.click()
    session.wait(HANG_S)
    shown(header)
    assert session.relay.config == start and session.relay.device.figures()["h2d_bytes_per_s"] is None
    assert "(was" not in html_of(header) and reset.layout.display == "none"

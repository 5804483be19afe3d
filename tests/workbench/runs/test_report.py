"""The report is one self-contained page with the figures of the run and every frame of its player."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recordings import record
from sessions import make_batches, make_relay, train

from l2l_core import RelayConfig
from workbench.__main__ import main
from workbench.pictures.packed_frames import relay_frames
from workbench.pictures.relay_picture import describe_state, draw_relay
from workbench.readings.state_timeline import StateTimeline
from workbench.runs.html_report import render_report
from workbench.runs.recorded_run import RecordedRun, name_runs
from workbench.runs.recorder import Recorder
from workbench.runs.run_loader import load_run
from workbench.session.session import Session

VOID = {"meta", "input", "br"}
TITLE = "<script>alert(1)</script> & run"


class Page(HTMLParser):
    """Elements, attributes and text of a page; `open` has the elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    def find(self, **wanted: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if wanted.items() <= attrs.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return load_run(record(tmp_path_factory.mktemp("run") / "run.jsonl", title=TITLE))


@pytest.fixture(scope="module")
def text(run: RecordedRun) -> str:
    return render_report([run])


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


# The page ------------------------------------------------------------------------------------------------------------


def test_everything_that_opens_is_closed(page: Page) -> None:
    assert page.open == []


def test_nothing_is_loaded(page: Page, text: str) -> None:
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed"), tag
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert (attrs.get(name) or "data:").startswith("data:"), (tag, attrs)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|import\(", text)
    (policy,) = [a["content"] for a in page.find(**{"http-equiv": "Content-Security-Policy"})]
    assert policy is not None and policy.startswith("default-src 'none'; ") and "http" not in policy
    (script,) = [s for s in page.scripts if "use strict" in s]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_user_input_is_escaped(text: str, page: Page) -> None:
    assert "<script>alert" not in text and text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; run") == 2
    assert TITLE in "".join(page.words)


def test_the_page_has_the_figures_of_the_run(page: Page, run: RecordedRun) -> None:
    text, now = " ".join(" ".join(page.words).split()), run.snapshot()
    for words in (
        "Sequential · 4 layers",
        "emulated device of 10 kB · 10 steps",
        f"{now.steps[-1].loss:.4g} from {now.steps[0].loss:.4g} in 10 steps",
        "micro_batches 2 → 3",
        "Step 10, event by event",
        "probe: before → after",
        "in force",
        f"torch {run.machine['torch']}",
    ):
        assert words in text, words
    assert now.in_core_bytes is not None and "in core would need" in text


def test_every_picture_has_words_and_a_table(page: Page) -> None:
    pictures = [a for tag, a in page.elements if tag == "svg"]
    assert [a["aria-label"] for a in pictures][:4] == ["Loss", "Relay", "Timeline of a step", "Memory over a step"]
    assert sum(tag == "desc" for tag, _ in page.elements) == len(pictures)
    assert sum(tag == "details" for tag, _ in page.elements) >= len(pictures)


def test_without_scripts_the_page_has_a_picture_and_no_controls(page: Page) -> None:
    (controls,) = page.find(**{"data-part": "controls"})
    assert "hidden" in controls
    assert any(word.startswith("event ") for word in page.words) and "Without scripts" in "".join(page.words)


def test_the_same_run_gives_the_same_page(run: RecordedRun, text: str) -> None:
    assert render_report([load_run(run.path)]) == text


# The player ----------------------------------------------------------------------------------------------------------


def test_frames_in_the_page_are_the_pictures(page: Page, run: RecordedRun) -> None:
    (packed,) = [s for s in page.scripts if "use strict" not in s]
    step: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    now = run.snapshot()
    assert now.last is not None
    keys, names = [layer.key for layer in now.layers], {layer.key: layer.name for layer in now.layers}
    timeline = StateTimeline.of(now.last, keys)
    assert len(step["frames"]) == step["events"] == timeline.count == now.last.counts[0]
    assert step["visits"] == timeline.visit_starts() and step["start"] == timeline.busiest_event()
    for number, pieces in enumerate(step["frames"]):
        picture, _, words = "".join(step["pieces"][i] for i in pieces).split("\x00")
        state = timeline.at_event(number)
        assert picture == draw_relay(state, keys, names=names, device=now.device, budget_bytes=10_000)
        assert words == describe_state(state, keys)


def test_of_many_events_some_are_shown(run: RecordedRun) -> None:
    now = run.snapshot()
    assert now.last is not None
    whole, some = (relay_frames(now.last, now.layers, at_most=most) for most in (10_000, 20))
    assert len(whole.frames) == whole.events == some.events and 10 < len(some.frames) <= 20
    stride = -(-whole.events // 20)
    assert [some.frame(i) for i in range(len(some.frames))] == [
        whole.frame(i) for i in range(0, len(whole.frames), stride)
    ]
    assert all(visit < len(some.frames) for visit in some.visits) and some.start < len(some.frames)


# Two runs ------------------------------------------------------------------------------------------------------------


def test_two_runs_are_compared(run: RecordedRun, tmp_path: Path) -> None:
    other = load_run(record(tmp_path / "run.jsonl", micro_batches=1, title="other"))
    page = Page(render_report([run, other]))
    assert page.open == []
    labels = [a["aria-label"] for tag, a in page.elements if tag == "svg"]
    assert labels[:5] == ["Loss of all runs", *2 * ["Timeline of a step", "Memory over a step"]]
    assert len([s for s in page.scripts if "use strict" not in s]) == 2
    text = " ".join(" ".join(page.words).split())
    assert "2 runs side by side" in text and "Losses of all runs" in text
    first = f"{run.snapshot().steps[0].loss:.6g}", f"{other.snapshot().steps[0].loss:.6g}"
    assert f"loss of the first step {first[0]} {first[1]}" in text


def test_a_run_beside_itself_differs_in_nothing(run: RecordedRun) -> None:
    text = render_report([run, run])
    assert '<tr class="differs">' not in text
    assert name_runs([run, run]) == [f"{TITLE} (1)", f"{TITLE} (2)"]


# Incomplete runs -----------------------------------------------------------------------------------------------------


def test_a_run_without_a_whole_step_still_has_a_report(run: RecordedRun, tmp_path: Path) -> None:
    lines = run.path.read_text(encoding="utf-8").splitlines()
    (tmp_path / "run.jsonl").write_text("\n".join(line for line in lines if '"type":"trace"' not in line) + "\n")
    page = Page(render_report([load_run(tmp_path)]))
    assert page.open == [] and not page.find(**{"data-part": "controls"})


def test_a_truncated_run_is_marked(run: RecordedRun, tmp_path: Path) -> None:
    lines = run.path.read_text(encoding="utf-8").splitlines()[:4]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    assert "the recording was cut short" in render_report([load_run(tmp_path)])


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one recorded run"):
        render_report([])


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run.jsonl.gz")
    assert main(["report", str(tmp_path)]) == 0
    assert f"Written: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert (
        main(["report", str(tmp_path), str(tmp_path / "run.jsonl.gz"), "-o", str(tmp_path / "new" / "two.html")]) == 0
    )
    assert "side by side" in (tmp_path / "new" / "two.html").read_text(encoding="utf-8")


def test_the_command_prints_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no recorded run" in capsys.readouterr().err


def test_a_depth_first_run_is_not_described_as_a_relay(tmp_path: Path) -> None:
    config = RelayConfig(micro_batches=2, keep=4, resident=2, schedule="depth_first")
    file = tmp_path / "run.jsonl"
    with make_relay(config) as relay, Session(relay, make_batches(), loggers=[Recorder(file)]) as session:
        train(session, 1)
    words = " ".join(Page(render_report([load_run(file)])).words)
    assert "Trained depth first" in words and "which holds all of them" in words and "one micro-batch" in words
    assert "one layer at a time" not in words and "replaced by" not in words

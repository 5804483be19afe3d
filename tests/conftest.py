"""What every test gets: a fixed seed, and a header that says which torch and device it ran with. And which tests run.

`tests/support/fast.py` has the rules.
"""

import gc
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fast import changing_names, further_cases, is_left_out, rare_cases, sample
from hypothesis import settings

settings.register_profile(
    "untimed", deadline=None
)  # how long an example takes says more of the machine than of the code
settings.load_profile("untimed")


# nbformat imports jsonschema, whose check of international addresses builds a parser, which takes more than a second. No
# notebook has such an address; without the parser jsonschema leaves out that check alone.
sys.modules.setdefault("rfc3987_syntax", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: interrupts are tested too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run a sample of the tests: tests/support/fast.py says which")
    parser.addoption(
        "--draw",
        type=int,
        default=0,
        metavar="N",
        help="of every sweep, of which one case runs, run another one (N = 1, 2, ...), and nothing else",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out by file what `--fast` does not run, before it is imported."""
    if config.getoption("--fast") and collection_path.match("test_*.py") and is_left_out(collection_path):
        return True
    return None  # others may have an opinion


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA"
    return f"torch {torch.__version__} ({torch.get_num_threads()} threads, {device})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of pytest-xdist begin with other files.

    In a new clone every test file, and all that it imports, has to be compiled, and a process that comes later finds that done.
    """
    report = yield
    here: dict[str, Any] = getattr(collector.config, "workerinput", {})
    if here and isinstance(collector, pytest.Directory):
        begin = len(report.result) * int(here["workerid"].removeprefix("gw")) // here["workercount"]
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Choose; and let the longest files begin, so that no worker is left alone with one of them in the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parts)  # the same order in every process
    if changing := changing_names(item.nodeid for item in items):
        raise pytest.UsageError(f"give ids= without addresses to the parameters of {changing[0]}")
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    sweeps = [item.nodeid for item in items if not item.get_closest_marker("all_cases")]
    draw = config.getoption("--draw")
    rare = rare_cases(sweeps, slow, draw)
    for item in items:
        if item.nodeid in rare:
            item.add_marker(pytest.mark.slow)
    yield  # -k and -m; what they leave is sampled
    if draw:
        _select(config, items, further_cases(sweeps, slow, draw))
    items.sort(key=lambda item: _turn(item.path))
    if config.getoption("--fast"):
        _select(config, items, sample([item.nodeid for item in items]))


def _select(config: pytest.Config, items: list[pytest.Item], taken: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]


@cache
def _turn(path: Path) -> int:
    """Return when the tests of a file run: of notebooks, of browsers, those that start other processes, then all others."""
    first = ["notebooks", "browser"]
    return first.index(path.parent.name) if path.parent.name in first else len(first) + (not is_left_out(path))


def pytest_collection_finish() -> None:
    """Modules stay. Without them a full collection of garbage takes a tenth as long, and tests have a thousand of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The models are so small that a second thread costs more than it does."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gpu_unless_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that expect equal bits run on the emulated device, also where "auto" would find a GPU."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

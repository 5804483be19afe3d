"""Hashes of training steps, to show that a change of the code changed no result.

python tests/support/golden.py store                 run every case and write the hashes to tests/golden/steps.json
python tests/support/golden.py check                 run every case and compare; exits with 1 if a hash differs
python tests/support/golden.py check --only zoo demo  the named groups alone: programs, zoo, notebooks, demo

A case has four hashes over its steps: losses, states (parameters, buffers, optimizer state), events without their times,
and bytes (loaded, pushed, peak on the device). Only public names of the package are used, so the command outlives
renames. The bits depend on the processor and on torch, so the file names both; elsewhere, store anew at the older commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
GOLDEN = ROOT / "tests" / "golden" / "steps.json"
PROGRAMS = range(500_000, 500_300)  # seeds that no test draws
Hashes = dict[str, str]
HASHES = ("loss", "state", "events", "bytes")


# -- one step ----------------------------------------------------------------------------------------------------------


def digest(parts: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the representations of `parts`, one after another."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part if isinstance(part, bytes) else repr(part).encode())
    return hashed.hexdigest()[:16]


def hashes_of(relay: Any, result: Any) -> Hashes:
    """The four hashes of a step of `relay` that gave `result`."""
    lanes = result.trace.lanes
    events = [
        (lane, [(e.kind, e.layer, e.k, e.nbytes, e.visit, e.slot, e.piece, e.pieces) for e in lanes[lane]])
        for lane in sorted(lanes)
    ]
    # With the stash on the host, which storages wait at the peak is a matter of time.
    timed = result.trace.settings.get("stash") == "host"
    peak = -1 if timed else result.peak_device_bytes
    return {
        "loss": float(result.loss).hex(),
        "state": digest(state_parts(relay.model, relay.optimizer)),
        "events": digest(events),
        "bytes": digest([result.bytes_loaded, result.bytes_pushed, peak]),
    }


def state_parts(model: Any, optimizer: Any) -> Iterator[Any]:
    """Names and bytes of parameters, buffers and optimizer state."""
    import torch

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name
        yield bytes_of(tensor)
    for index, entry in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(entry.items()):
            yield (index, name)
            yield bytes_of(value) if isinstance(value, torch.Tensor) else value


def bytes_of(tensor: Any) -> bytes:
    """The tensor's bytes in order of its elements, with its shape and type."""
    import torch

    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return f"{tuple(dense.shape)} {dense.dtype} ".encode() + data


@contextmanager
def recording(steps: list[Hashes], most: int | None = None) -> Iterator[None]:
    """Note the hashes of every step of every relay of this process, of the first `most` if given."""
    from l2l_core import Relay

    plain = Relay.step

    def step(relay: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(relay, *args, **kwargs)
        if most is None or len(steps) < most:
            steps.append(hashes_of(relay, result))
        return result

    Relay.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Relay.step = plain  # type: ignore[method-assign]


def summary(kind: str, steps: list[Hashes]) -> dict[str, Any]:
    """A case in few words: how it ended, how many steps it took, and their four hashes."""
    return {"kind": kind, "steps": len(steps)} | {name: digest(step[name] for step in steps) for name in HASHES}


# -- cases -------------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """One thread, no warnings, no network."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run_program(seed: int) -> Any:
    """A random program: its verdict, and the hashes of its steps."""
    from program_run import judge
    from programs import draw

    prepare()
    steps: list[Hashes] = []
    with recording(steps), redirect_stdout(sys.stderr):
        outcome = judge(draw(seed))
    return summary(outcome.kind, steps)


def run_kind(name: str) -> Any:
    """A kind of the zoo: three steps with the stash on the device, on the host, and depth first."""
    import torch
    from oracle import adamw
    from zoo import BY_NAME

    import l2l_core.schedule_rules
    from l2l_core import Relay, RelayConfig

    prepare()
    l2l_core.schedule_rules.MIN_CHUNK_BYTES = 64  # so that small layers travel in pieces as large ones do
    kind, found = BY_NAME[name], {}
    settings: dict[str, dict[str, Any]] = {
        "device": {},
        "host": {"stash": "host"},
        "depth_first": {"schedule": "depth_first", "keep": 99, "resident": 98},
    }
    for way, chosen in settings.items():
        steps: list[Hashes] = []
        torch.manual_seed(0)
        model = kind.make_model()
        config = RelayConfig(**({"micro_batches": 3, "seed": 0} | chosen))
        try:
            with (
                recording(steps),
                Relay(
                    model, adamw(model), layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
                ) as relay,
            ):
                for seed in range(3):
                    relay.step(kind.make_batch(7, seed))
            found[way] = summary("held", steps)
        except (RuntimeError, ValueError, TypeError) as error:
            found[way] = summary(f"refused: {type(error).__name__}", steps)
    return found


_FIRST_CELL = """
import sys as _sys
_sys.path[:0] = {paths!r}
import golden as _golden, json as _json, pathlib as _pathlib
_steps = []
_recording = _golden.recording(_steps, most=1)
_recording.__enter__()
"""
_LAST_CELL = "_pathlib.Path({path!r}).write_text(_json.dumps(_steps))"


def run_notebook(name: str) -> Any:
    """A notebook: its first training step."""
    from nbformat.v4 import new_code_cell

    from workbench.commands.notebook_runner import CELL_TIMEOUT_S, execute_notebook, read_notebook

    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.json"
        first = _FIRST_CELL.format(paths=[str(ROOT), str(ROOT / "tests" / "support")])
        notebook.cells.insert(0, new_code_cell(first))
        notebook.cells.append(new_code_cell(_LAST_CELL.format(path=str(steps))))
        execute_notebook(notebook, path.parent, CELL_TIMEOUT_S)
        return summary("done", json.loads(steps.read_text()))


def run_demo(name: str) -> Any:
    """The demo in its quick form: every step."""
    from workbench.__main__ import main

    prepare()
    steps: list[Hashes] = []
    with tempfile.TemporaryDirectory() as folder, recording(steps), redirect_stdout(sys.stderr):
        status = main(["demo", "--quick", "--out", folder])
    return summary(f"exit {status}", steps)


def cases(only: list[str]) -> list[tuple[str, str, Callable[[Any], Any], Any]]:
    """Group, name, function and argument of every case."""
    from zoo import KINDS

    found: list[tuple[str, str, Callable[[Any], Any], Any]] = [("demo", "quick", run_demo, "quick")]
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    found += [("notebooks", name, run_notebook, name) for name in notebooks]
    found += [("zoo", kind.name, run_kind, kind.name) for kind in KINDS]
    found += [("programs", str(seed), run_program, seed) for seed in PROGRAMS]
    return [case for case in found if not only or case[0] in only]


# -- the command -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the bits depend on besides the code."""
    import torch

    return {
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "system": platform.machine(),
    }


def run_all(only: list[str], jobs: int) -> dict[str, dict[str, Any]]:
    """Every case in a process pool; group -> name -> result."""
    found: dict[str, dict[str, Any]] = {}
    # A process for a few cases: what one leaves in the process does not reach many others.
    with get_context("spawn").Pool(jobs, maxtasksperchild=40) as pool:
        running = [(group, name, pool.apply_async(run, (given,))) for group, name, run, given in cases(only)]
        for group, name, result in running:
            found.setdefault(group, {})[name] = result.get()
            print(f"{group} {name}", file=sys.stderr, flush=True)
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for every case that differs, with the hashes that do."""
    for group in now:
        for name in sorted(before.get(group, {}).keys() | now[group].keys()):
            one, other = before.get(group, {}).get(name), now[group].get(name)
            if one != other:
                yield f"{group} {name}: {', '.join(_where(one, other))}"


def _where(one: Any, other: Any, at: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in _where(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in _where(*pair, f"{at}[{i}]")]
    return [] if one == other else [f"{at.lstrip('.')} was {one} and is {other}"[:160]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["store", "check"])
    parser.add_argument("--only", nargs="+", default=[], choices=["programs", "zoo", "notebooks", "demo"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--file", type=Path, default=GOLDEN)
    options = parser.parse_args()
    if options.verb == "check":
        stored = json.loads(options.file.read_text())
        if stored["machine"] != machine():
            print(f"the hashes are of {stored['machine']}, this is {machine()}: store them here at the older commit")
            return 2
    found = run_all(options.only, options.jobs)
    kinds = Counter(case["kind"] for case in found.get("programs", {}).values())
    print(f"{sum(map(len, found.values()))} cases; programs: {dict(sorted(kinds.items()))}")
    if options.verb == "store":
        options.file.write_text(json.dumps({"machine": machine(), **found}, indent=1, sort_keys=True) + "\n")
        return 0
    lines = list(differences(stored, found))
    print(*lines, f"{len(lines)} cases differ", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

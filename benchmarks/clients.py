"""Whether programs with other libraries train by relay as they do without one.

    python benchmarks/clients.py                       all; writes docs/CLIENTS.md if all libraries are installed
    python benchmarks/clients.py --only peft DPO       cases with one of these in library or description; writes nothing
    python benchmarks/clients.py --write               writes docs/CLIENTS.md although libraries are missing

Each case is a program that a user of a library would write, run in a separate process with a time limit: without a relay and
with one. Losses, parameters, buffers, optimizer state and what the program returns are compared by their bits. Exits with 1 if
any case is bad. Libraries that are not installed are listed as such.
"""

from __future__ import annotations

import os

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import textwrap  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from dataclasses import asdict, replace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from _children import Failure, run  # noqa: E402
from _clients import BAD, CASES, Case, Outcome, judge  # noqa: E402
from _clients_libraries import declare_vision_operators, version_of  # noqa: E402

declare_vision_operators()  # before transformers, which imports torchvision

from _common import show  # noqa: E402

PAGE = Path("docs/CLIENTS.md")
SUBJECTS = [
    "optimizers",
    "averages of weights",
    "adapters",
    "models",
    "trainers",
    "loops of the user",
    "metrics, data, files, inspection",
]
HEADER = ["subject", "cases", "equal", "refused; equal with the remedy", "refused", "bad", "not installed"]

SHARED = {  # library -> module that takes seconds to import, so that processes do not
    "transformers": "transformers.trainer",
    "trl": "trl.trainer.sft_trainer",
    "sentence-transformers": "sentence_transformers",
    "lightning": "lightning.pytorch",
    "peft": "peft",
    "timm": "timm",
    "diffusers": "diffusers.models",
    "torch_geometric": "torch_geometric.nn",
}


def main() -> None:
    """Try the cases, show a line for each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="parts of libraries' names or of descriptions")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a case")
    parser.add_argument("--out", type=Path, help="where the outcomes go, a line of JSON each")
    parser.add_argument("--write", action="store_true", help="write the page although libraries are missing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    register()
    cases = [each for each in CASES if not args.only or any(part in named(each) for part in args.only)]
    for library in dict.fromkeys(each.library for each in cases):
        if library in SHARED and version_of(library):
            with suppress(ImportError):  # of a second library; its cases have the reason
                importlib.import_module(SHARED[library])
    outcomes = []
    for each, outcome in tried(cases, args.jobs, args.seconds):
        outcomes.append((each, outcome))
        print(f"{result_of(outcome):10} {outcome.seconds:5.1f} s  {named(each)}  {outcome.reason[:300]}", flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({"case": named(each)} | asdict(outcome)) + "\n")
    outcomes.sort(key=lambda pair: (pair[0].library.lower(), CASES.index(pair[0])))
    print()
    show(HEADER, summary(outcomes))
    missing = sorted({each.library for each, outcome in outcomes if outcome.kind == "not installed"})
    if missing:
        print(f"not installed: {', '.join(missing)}")
    if not args.only and (args.write or not missing):
        PAGE.write_text(document(outcomes))
    sys.exit(any(outcome.kind in BAD for _, outcome in outcomes))


def register() -> None:
    """Import what the children share, and the files of cases, which register them."""
    import _clients_averages  # noqa: F401
    import _clients_lightning  # noqa: F401
    import _clients_loops  # noqa: F401
    import _clients_models  # noqa: F401
    import _clients_optimizers  # noqa: F401
    import _clients_peft  # noqa: F401
    import _clients_tools  # noqa: F401
    import _clients_trainers  # noqa: F401
    import _clients_trl  # noqa: F401
    import _clients_vision  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()


def named(of: Case) -> str:
    return f"{of.library}: {of.what}"


def tried(cases: Sequence[Case], jobs: int, limit_s: float) -> Iterator[tuple[Case, Outcome]]:
    """Try each case in a separate process."""
    present = [each for each in cases if version_of(each.library)]
    yield from ((each, Outcome("not installed")) for each in cases if each not in present)
    with tempfile.TemporaryDirectory() as folder:
        tasks = ((i, partial(judged, each, Path(folder) / str(i))) for i, each in enumerate(present))
        for i, answer in run(tasks, jobs, limit_s):
            failed = isinstance(answer, Failure)
            outcome = Outcome(answer.kind, reason=answer.reason) if failed else Outcome(**answer)
            yield present[i], outcome


def judged(of: Case, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    os.chdir(folder)  # some libraries write beside the program
    began_s = time.monotonic()
    return asdict(replace(judge(of, folder), seconds=time.monotonic() - began_s))


# -- words -----------------------------------------------------------------------------------------------------------


def result_of(outcome: Outcome) -> str:
    return f"{outcome.kind}; equal with the remedy" if outcome.remedy else outcome.kind


def summary(outcomes: Sequence[tuple[Case, Outcome]]) -> list[list[Any]]:
    by_subject = {subject: [o for each, o in outcomes if each.subject == subject] for subject in SUBJECTS}
    rows = [[subject, *counts(some)] for subject, some in by_subject.items() if some]
    return [*rows, ["all", *counts([outcome for _, outcome in outcomes])]]


def counts(outcomes: Sequence[Outcome]) -> list[int]:
    results = Counter("bad" if outcome.kind in BAD else result_of(outcome) for outcome in outcomes)
    kinds = ("equal", "refused; equal with the remedy", "refused", "bad", "not installed")
    return [len(outcomes), *(results[kind] for kind in kinds)]


def document(outcomes: Sequence[tuple[Case, Outcome]]) -> str:
    """Return the page."""
    libraries = sorted({each.library for each, _ in outcomes}, key=str.lower)
    versions = ", ".join(f"{name} {version_of(name)}" for name in libraries if version_of(name) and name != "torch")
    return "\n".join(
        [
            "# Clients",
            "",
            "`python benchmarks/clients.py` runs programs that users of other libraries write, each in a separate process:",
            "without a relay, and with `relay.step` or an integration in place of the optimizer step. *Equal* means the same",
            "bits in losses, parameters, buffers, optimizer state and what else the program reads. *Refused* means an error of",
            "the relay before anything was trained; where its message names a remedy, the program is run with it, and",
            "*equal with the remedy* means the same bits then. Any other result is *bad*.",
            "",
            *textwrap.wrap(f"Made with torch {torch.__version__}; {versions}.", 120),
            "",
            *table(HEADER, summary(outcomes)),
            "",
            "## Cases",
            "",
            *table(
                ["library", "version", "what", "result", "reason or remedy"], map(row_of, *zip(*outcomes, strict=True))
            ),
            "",
        ]
    )


def row_of(of: Case, outcome: Outcome) -> list[str]:
    remedy = f"remedy: `{outcome.remedy}`. " if outcome.remedy else ""
    return [of.library, version_of(of.library), of.what, result_of(outcome), remedy + escaped(outcome.reason)]


def table(header: Sequence[str], rows: Any) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def escaped(text: str) -> str:
    """Return text for a cell, cut where a sentence ends."""
    if len(text) > 300:
        text = text[: text.rfind(". ", 0, 400) + 1] or text[:300]
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()

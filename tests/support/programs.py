"""Random training programs against the relay: draw them, run them, show and reduce them.

python tests/support/programs.py --first 0 --count 1000     a line per bad program, and a summary
python tests/support/programs.py --show 17                  the program as text
python tests/support/programs.py --run 17                   one program in this process, with the traceback
python tests/support/programs.py --reduce 17                a minimal program with the same outcome
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from program import ROWS, Program, Settings  # noqa: E402
from program_blocks import BLOCK_FEATURES, FROZEN_DTYPES, draw_block  # noqa: E402
from program_features import SHELL_FEATURES  # noqa: E402
from program_shell import Shell  # noqa: E402

FEATURES = [*BLOCK_FEATURES, *SHELL_FEATURES]
_HOW_MANY = [0, 1, 2, 3, 4], [8, 42, 25, 15, 10]  # exotic features of a program, and their weights
_LOSSES = ["out.pow(2).mean()", "F.cross_entropy(out[:, -1], y)", "F.mse_loss(out, x)", "0.01 * out.abs().sum()"]


def draw(seed: int, frozen: bool = False) -> Program:
    """The program of a seed, the same one always; with `frozen`, with parameters of other dtypes that are not trained."""
    rng = random.Random(seed)
    drafts = [draw_block(rng) for _ in range(rng.choice([2, 2, 3, 3, 4, 5]))]
    dtypes = [rng.choice([*FROZEN_DTYPES, None]) for _ in drafts] if frozen else []
    for draft, name in zip(drafts, dtypes, strict=False):
        if name is not None:
            FROZEN_DTYPES[name](draft, rng)
    features = rng.sample(FEATURES, rng.choices(*_HOW_MANY)[0])
    had = [name for name in features if name in BLOCK_FEATURES and BLOCK_FEATURES[name](rng.choice(drafts), rng)]
    had += [name for name in features if name in SHELL_FEATURES]
    labels = [f"frozen {name}" for name in dtypes if name is not None] + had
    shell = Shell(rng, drafts)
    actions: list[str | int] = [*range(len(drafts))]
    for name in had:
        if name in SHELL_FEATURES:
            actions.insert(rng.randint(0, len(actions)), name)
    if rng.random() < 0.7:
        shell.write("{v} = self.stem({p})")
    for action in actions:
        if isinstance(action, str):
            SHELL_FEATURES[action](shell)
        else:
            shell.emit(shell.call(action))
        if rng.random() < 0.35:
            shell.ordinary()
    if rng.random() < 0.3:
        shell.write("{v} = {p} + {q}")
    shell.lines.append(f"return self.head({shell.pool[-1]})" if rng.random() < 0.7 else f"return {shell.pool[-1]}")
    loss = " + ".join([rng.choice(_LOSSES), *shell.loss])
    layers = [draft.layer() for draft in drafts]
    return Program(
        seed, layers, shell.needed(), shell.lines, ["out = model(x, y)", f"return {loss}"], _draw_settings(rng), labels
    )


def _draw_settings(rng: random.Random) -> Settings:
    rows = rng.choice([4, ROWS, 7, 8])
    settings = Settings(
        micro_batches=rng.choice([1, 2, 2, 3, 4]),
        ahead=rng.choice([0, 1, 1, 2]),
        stash=rng.choice(["device", "host"]),
        update=rng.choice(["eager", "eager", "deferred"]),
        meter=rng.choice(["on_change", "on_change", "always"]),
        optimizer=rng.choice(["sgd", "momentum", "adamw", "fused_adamw", "adagrad"]),
        rows=[rows, rows, rows] if rng.random() < 0.7 else [rng.choice([4, 5, 6, 7, 8]) for _ in range(3)],
        seed=rng.choice([0, 0, 1]),
        piece_bytes=rng.choice([1 << 14, 64]),
    )
    # Drawn last, so that a seed that was drawn before there was a choice is still the same program.
    return replace(settings, schedule="depth_first", stash="device") if rng.random() < 0.25 else settings


def drawn(options: argparse.Namespace, seed: int) -> Program:
    """The program of a seed, in the schedule that was asked for."""
    program = draw(seed, options.frozen)
    if options.schedule is None:
        return program
    return replace(program, settings=replace(program.settings, schedule=options.schedule, stash="device"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--schedule", help="of all of them, in place of the drawn one")
    parser.add_argument("--frozen", action="store_true", help="layers have frozen parameters of other dtypes")
    parser.add_argument("--seeds", type=int, nargs="+", help="these, in place of --first and --count")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="a line for every program")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--run", type=int, metavar="SEED")
    parser.add_argument("--reduce", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--keep", type=Path, help="append what was reduced to this file, a line of JSON each")
    options = parser.parse_args()
    if options.show is not None:
        print(drawn(options, options.show).show())
        return 0
    if options.run is not None:
        from program_run import judge

        outcome = judge(drawn(options, options.run))
        print(outcome, outcome.trace, sep="\n")
        return int(outcome.is_bad)
    if options.reduce is not None:
        from program_batch import Worker
        from program_reduce import reduce

        with Worker() as worker:
            for seed in options.reduce:
                program, outcome = reduce(drawn(options, seed), worker.judge)
                print(program.show(), outcome, "\n", sep="\n", flush=True)
                if options.keep:
                    with options.keep.open("a") as file:
                        file.write(program.to_json() + "\n")
        return 0
    return _run_many(options)


def _run_many(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from program_batch import Outcome, run_all

    found: list[Outcome] = []
    seeds = options.seeds or range(options.first, options.first + options.count)
    for outcome in run_all((drawn(options, seed) for seed in seeds), options.jobs):
        found.append(outcome)
        if outcome.is_bad or options.all:
            print(outcome, flush=True)
    print(summary(found))
    if options.json:
        options.json.write_text("\n".join(json.dumps(asdict(outcome)) for outcome in found))
    return int(any(outcome.is_bad for outcome in found))


def summary(outcomes: Iterable[object]) -> str:
    """How many programs of every outcome, and the causes of the bad ones."""
    by_kind: Counter[str] = Counter()
    causes: dict[str, list[int]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind] += 1  # type: ignore[attr-defined]
        if outcome.is_bad:  # type: ignore[attr-defined]
            causes[outcome.cause].append(outcome.seed)  # type: ignore[attr-defined]
    lines = [f"{count:6} {kind}" for kind, count in by_kind.most_common()]
    ranked = sorted(causes.items(), key=lambda item: -len(item[1]))
    return "\n".join([*lines, *(f"{len(seeds):6} {cause}   seeds {seeds[:5]}" for cause, seeds in ranked)])


if __name__ == "__main__":
    sys.exit(main())

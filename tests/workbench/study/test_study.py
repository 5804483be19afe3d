"""Studies end to end: common beginnings, interruption, the command line, and arguments that are refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from study_program import VARIANTS, batches, make_batch, make_relay, make_study

from l2l_core import ActiveLayers, Depth, EmulatedDevice, Insert, Relay, Schedule, WarmupStableDecay
from workbench import Study, Variant, grid
from workbench.study.segment import SEGMENTS, SharedSegment
from workbench.study.segment_relay import BatchStream
from workbench.study.worker_pool import most_workers

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "study_program.py"


def trained(study: Study) -> Study:
    study.run(report=None)
    return study


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return trained(make_study(tmp_path_factory.mktemp("study") / "all"))


def recorded_rows(study: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(study.glob(f"{SEGMENTS}/*/rows.jsonl"))}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_that_shares_its_beginning_equals_one_alone(name: str, undisturbed: Study, tmp_path: Path) -> None:
    alone = trained(make_study(tmp_path, [name], seeds=[1], autosave_s=1e9)).frame(seconds=False)
    shared = undisturbed.frame(seconds=False).query("variant == @name and seed == 1").reset_index(drop=True)
    assert len(alone) == 9 and alone.equals(shared)
    assert SharedSegment(tmp_path, "s1-g0").end is not None and not (tmp_path / SEGMENTS / "s1-g0" / "state").exists()


def test_shared_steps_are_counted(undisturbed: Study) -> None:
    saving = undisturbed.saving
    # For each of two seeds: 3 steps of all five, 1 of "plain" and "dropping", and the rest alone.
    assert (saving.steps, saving.trained_steps) == (2 * 5 * 6, 2 * (3 + 1 + 2 * 2 + 3 * 3))
    assert f"{60 - 34} of 60 steps" in str(saving) and str(saving) in str(undisturbed.table())
    assert not [*undisturbed.folder.rglob("state")]  # saves are removed at the end


def make_light_study(folder: Path, fails: str = "", together: bool = False, **options: Any) -> Study:
    """A study of functions that exist in this process alone, as those of a notebook, without transformers."""
    import torch
    from torch import nn

    from l2l_core import EmulatedDevice, Relay

    def make(seed: int) -> Any:
        if seed == 1 and fails == "raise":
            raise ZeroDivisionError("made to fail")
        if seed == 1 and fails == "exit":
            os._exit(3)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1))
        loss = lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1])  # noqa: E731
        return Relay(model, lambda p: torch.optim.AdamW(p, lr=1e-2), EmulatedDevice(), layers=[*model[0]], loss=loss)

    def draw(seed: int) -> Iterator[Any]:
        while together and seed == 0 and not (folder / SEGMENTS / "s1-g0").exists():
            time.sleep(0.01)  # for ever, if one process trains after the other
        while True:
            yield torch.randn(4, 4), torch.randn(4, 1)

    variants = {"two": Depth(2), "grown": Depth({0: 2, 3: 4}), "shrunk": Depth({3: 1}, shrink="top")}
    return Study(make, variants, seeds=[0, 1], steps=6, batches=draw, folder=folder, **options)


def test_processes_train_the_same_bits(tmp_path: Path) -> None:
    alone, lines = trained(make_light_study(tmp_path / "alone")), list[str]()
    study = make_light_study(tmp_path / "processes", together=True, workers=2)
    study.run(report=lines.append)
    assert recorded_rows(study.folder) == recorded_rows(alone.folder) and not [*study.folder.rglob("state")]
    assert str(study.table()) == str(alone.table())
    assert lines[-1].startswith("6 of 6 runs finished. Common beginnings were trained once: 12 of 36 steps")


@pytest.mark.slow
def test_a_failing_process_is_reported_and_the_others_are_saved(tmp_path: Path) -> None:
    for fails, kind, message in (
        ("raise", ZeroDivisionError, "made to fail"),
        ("exit", RuntimeError, "ended with exit status 3, without an error of Python: it may have run out of memory"),
    ):
        with pytest.raises(kind, match=message):
            make_light_study(tmp_path / fails, fails, workers=2, autosave_s=1e9).run(report=None)
        resumed = make_light_study(tmp_path / fails, workers=2)  # whose make_relay does not fail any more
        resumed.run(report=None, accept_changes=True)
        assert recorded_rows(resumed.folder) == recorded_rows(trained(make_light_study(tmp_path / "alone")).folder)


def test_what_cannot_be_sent_to_a_process_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    study = make_study(tmp_path, ["plain"], workers=2, make_relay=lambda seed: (lock, make_relay(seed))[1])
    with pytest.raises(
        ValueError, match=r"cannot be sent to another process \(TypeError: cannot pickle '_thread.lock'"
    ):
        study.run(report=None)


def test_cores_decide_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(9)}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (most_workers("auto"), most_workers(3)) == (4, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # its memory would be shared
    assert most_workers("auto") == 1


def test_a_study_killed_in_the_middle_goes_on(undisturbed: Study, tmp_path: Path) -> None:
    """Killed by SIGKILL while a batch is drawn, as a process of the command line."""
    environment = os.environ | {"STUDY_FOLDER": str(tmp_path / "killed"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "workbench", "study", str(PROGRAM)]
    killed = subprocess.run(
        command, cwd=ROOT, env=environment | {"KILL_AT_BATCH": "10"}, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    before = recorded_rows(tmp_path / "killed")
    assert before and before != recorded_rows(undisturbed.folder)
    again = trained(make_study(tmp_path / "killed", seeds=[0]))
    expected = make_study(undisturbed.folder, seeds=[0])
    assert recorded_rows(again.folder) == {k: v for k, v in recorded_rows(undisturbed.folder).items() if k[:2] == "s0"}
    assert again.frame(seconds=False).equals(expected.frame(seconds=False))
    assert str(again.table()) == str(expected.table())
    pytest.importorskip("matplotlib")
    figures = [each.save(tmp_path / f"{i}.pdf").read_bytes() for i, each in enumerate((again, expected))]
    assert figures[0] == figures[1]


def test_an_interrupted_study_repeats_the_steps_since_the_last_save(undisturbed: Study, tmp_path: Path) -> None:
    study = make_study(tmp_path, ["plain", "grown"], autosave_s=1e9)
    steps = list[str]()

    def interrupt(line: str) -> None:
        steps.append(line)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(report=interrupt)
    assert "seed 0, plain + grown, step 0" in steps[0]
    with (tmp_path / SEGMENTS / "s0-g0" / "rows.jsonl").open("a") as file:
        file.write('{"step":4,"los')  # an incomplete line
    study.run(report=steps.append)
    whole = undisturbed.frame(seconds=False).query("variant in ['plain', 'grown']").reset_index(drop=True)
    assert study.frame(seconds=False).equals(whole)
    assert steps[-1].startswith("4 of 4 runs finished. Common beginnings were trained once: 6 of 24 steps")


def test_a_stopped_study_resumes_after_the_last_step(undisturbed: Study, tmp_path: Path) -> None:
    study = make_study(tmp_path, ["plain"], seeds=[0], autosave_s=1e9)
    lines = list[str]()

    def stop(line: str) -> None:
        lines.append(line)
        study.stop()

    study.run(report=lambda line: stop(line) if not lines else lines.append(line))
    assert study.progress_line == lines[-1] and lines[-1].startswith("0 of 1 runs finished")
    study.run(report=None)
    whole = undisturbed.frame(seconds=False).query("variant == 'plain' and seed == 0").reset_index(drop=True)
    assert study.frame(seconds=False).equals(whole)


def test_a_finished_study_is_read_without_training(undisturbed: Study) -> None:
    def refuse(seed: int) -> Relay:
        raise AssertionError("nothing is left to train")

    torch.manual_seed(7)
    held_out = [make_batch()]
    again = Study(
        refuse, VARIANTS, seeds=[0], steps=6, batches=batches, held_out=held_out, evaluate_every=2,
        folder=undisturbed.folder,
    )  # fmt: skip
    assert len(again.frame()) == len(undisturbed.frame()) // 2  # of one seed
    assert again.table().rows[0].n == 1


def test_the_command_prints_progress_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.commands import study_runner

    path = tmp_path / "file.py"
    path.write_text(
        "from study_program import make_study\n"
        f"study = make_study({str(tmp_path / 'out')!r}, ['plain'], seeds=[0], steps=2, autosave_s=9e9)\n"
    )
    assert study_runner.main([path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 1 runs finished: seed 0, plain, step 0"
    assert lines[1].startswith("1 of 1 runs finished.") and lines[3].startswith("| variant | n |")
    assert study_runner.main([tmp_path / "out"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[3:]
    seen = list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Study, "run", lambda study, report, accept_changes: seen.append(accept_changes))
        study_runner.main([path])
        study_runner.main([path], accept_changes=True)
    assert seen == [False, True]
    path.write_text("studio = 1\n")
    assert study_runner.main([path]) == 2 and study_runner.main([tmp_path / "none.py"]) == 2
    refused = capsys.readouterr().err
    assert "defines no `study`" in refused and "none.py does not exist" in refused


def test_a_budget_of_flop_and_factors(tmp_path: Path) -> None:
    seen = list[dict[str, Any]]()

    def make(seed: int, **factors: Any) -> Any:
        seen.append(factors)
        return make_relay(seed)

    variants = grid(lambda depth: Depth({0: depth}), lr=[0.1, 0.2], depth=[2, 4])
    assert [*variants] == ["lr=0.1, depth=2", "lr=0.1, depth=4", "lr=0.2, depth=2", "lr=0.2, depth=4"]
    study = trained(Study(make, variants, seeds=[0], flop=1.2e6, batches=batches, folder=tmp_path))
    assert {tuple(factors.items()) for factors in seen} == {(("lr", 0.1),), (("lr", 0.2),)}
    frame = study.frame()
    assert [*frame.columns[:4]] == ["variant", "factor_lr", "depth", "seed"]
    ends = frame.groupby("variant").last()
    assert (ends["flop"] >= 1.2e6).all() and ends["step"]["lr=0.1, depth=2"] > ends["step"]["lr=0.1, depth=4"]
    assert "training losses" in str(study.table())


def test_batches_depend_on_the_seed_alone() -> None:
    data = torch.arange(12.0).reshape(6, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2, shuffle=True)

    def drawn(seed: int, disturb: bool) -> list[torch.Tensor]:
        stream, found = BatchStream(loader, seed), []
        for _ in range(7):
            found.append(stream.draw()[0])
            if disturb:
                torch.rand(3)
        return found

    before = torch.get_rng_state()
    plain = torch.stack(drawn(3, False))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(plain, torch.stack(drawn(3, True)))
    assert not torch.equal(plain, torch.stack(drawn(4, False)))
    short = BatchStream(lambda seed: iter([data]), 5)
    short.draw()
    with pytest.raises(ValueError, match="batches of seed 5 ended after 1: return a list or a loader"):
        short.draw()


# -- refusals ----------------------------------------------------------------------------------------------------------


def generated() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "variants is empty: pass one or more"),
        ({"variants": [Depth({0: 2})]}, "pass a mapping from names"),
        ({"variants": {"a": 3}}, "3 is no variant: pass a schedule such as Depth"),
        ({"steps": None}, "steps=None, flop=None: pass one of them"),
        ({"flop": 1e9}, "pass one of them, as steps=900 or flop=1e12"),
        ({"steps": 0}, "pass a positive integer"),
        ({"steps": None, "flop": -1}, "flop=-1: pass a positive number"),
        ({"seeds": []}, "pass different integers of at least 0, as range"),
        ({"seeds": [1, 1]}, "pass different integers"),
        ({"seeds": 0}, r"or \[0\] for the seed 0"),
        ({"seeds": 3}, r"pass range\(3\) for 3 seeds, or \[3\] for the seed 3"),
        ({"batches": generated()}, "iterated only once: pass a function of the seed"),
        ({"held_out": {"input_ids": torch.ones(2)}}, r"held_out is a dict: pass a list of batches, as \[batch\]"),
        ({"evaluate_every": 0}, "pass a positive number of steps"),
        ({"workers": 0}, 'workers=0: pass a number of processes of at least 1, or "auto"'),
        ({"make_relay": 1}, r"pass a function make_relay\(seed, \*\*factors\)"),
    ],
)
def test_an_argument_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"make_relay": make_relay, "variants": {"a": None}, "steps": 2, "batches": batches, "folder": tmp_path}
    with pytest.raises((TypeError, ValueError), match=message):
        Study(**(given | changes))


def test_wrong_factors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr=0.1: pass a list of the factor's values, as lr=\[1e-3, 3e-3\]"):
        grid(lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"depends on 'depth', which is no factor: pass depth=\[...\]"):
        grid(lambda depth: None, lr=[1])
    with pytest.raises(ValueError, match="'lr' is a factor and a label: rename one of them"):
        Variant(None, {"lr": 1}, {"lr": 2})


def test_a_factor_that_make_relay_does_not_take_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    def make(seed: int, layers: int, lr: float = 0.1) -> Relay:
        raise AssertionError("nothing may be trained")

    def study(factors: dict[str, Any], make_relay: Any = make) -> Study:
        variants = {"good": Variant(factors={"layers": 2}), "odd": Variant(factors=factors)}
        return Study(make_relay, variants, steps=2, batches=batches, folder=tmp_path)

    for factors, reason in (
        (
            {"layers": 2, "leyers": 3},
            "got an unexpected keyword argument 'leyers'; its parameters after the seed are layers, lr",
        ),
        ({"lr": 0.2}, "missing a required argument: 'layers'; its"),
        ({"layers": 2, "seed": 3}, "multiple values for argument 'seed'"),
    ):
        with pytest.raises(TypeError, match=f"variant 'odd' has the factors .*{reason}.*Correct the name"):
            study(factors)
    study({"layers": 3, "lr": 0.2})
    study({"layers": 2, "leyers": 3}, lambda seed, layers, **others: make_relay(seed))
    with pytest.raises(TypeError, match="its parameters after the seed are none"):
        study({}, lambda seed: make_relay(seed))
    assert not [*tmp_path.iterdir()]


def test_another_study_in_the_folder_is_refused(undisturbed: Study) -> None:
    with pytest.raises(ValueError, match="holds another study: steps was 6 and is 7; pass another folder="):
        make_study(undisturbed.folder, steps=7)
    with pytest.raises(ValueError, match="holds another study: grown was {'schedule': \"Depth.* and is None"):
        make_study(undisturbed.folder, ["plain"])


def test_a_relay_that_cannot_be_used_is_refused_with_its_run(tmp_path: Path) -> None:
    def make(made: Any) -> Study:
        return Study(lambda seed: made, {"a": None, "b": None}, steps=2, batches=batches, folder=tmp_path)

    with pytest.raises(TypeError, match=r"make_relay returned a NoneType: return a Relay, or a pair") as caught:
        make(None).run(report=None)
    assert "variants a, b, seed 0; run() resumes there" in caught.value.__notes__[0]
    relay, _ = make_relay(0)
    with relay:
        relay.step(make_batch())
        with pytest.raises(ValueError, match="a relay after 1 steps: make a new model and a new relay"):
            make(relay).run(report=None)


def test_two_processes_do_not_run_one_study(undisturbed: Study) -> None:
    (undisturbed.folder / "running").write_text(str(os.getppid()))
    try:
        with pytest.raises(RuntimeError, match=f"process {os.getppid()} runs the study in .*: wait for it"):
            undisturbed.run(report=None)
    finally:
        (undisturbed.folder / "running").unlink()


# -- runs of different lengths -------------------------------------------------------------------------------------------

RATE_VARIANTS: dict[str, Any] = {
    "six": Depth(2, shrink="top") + WarmupStableDecay(6, 1, 2),
    "four": Variant(WarmupStableDecay(4, 1, 2), steps=4),
    "grown": Depth({0: 2, 4: 3}, grow="top") + WarmupStableDecay(6, 1, 2),
}


def make_plain_relay(seed: int) -> Relay:
    return make_relay(seed)[0]


def rate_study(folder: Path, *names: str) -> Study:
    variants = {name: RATE_VARIANTS[name] for name in names or RATE_VARIANTS}
    options: dict[str, Any] = {"make_relay": make_plain_relay, "seeds": [1], "steps": 6, "batches": batches}
    return trained(Study(variants=variants, held_out=[make_batch()], folder=folder, evaluate_every=100, **options))


def test_runs_of_different_lengths_and_decays_share_their_beginning(tmp_path: Path) -> None:
    torch.manual_seed(7)
    study = rate_study(tmp_path / "all")
    # Two steps at full rate are of all three; the decay of the long runs begins with step 4, as does the growth.
    assert (study.saving.steps, study.saving.trained_steps) == (16, 2 + 2 + 2 + 2 * 2)
    frame = study.frame(seconds=False)
    rates = frame.query("split == 'train'").groupby("variant")["lr"].apply(list)
    assert rates["four"] == pytest.approx([1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])
    assert rates["grown"] == rates["six"] == pytest.approx([*[1e-2] * 4, 2e-2 / 3, 1e-2 / 3])
    ends = frame.query("split == 'held out'").groupby("variant")["step"].apply(list)
    assert ends["four"] == [4] and ends["grown"] == ends["six"] == [6]
    for name in RATE_VARIANTS:
        torch.manual_seed(7)
        alone = rate_study(tmp_path / name, name).frame(seconds=False)
        assert alone.equals(frame.query("variant == @name").reset_index(drop=True))


def test_a_variant_ends_with_its_own_budget_in_the_middle_of_a_shared_run(tmp_path: Path) -> None:
    variants = {"long": None, "short": Variant(steps=2)}
    study = trained(make_study_of(tmp_path, variants))
    assert study.saving.trained_steps == 4 and [study.last_counts(name, 0).step for name in variants] == [4, 2]
    ends = study.frame().query("split == 'held out' and variant == 'short'")
    assert [*ends["step"]] == [2] and study.is_complete("short", 0) and study.share_done() == 1
    with pytest.raises(ValueError, match="holds another study"):
        make_study_of(tmp_path, {**variants, "short": Variant(steps=3)})
    with pytest.raises(ValueError, match="steps=0"):
        Variant(steps=0)


def test_the_curve_before_all_layers_run_is_of_the_running_ones(tmp_path: Path) -> None:
    variants = {"late": ActiveLayers({0: 1, 2: 2}), "shallow": Depth(1, shrink="top", park=None)}
    study = trained(make_study_of(tmp_path, variants, evaluate_every=1))
    assert [*study.frame().query("split == 'train' and variant == 'late'")["layers"]] == [1, 1, 2, 2]
    losses = study.frame().query("split == 'held out'").groupby("variant")["loss"].apply(list)
    assert losses["late"][:2] == losses["shallow"][:2] and losses["late"][2:] != losses["shallow"][2:]


def make_study_of(folder: Path, variants: dict[str, Any], evaluate_every: int = 100) -> Study:
    torch.manual_seed(7)
    options: dict[str, Any] = {"seeds": [0], "steps": 4, "evaluate_every": evaluate_every, "batches": batches}
    return Study(make_plain_relay, variants, held_out=[make_batch()], folder=folder, **options)


# -- recipes that draw random numbers ------------------------------------------------------------------------------------


def insert_drawn(relay: Relay, step: int) -> list[Insert]:
    """Insert layers whose weights are drawn from the generators of torch, Python and NumPy."""
    if step not in (1, 2):
        return []
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Tanh())
    torch.nn.init.constant_(layer[0].bias, random.random() + numpy.random.rand())
    return [Insert(1, module=layer)]


class DrawnDepth(Schedule):
    def edits(self, relay: Any) -> list[Insert]:
        return insert_drawn(relay, relay.steps)


def test_a_recipe_that_draws_random_numbers_is_the_same_alone_and_beside_others(tmp_path: Path) -> None:
    def make(seed: int) -> Relay:
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Tanh()) for _ in range(2)]
        model = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Relay(model, optimizer, EmulatedDevice(), layers=[*model[0]], loss=torch.nn.MSELoss())

    def draw(seed: int) -> Iterator[Any]:
        while True:
            yield torch.randn(4, 4), torch.randn(4, 1)

    recipes: dict[str, Any] = {
        "drawn": insert_drawn,
        "beside": lambda relay, step: insert_drawn(relay, step),
        "class": DrawnDepth(),
        "plain": lambda relay, step: [torch.rand(3)] and [],
    }

    def losses(name: str, *names: str, seed: int = 0) -> dict[str, list[float]]:
        variants = {each: recipes[each] for each in names}
        study = Study(make, variants, seeds=[seed], steps=4, batches=draw, folder=tmp_path / name, autosave_s=0.0)
        study.run(report=None)
        return study.frame().groupby("variant")["loss"].apply(list).to_dict()

    alone = {name: losses(name, name)[name] for name in recipes}
    assert losses("all", *recipes) == losses("turned", *reversed(recipes)) == alone
    assert alone["drawn"] == alone["beside"] == alone["class"] != alone["plain"]
    assert losses("other", "drawn", seed=1)["drawn"] != alone["drawn"]


def test_a_schedule_that_ends_with_its_run_is_the_remedy_for_one_that_is_cut(tmp_path: Path) -> None:
    """The note of the table is on the deep run alone, and names the length with which it is gone."""

    def make(seed: int, layers: int, length: int = 8) -> Any:
        model = torch.nn.Sequential(
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))), torch.nn.Linear(4, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        relay = Relay(model, optimizer, EmulatedDevice(), layers=[*model[0]], loss=torch.nn.MSELoss())
        return relay, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)

    def note(name: str, variants: dict[str, Any]) -> str:
        data = [(torch.ones(4, 4), torch.ones(4, 1))]
        options: dict[str, Any] = {"seeds": [0], "steps": 8, "batches": data, "held_out": data, "evaluate_every": 1}
        table = trained(Study(make, variants, folder=tmp_path / name, **options)).table()
        return next((each for each in table.notes if "schedule" in each), "")

    deep, shallow = Variant(factors={"layers": 2}), Variant(factors={"layers": 1})
    found = note("cut", {"deep": deep, "shallow": shallow})
    length = int(found.partition('"length": ')[2].partition("}")[0])
    assert f"deep after {length} of 8 steps" in found and "shallow" not in found and 4 <= length < 8
    remedy = Variant(factors={"layers": 2, "length": length}, steps=length)
    assert not note("ended", {"deep": remedy, "shallow": shallow})

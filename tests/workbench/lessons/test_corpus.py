"""The demo's text: which files count, that it is always the same, and its entropy against brute force."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from workbench.lessons.corpus import byte_entropy, draw_windows, find_sources, is_held_out, load_corpus


def make_library(folder: Path, count: int = 100) -> dict[str, bytes]:
    files = {f"package{i % 3}/module{i}.py": f"# {i} ä\n".encode() * (i + 1) for i in range(count)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def test_sources_are_sorted_without_tests_and_packages(tmp_path: Path) -> None:
    wanted = ["a.py", "b/__init__.py", "b/a.py", "b/test.py", "testing/c.py"]
    others = [
        "site-packages/numpy/a.py",
        "dist-packages/a.py",
        "test/test_os.py",
        "b/tests/test_b.py",
        "idlelib/idle_test/mock.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "a.txt",
    ]
    for name in [*reversed(wanted), *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert find_sources(tmp_path) == wanted


def test_corpus_is_every_file_once(tmp_path: Path) -> None:
    files = make_library(tmp_path)
    corpus = load_corpus(tmp_path)
    held_out = b"".join(files[name] for name in sorted(files) if is_held_out(name))
    train = b"".join(files[name] for name in sorted(files) if not is_held_out(name))
    assert bytes(corpus.held_out.tolist()) == held_out and bytes(corpus.train.tolist()) == train
    assert corpus.files == len(files) and corpus.train.dtype == torch.uint8


def test_a_new_file_moves_no_other_between_train_and_held_out(tmp_path: Path) -> None:
    files = make_library(tmp_path)
    before = {name for name in find_sources(tmp_path) if is_held_out(name)}
    make_library(tmp_path, 200)
    assert {name for name in find_sources(tmp_path) if is_held_out(name)} & set(files) == before


def test_the_standard_library_is_the_same_every_time() -> None:
    first, second = load_corpus(), load_corpus()
    assert torch.equal(first.train, second.train) and torch.equal(first.held_out, second.held_out)
    assert len(first.train) > 1_000_000  # a library without its sources would be a few files
    assert 0.02 < len(first.held_out) / (len(first.train) + len(first.held_out)) < 0.3


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="0 Python source file.* has no sources of its standard library"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("content", [b"aaab", b"import this\n", bytes(range(256)) * 3, "naïve → ☃".encode()])
def test_entropy_is_that_of_counting(content: bytes) -> None:
    shares = [count / len(content) for count in Counter(content).values()]
    assert byte_entropy(as_tensor(content)) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)


def test_entropy_of_the_simplest_texts() -> None:
    assert byte_entropy(as_tensor(b"a" * 100)) == 0.0
    assert byte_entropy(as_tensor(bytes(range(256)))) == pytest.approx(math.log(256), rel=1e-12)


def test_windows_are_pieces_of_the_text() -> None:
    text = as_tensor(bytes(range(200)))
    windows = draw_windows(text, rows=50, context=12, generator=generator())
    assert windows.shape == (50, 12) and windows.dtype == torch.long
    assert all(bytes(window.tolist()) in bytes(range(200)) for window in windows)


def test_windows_reach_both_ends_and_no_further() -> None:
    windows = draw_windows(as_tensor(b"abcde"), rows=100, context=4, generator=generator())
    assert {bytes(window.tolist()) for window in windows} == {b"abcd", b"bcde"}


def test_windows_come_from_the_generator_alone() -> None:
    text = as_tensor(bytes(range(256)))
    drawn = [draw_windows(text, 8, 16, generator(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 3 bytes, a window 4"):
        draw_windows(as_tensor(b"abc"), 1, 4, generator())

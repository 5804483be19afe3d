"""Pictures of a look inside show all records, give reasons for missing ones, and stay small."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import pytest
import torch

from l2l_core import Inside
from l2l_core.inside import BINS, ActivationStats, Continuation, LayerObservation, LensResult
from workbench.pictures import Picture, show_attention, show_lens, show_spreads, show_stream, text_html, text_table
from workbench.pictures.inside_stream import describe_cost, drawn_layers
from workbench.readings import number_layers

LETTERS: Callable[[Sequence[int]], str] = lambda tokens: "".join(chr(97 + token % 26) for token in tokens)  # noqa: E731


def spread(scale: float = 1.0) -> ActivationStats:
    counts = tuple(range(BINS))
    return ActivationStats(2000, 0.25 * scale, scale, 1.5 * scale, 0.125, 3, counts, -2 * scale, 2 * scale, 7)


def make(layers: int = 3, heads: int = 2, positions: int = 4, **changes: object) -> Inside:
    """Return a look inside with made-up records."""
    generator = torch.Generator().manual_seed(0)
    keys = tuple(f"L{i:03d}" for i in range(layers))
    maps = torch.rand(layers, heads, positions, positions, generator=generator).tril()
    maps = maps / maps.sum(-1, keepdim=True)
    passings = tuple(
        LayerObservation(
            key, f"h.{i}", 0, i, spread(), spread(1.0 + i), 0.5 / (1 + i), 0.75, torch.rand(positions) + 0.1, (maps[i],)
        )
        for i, key in enumerate(keys)
    )
    depths = tuple(
        LensResult(
            i + 1,
            key,
            f"h.{i}",
            0,
            3.5 - i / layers,
            torch.randint(26, (positions, 3), generator=generator),
            torch.rand(positions, 3, generator=generator).sort(-1, descending=True).values,
        )
        for i, key in enumerate(keys)
    )
    written = tuple(Continuation(i + 1, key, f"h.{i}", (2, 0, 19)) for i, key in enumerate(keys))
    values = {
        "step": 7,
        "branch": "main",
        "keys": keys,
        "micro_batches": (0,),
        "row": 1,
        "tokens": {0: torch.arange(positions + 2)},
        "passings": passings,
        "depths": depths,
        "prompt": 2,
        "written": written,
        "passes": 13,
        "seconds": 0.25,
    }
    return Inside(**{**values, **changes})  # type: ignore[arg-type]


def all_of(seen: Inside) -> dict[str, Picture]:
    numbers = number_layers(seen.keys)
    return {
        "stream": show_stream(seen, numbers),
        "spread": show_spreads(seen, numbers),
        "attention": show_attention(seen, numbers, None),
        "lens": show_lens(seen, numbers, LETTERS),
    }


def words(picture: Picture) -> str:
    return " ".join(re.findall(r"<(?:text|title)[^>]*>([^<]*)<", picture.svg))


def test_the_stream_has_a_point_for_every_figure() -> None:
    picture = all_of(make())["stream"]
    for tip in ("layer 0 · L000: size of the stream (rms) 1.5", "layer 2 · L002: added / stream 0.167"):
        assert tip in words(picture), tip
    assert "loss if it ends here 2.83" in words(picture) and "position 0" in words(picture)
    row = picture.table.rows[1]
    assert row == ("1 · L001", "0", "0.5", "2", "3", "12.5%", "3", "0.25", "0.75")


def test_points_lie_where_their_figures_are() -> None:
    """The axis of the stream's size begins at zero."""
    picture = all_of(make())["stream"]
    tips = re.findall(r'y="([\d.]+)"[^>]*><title>layer (\d)[^<]*rms\)', picture.svg)
    zero = 128 - 3  # the foot of the axis, and half of a point
    heights = [zero - float(y) for y, _ in tips]
    assert heights[1] / heights[0] == pytest.approx(2, abs=0.05) and heights[2] / heights[0] == pytest.approx(
        3, abs=0.05
    )


def test_ridges_are_as_high_as_their_bins() -> None:
    picture = all_of(make())["spread"]
    ridges = re.findall(r'<path d="M([-\d.]+) (\d+)(V[^"]+)z" class="l2l-ridge"', picture.svg)
    assert len(ridges) == 3
    for _, foot, line in ridges:
        tops = [float(foot) - float(y) for y in re.findall(r"V([\d.]+)H", line)]
        assert len(tops) == BINS and tops[-1] == max(tops) and tops[0] == 0
        assert tops[24] / tops[47] == pytest.approx(24 / 47, abs=0.02)
    assert "micro-batch 0, all of its rows" in words(picture)
    assert picture.table.rows[2][1:] == ("-6", "6", "7", "12.5%")


def test_attention_shows_the_heads_of_one_layer_and_all_layers() -> None:
    seen = make()
    picture = show_attention(seen, number_layers(seen.keys), "L001")
    assert picture.svg.count("<image") == 3 + 2 + 1, "a map for each layer, each head, and the bar"
    assert "layer 1 · L001: 2 heads, first 4 positions" in words(picture)
    entropy = -(seen.passings[1].attention[0].double().clamp(min=1e-30).log() * seen.passings[1].attention[0]).sum(-1)
    assert picture.table.rows[1][4] == f"{float(entropy.mean()):.3g}"


def test_without_attention_the_picture_gives_the_reason() -> None:
    seen = make()
    bare = tuple(
        LayerObservation(one.key, one.name, 0, 0, None, None, None, None, None, (), "this layer calls no attention")
        for one in seen.passings
    )
    pictures = all_of(make(passings=bare, depths=()))
    assert "this layer calls no attention" in words(pictures["attention"])
    assert "the head was not requested" in words(pictures["lens"]) and "no values" in words(pictures["stream"])
    assert "no layer has a hidden state" in words(pictures["spread"])


def test_the_lens_has_a_token_for_every_position_and_depth() -> None:
    seen = make()
    picture = all_of(seen)["lens"]
    for one in seen.depths:
        assert one.tokens is not None and one.chances is not None
        for tokens, chances in zip(one.tokens.tolist(), one.chances.tolist(), strict=True):
            assert ", ".join(f"{LETTERS([t])} {p:.0%}" for t, p in zip(tokens, chances, strict=True)) in words(picture)
    assert picture.table.header[2:] == ("1 layer", "2 layers", "3 layers")
    assert picture.table.rows[0] == ("loss", "", "3.5", "3.17", "2.83")
    first = seen.depths[0]
    assert first.tokens is not None and first.chances is not None
    best = f"{LETTERS([int(first.tokens[3, 0])])} {float(first.chances[3, 0]):.0%}"
    assert picture.table.rows[4][:3] == ("3", "d", best)
    assert "loss 3.17" in words(picture) and "0  a" in words(picture) and "next in the row" in words(picture)
    opacities = [float(each) for each in re.findall(r'<g fill-opacity="([\d.]+)"', picture.svg)]
    tops = [float(p) for one in seen.depths for p in one.chances[:, 0]]  # type: ignore[index]
    assert sorted(range(12), key=opacities.__getitem__)[-1] == tops.index(max(tops))


def test_a_depth_that_could_not_be_run_is_a_gap_with_a_reason() -> None:
    seen = make()
    gap = LensResult(1, "L000", "h.0", 0, why_not="ValueError: all of <it> would sit out")
    picture = all_of(make(depths=(gap, *seen.depths[1:])))["lens"]
    assert "would sit out" in picture.svg and f"1 layer: {gap.why_not}." in picture.table.note
    assert "ValueError" in words(all_of(make(depths=(gap,)))["lens"])


def test_text_is_shown_as_it_is_and_escaped() -> None:
    seen, numbers = make(), {"L000": 0, "L001": 1, "L002": 2}
    output = text_html(seen, numbers, lambda tokens: "<b>" * len(tokens))
    assert "<mark>&lt;b&gt;&lt;b&gt;</mark>&lt;b&gt;&lt;b&gt;&lt;b&gt;" in output and "<b>" not in output
    assert "<mark>ab</mark>cat" in text_html(seen, numbers, LETTERS)
    assert "<mark> 0 1</mark> 2 0 19" in text_html(seen, numbers, None), "numbers without a decoder"
    assert text_table(seen, numbers, LETTERS).rows[2] == ("3 layers, up to 2 · L002", "cat")
    failed = make(written=(Continuation(1, "L000", "h.0", (), "ValueError: <no>"),))
    assert "ValueError: &lt;no&gt;" in text_html(failed, numbers, LETTERS)


def test_the_cost_is_described() -> None:
    assert re.fullmatch(
        r"took 250 ms for 13 passes of a micro-batch, keeps [\d.]+ kB on the host", describe_cost(make())
    )


def test_pictures_stay_small_and_whole_at_any_size() -> None:
    seen = make(layers=200, heads=64, positions=64)
    assert [one.key for one in drawn_layers(seen)][::23] == ["L000", "L199"]
    for name, picture in all_of(seen).items():
        assert len(picture.svg.encode()) < 60_000, (name, len(picture.svg.encode()))
        ElementTree.fromstring(picture.svg)
        assert not math.isnan(len(picture.table.rows)) and "nan" not in picture.svg, name


def test_figures_that_are_not_finite_break_no_picture() -> None:
    seen = make()
    nan = math.nan
    wild = ActivationStats(8, nan, nan, nan, 0.0, 8, (), 0.0, 0.0, 0)
    odd = LayerObservation("L000", "h.0", 0, 0, wild, wild, nan, nan, torch.tensor([nan, 1.0, math.inf, 0.0]))
    for name, picture in all_of(make(passings=(odd, *seen.passings[1:]))).items():
        ElementTree.fromstring(picture.svg)
        assert "nan" not in re.sub(r"<title>[^<]*</title>", "", picture.svg), name

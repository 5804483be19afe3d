"""Ways to train over ranks: selection, settings, still, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import workbench
from l2l_core import Event, Trace
from l2l_core.parallel import ParallelRun, PipelineRun, RankReport, WayRank
from l2l_core.pipelines import LAYOUT_WAYS, RankCluster, TransformerShape
from l2l_core.trace import MemorySample, WorkerInfo
from workbench.panels.layer_picker import LayerPicker
from workbench.parallel_bench import ParallelBench
from workbench.pictures import rank_chart
from workbench.pictures.theme import LANE_NAMES

SMALL = TransformerShape(layers=8, width=1024, heads=16, sequence=512, vocabulary=8192)


def make_bench(**settings: Any) -> ParallelBench:
    return workbench.Parallel(SMALL, 8, rows=64, **settings)


def picker_of(bench: ParallelBench) -> LayerPicker:
    (picker,) = [one for one in bench.widget.children if isinstance(one, LayerPicker)]
    return picker


def shown(bench: ParallelBench) -> str:
    return bench._explanation.value


def test_every_way_is_pressed() -> None:
    bench = make_bench()
    assert bench.table.verdict(next(i for i, way in enumerate(LAYOUT_WAYS) if way.name == bench.chosen)) == (
        "the fastest that fits"
    )
    for at, way in enumerate(LAYOUT_WAYS):
        picker_of(bench).chosen = f"layout-{at}"  # as a click does
        assert bench.chosen == way.name and f"<strong>{way.name}</strong>" in shown(bench)
        assert f'<tr data-key="layout-{at}" class="' in bench._html.value
    bench.select("Varuna")
    assert "<pre>" in shown(bench) and "R" in shown(bench)
    with pytest.raises(ValueError, match="choose one of one rank, recompute"):
        bench.select("ZeRO 4")
    bench.close(), bench.close()


def test_sliders_change_everything() -> None:
    bench = make_bench()
    before, controls = bench.table, bench._controls
    controls["memory"].value = 1
    assert bench.table is not before and bench.table.search.cluster.memory_bytes == 1e9
    assert "does not fit" in bench._html.value and "budget 1 GB" in bench._picture.value
    controls["ranks"].value = 1
    assert "needs several ranks" in bench._html.value or bench.table.search.cluster.ranks == 1
    assert all(cost is None or cost.layout.ranks == 1 for cost in bench.table.costs)
    controls["model"].value = "7.5B"
    assert "7.47 billion parameters" in str(bench) and "None of these ways fits" in str(bench)
    controls["memory"].value, controls["ranks"].value = 80, 8
    controls["link"].value, controls["host"].value = 1.0, 1.0
    assert bench.table.search.cluster == RankCluster(8, link_bytes_per_s=1e9, host_bytes_per_s=1e9)
    bench.close()


def test_the_still_has_picture_tables_and_finder(capsys: pytest.CaptureFixture[str]) -> None:
    bench = make_bench(cluster=RankCluster(1, 4e9, node=4))
    bench.select("1F1B")
    still: dict[str, Any] = bench.still()
    assert still["text/html"].count("<svg") == 1 and 'class="l2l-chosen"><th scope="row">1F1B' in still["text/html"]
    assert "The finder" in still["text/plain"] and "yours, 0.11" in bench._name and "4 GB" in still["text/plain"]
    assert bench._repr_mimebundle_().keys() - still.keys() == {"application/vnd.jupyter.widget-view+json"}
    bench._ipython_display_()  # outside of notebooks, text is printed
    assert "Fastest of these ways that fits" in capsys.readouterr().out
    bench.close()
    assert bench._repr_mimebundle_().keys() == still.keys()


def make_run(way: str) -> ParallelRun:
    """Two ranks, made up: the second computes while the first waits for a message."""
    reports: list[WayRank] = []
    for rank, start_s in enumerate((0.0, 0.002)):
        events = [
            Event("compute", "forward", start_s, start_s + 0.001, "0", 0),
            Event("gather", "gather", 0.002, 0.003, nbytes=8_000),
            Event("compute", "update", 0.003, 0.004),
        ]
        sample = MemorySample(0.0, "device", {"weights": 1_000, "activations": 500_000})
        trace = Trace.of(events, [sample], step=3, names={"0": "layers.0"}, worker=WorkerInfo(rank, 2))
        reports.append(WayRank(rank, 7_000.0, 1_000, 2_000, 501_000, trace))
    return ParallelRun(way, reports, 0.0, 0.0, 7_000.0, 7_000.0, 7_000.0, 1_000, 2_000, 2_000, {})


def test_runs_are_shown_with_rows_lanes_and_memory_of_their_ranks() -> None:
    bench = make_bench(run=make_run("ZeRO 3"))
    html = bench._run_html.value
    assert html.count("<svg") == 5 and "ZeRO 3, run on 2 ranks: the last step" in html
    assert ">compute<" in html and ">gather<" in html and ">Device<" in html
    absent = [f">{LANE_NAMES[lane]}<" for lane in ("h2d", "d2h", "eps")] + ["copies hidden", ">Host<", "no memory was"]
    assert not [words for words in absent if words in html], "a rank has no copies to a host, and no samples of one"
    ranks = rank_chart.ranks_table(make_run("ZeRO 3"))
    assert [row[1:] for row in ranks.rows] == [
        ("1 ms", "1 ms", "1 ms", "1 ms", "7 kB", "501 kB"),
        ("1 ms", "1 ms", "1 ms", "0 ms", "7 kB", "501 kB"),
    ]
    assert html in bench.still()["text/html"] and ranks.to_text() in bench.still()["text/plain"]
    pipeline = PipelineRun("1F1B", [], {}, {}, [RankReport(rank.rank, trace=rank.trace) for rank in make_run("").ranks])
    bench.show(pipeline)
    assert "1F1B, run on 2 ranks" in bench._run_html.value and "ZeRO 3, run" not in bench._run_html.value
    bench.close()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(("8B",), "choose one of 1.7B"), ((SMALL, 0), "each is 1 or more")],
)
def test_other_arguments_are_refused(arguments: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        workbench.Parallel(*arguments)

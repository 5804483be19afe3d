"""Equal bits on other processors: relay and in core, and insertions that are said to be exact, under other instruction sets.

Which kernels PyTorch and oneDNN take is decided when a process begins, so each setting has a process of its own. Among the
models are some that are wide enough for several threads to share their operations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from patience import HANG_S, rarely

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
}
FEW = ["gpt2", "t5", "batch_norm", "swin", "wide text", "wide pictures"]
EXACT = ["gpt2", "t5 encoder", "swin block", "torch, norm first"]
SLOW = [("default", 1), ("avx2", 1), ("onednn-avx2", 1), ("onednn-avx2", 2), ("onednn-sse41", 1)]
DEFAULT = [rarely("default", 2), rarely("avx2", 2), ("onednn-sse41", 2)]


def has(name: str) -> bool:
    """Whether this processor has the instructions; oneDNN's setting is an upper limit."""
    return name != "avx2" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512", "AVX512_VNNI")


def run_under(name: str, threads: int, kinds: list[str], cases: list[str]) -> None:
    if not has(name):
        pytest.skip(f"no {name} on this processor")
    env = {**os.environ, **SETTINGS[name], "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "tests/support", "tests/core/surgery"))
    command = [sys.executable, __file__, str(threads), ",".join(kinds), ";".join(cases)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("name, threads", DEFAULT)
def test_a_few_kinds(name: str, threads: int) -> None:
    run_under(name, threads, FEW, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name, threads", [*SLOW, *DEFAULT])
def test_every_kind(name: str, threads: int) -> None:
    run_under(name, threads, ["*"], ["*"])


# -- in the process of its own ---------------------------------------------------------------------------------------


def wide_kinds() -> list[object]:
    """Models with operations that PyTorch shares among threads, and sums that would show it."""
    import transformers as hf
    from torch import nn
    from zoo import Kind, cross_entropy

    def draws(*shape: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def make(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(rows, *shape, generator=generator)
            return x, torch.randint(5, (rows,), generator=generator)

        return make

    def text(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
        ids = torch.randint(300, (rows, 47), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids.clone()}

    def gpt() -> nn.Module:
        torch.manual_seed(0)
        sizes = dict(n_layer=2, n_embd=200, n_head=4, vocab_size=301, n_positions=48)
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train()

    def pictures() -> nn.Module:
        torch.manual_seed(0)

        def block(channels: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(channels, 40, 3, padding=1), nn.BatchNorm2d(40), nn.ReLU())

        return nn.Sequential(*(block(c) for c in (3, 40, 40)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5))

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.LSTM(130, 130, batch_first=True) for _ in range(2))
            self.head = nn.Linear(130, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return self.head(x.mean(1))

    return [
        Kind("wide text", gpt, text),
        Kind("wide pictures", pictures, draws(3, 19, 19), cross_entropy, ["0", "1", "2"]),
        Kind("wide lstm", Lstm, draws(31, 130), cross_entropy),
    ]


def main(threads: int, kinds: list[str], cases: list[str]) -> None:
    """Raises AssertionError where bits differ."""
    import oracle
    import test_identity
    from zoo import KINDS

    from l2l_core import RelayConfig

    torch.set_num_threads(threads)
    failures = []

    def check(what: str, run: Callable[[], None]) -> None:
        torch.manual_seed(0)
        try:
            run()
        except AssertionError as error:
            failures.append(f"{what}: {str(error)[:400]}")

    def relay_and_in_core(kind: object, config: RelayConfig) -> None:
        oracle.assert_equal(oracle.run_both(kind, 2, config, partial(oracle.adamw, lr=1e-2), rows=7))  # type: ignore

    for kind in [*KINDS, *wide_kinds()]:
        if kinds == ["*"] or str(kind) in kinds:  # AdamW, in parts that are not the same size; clipped, as sums are
            for config in (
                RelayConfig(micro_batches=4, stash="host"),
                RelayConfig(micro_batches=2, update="deferred", max_grad_norm=0.1),
            ):
                check(f"{kind} with {config.update} updates", partial(relay_and_in_core, kind, config))
    for case in test_identity.CASES:
        if case.exact and (cases == ["*"] or str(case) in cases):
            for trained in (False, True):
                what = f"identity of {case}{', trained' if trained else ''}"
                check(what, partial(test_identity.test_insertion_leaves_the_loss_and_can_learn, case, trained))
    print(f"capability {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(";"))

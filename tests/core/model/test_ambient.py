"""State that PyTorch and Python keep per thread travels with its micro-batch: blocks, modes, random streams.
R3 is rule 3 of the design's paused-forwards.md.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_trains, chain_of, kind_of, stashes
from oracle import assert_equal, both, micro_batches_of, run_both
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from zoo import STEPS, WIDTH, Chain, ResidualMlp, sequences

from l2l_core import Relay, RelayConfig


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Doubling(TorchFunctionMode):
    """Doubles what gelu gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.gelu else out


class DoublingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.gelu.default else out


def rounded(t: Tensor) -> Tensor:
    return t.bfloat16().float() if t.dtype == torch.float32 else t


BLOCKS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "function_mode": Doubling,
    "dispatch_mode": DoublingBelow,
}


@pytest.mark.parametrize("name", BLOCKS)
@stashes
def test_block_around_the_layers(name: str, stash: str) -> None:
    """R3: layers, their recompute and the shell between them stand inside the block; what is outside does not."""
    outside: list[Any] = []

    class Within(Chain):
        def walk(self, h: Tensor) -> Tensor:
            outside.append(thread_state())
            with BLOCKS[name]():
                for layer in self.layers:
                    h = layer(h) * F.gelu(h)
            outside.append(thread_state())
            return h.float()

    before = thread_state()
    plain, changed = chain_of(Attention, ResidualGelu), chain_of(Attention, Within)
    assert_trains(changed, stash)
    assert thread_state() == before and all(state == before for state in outside)
    if name not in ("sdpa_kernel", "save_on_cpu"):  # the block does something
        first = [run_both(kind, 2, RelayConfig(seed=0))[1].result.loss for kind in (plain, changed)]
        assert first[0] != first[1]


class ResidualGelu(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) * F.gelu(h)
        return h


def thread_state() -> tuple[Any, ...]:
    c = torch._C
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        sum(isinstance(mode, Doubling) for mode in _get_current_function_mode_stack()),
        sum(isinstance(mode, DoublingBelow) for mode in _get_current_dispatch_mode_stack()),
        c._autograd._top_saved_tensors_default_hooks(True),
    )


def test_caller_in_a_block() -> None:
    """R3: a block around the step itself holds for every micro-batch, and still after the step."""
    kind = chain_of(ResidualMlp)
    with both(kind, RelayConfig(seed=0, micro_batches=3, stash="host")) as pair, torch.autocast("cpu", torch.bfloat16):
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        assert torch.is_autocast_enabled("cpu")


def test_steps_without_grad_around() -> None:
    """R3: a first layer under no_grad gets no backward, the others train."""

    class NoGradFirst(Chain):
        def walk(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.layers[0](h)
            return self.layers[2](self.layers[1](h))

    assert_trains(chain_of(ResidualMlp, NoGradFirst))


class Draws(ResidualMlp):
    """Draws from PyTorch's and Python's generators, in the layer and in the shell."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand(()) + random.random())


class ShellDraws(Chain):
    def walk(self, h: Tensor) -> Tensor:
        drawn = []
        for layer in self.layers:
            drawn.append(float(torch.rand(())))
            h = layer(h) * random.random()
            drawn.append(random.random())
        self.drawn.append(drawn)
        return h

    drawn: list[list[float]] = []


def test_random_streams() -> None:
    """R17: `torch.manual_seed(config.micro_batch_seed(step, k))` before each micro-batch gives the same numbers."""
    kind = chain_of(Draws, ShellDraws)
    assert_trains(kind)
    config = RelayConfig(micro_batches=3, seed=5, verify="never")
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        for step in range(2):
            ShellDraws.drawn.clear()
            twin = copy.deepcopy(model)
            relay.step(kind.make_batch(6, step))
            drawn = ShellDraws.drawn[:]
            ShellDraws.drawn.clear()
            for k in range(3):
                torch.manual_seed(config.micro_batch_seed(step, k))
                random.seed(config.micro_batch_seed(step, k))
                twin(kind.make_batch(6, step)[0][:2])
            assert drawn == ShellDraws.drawn
    assert len({config.micro_batch_seed(step, k) for step in range(20) for k in range(20)}) == 400


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.1, batch_first=True)
        self.embed, self.encoder, self.head = nn.Linear(16, WIDTH), nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # that is torch's own doing, in evaluation
@stashes
def test_transformer_encoder_takes_its_fast_path(stash: str) -> None:
    """R3: it looks for function modes, and takes another path with other bits if there is one."""

    def padded(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, target = sequences(rows, seed)
        return x, torch.arange(STEPS) >= torch.arange(rows)[:, None] % 4 + 4, target

    kind = kind_of(Encoder, padded)
    assert_trains(kind, stash)
    model, batch = kind.make_model().eval(), padded(6, 0)
    with torch.no_grad():
        expected = torch.cat([model(*part[:-1]) for part in micro_batches_of(batch, 3)])
    with Relay(
        model, loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(seed=0, micro_batches=3, stash=stash)
    ) as relay:
        assert torch.equal(relay.forward(batch), expected)

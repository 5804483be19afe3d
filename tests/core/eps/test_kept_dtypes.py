"""Frozen parameters of any dtype keep their bytes: on the host, on the link, in a slot, in saves and through edits."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from late_cuda import LateDevice
from oracle import micro_batches_of, state_of
from safetensors.torch import load_file
from torch import Tensor, nn

from l2l_core import (
    Drop,
    Duplicate,
    EmulatedDevice,
    FileShelf,
    Freeze,
    Insert,
    Interpolate,
    Profile,
    Relay,
    RelayConfig,
    Swap,
    Unfreeze,
    empty_weights,
    in_bf16,
    simulate,
)
from l2l_core.eps.blocks import Block

try:
    import bitsandbytes
except ImportError:  # the extra "quant": cases with its layers run where it is installed
    bitsandbytes = None

WIDTH, LAYERS, ROWS, K = 24, 3, 8, 4
DTYPES = [torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Int8(nn.Module):
    """A linear layer of 8-bit integers, with a float32 scale for each row."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        full = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        scale = full.abs().amax(1, keepdim=True) / 127
        whole = (full / scale).round()
        self.offset = 0 if dtype == torch.int8 else 128
        self.weight, self.scale = frozen((whole + self.offset).to(dtype)), frozen(scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.float() - self.offset) * self.scale)


class UInt4(nn.Module):
    """A linear layer of 4-bit integers, two in a byte, with a float16 scale for each row; the width is odd in bytes."""

    def __init__(self) -> None:
        super().__init__()
        full = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        self.scale = frozen((full.abs().amax(1, keepdim=True) / 7).half())
        codes = (full / self.scale.float()).round().clamp(-7, 7).add(8).to(torch.uint8)
        self.packed = frozen(codes[:, ::2] | codes[:, 1::2] << 4)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)
        return F.linear(x, (codes.float() - 8) * self.scale.float())


class Cast(nn.Module):
    """A linear layer of another floating dtype, transposed in memory, which computes in that of its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = (
            frozen((torch.randn(WIDTH, WIDTH) / WIDTH**0.5).to(dtype).t()),
            frozen(torch.ones(1, dtype=dtype)[0]),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.bias.to(x.dtype)


class Masked(nn.Module):
    """A linear layer without what a mask of bools takes out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = frozen(torch.randn(WIDTH, WIDTH) / WIDTH**0.5), frozen(torch.rand(WIDTH, WIDTH) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask)


class Rotated(nn.Module):
    """A filter in the frequency domain, complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = frozen(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, WIDTH)


BASES: dict[Any, Callable[[], nn.Module]] = {
    torch.int8: Int8,
    torch.uint8: UInt4,
    torch.float16: partial(Cast, torch.float16),
    torch.bfloat16: partial(Cast, torch.bfloat16),
    torch.float8_e4m3fn: partial(Cast, torch.float8_e4m3fn),
    torch.complex64: Rotated,
    torch.bool: Masked,
}


def four_bits(quant_type: str, nested: bool) -> nn.Module:
    layer = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, bias=False, quant_type=quant_type, compress_statistics=nested)
    return layer.requires_grad_(False).to("cpu")  # there its weight becomes codes


def eight_bits() -> nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    return layer.requires_grad_(False).to("cpu")


LIBRARY: dict[Any, Callable[[], nn.Module]] = {}
if bitsandbytes is not None:
    LIBRARY = {
        "nf4": partial(four_bits, "nf4", True),
        "nf4 without nested statistics": partial(four_bits, "nf4", False),
        "fp4": partial(four_bits, "fp4", True),
        "8 bits": eight_bits,
    }
BASES |= LIBRARY
# Every one of them takes a minute, so the default run has NF4, and `-m slow` the others
LIBRARY_CASES = [pytest.param(name, marks=pytest.mark.slow if name != "nf4" else ()) for name in LIBRARY]


class Layer(nn.Module):
    """A frozen base with an adapter (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.norm, self.base, self.dropout = nn.LayerNorm(WIDTH).requires_grad_(False), base, nn.Dropout(0.1)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.base(y) + F.linear(F.linear(self.dropout(y), self.a), self.b)


class Model(nn.Module):
    def __init__(self, *dtypes: Any) -> None:
        super().__init__()
        self.embed, self.head = BASES[dtypes[0]](), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(Layer(BASES[dtypes[i % len(dtypes)]]()) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(*dtypes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(*(dtypes or DTYPES)).train()


def batch_of(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(1000 + seed)
    return {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(5, (ROWS,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["y"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def every_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With all parameters in its groups, also those that are not trained."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


CONFIG = RelayConfig(micro_batches=K, stash="host", seed=3)


def make_relay(model: nn.Module, config: RelayConfig = CONFIG, optimizer: Any = adamw, **options: Any) -> Relay:
    return Relay(
        model, optimizer(model), options.pop("device", None) or EmulatedDevice(), loss=loss, config=config, **options
    )


class InCore:
    """Plain training of the same model on the same micro-batches."""

    def __init__(self, model: nn.Module, config: RelayConfig = CONFIG, optimizer: Any = adamw) -> None:
        self.model, self.config, self.optimizer, self.steps = model, config, optimizer(model), 0

    def step(self, batch: dict[str, Tensor]) -> float:
        losses = []
        for k, part in enumerate(micro_batches_of(batch, K)):
            torch.manual_seed(self.config.micro_batch_seed(self.steps, k))
            value = loss(self.model(part["x"]), part) / K
            value.backward()
            losses.append(value.detach())
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(sum(losses))


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def unlike(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters and buffers whose dtype, shape, strides or bits differ."""
    ours, theirs = state_of(one), state_of(other)
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, a in ours.items()
        if (a.dtype, a.shape, a.stride(), bits(a)) != ((b := theirs[name]).dtype, b.shape, b.stride(), bits(b))
    ]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function after which parameters kept as bytes show zeros between visits: who reads anything but a slot differs."""
    show, zeros = Block.host_views.fget, dict[Block, list[Tensor]]()
    assert show is not None

    def host_views(block: Block) -> list[Tensor]:
        if not block.in_bytes:
            return show(block)
        if block not in zeros:
            zeros[block] = [torch.zeros_like(view) for view in block.views]
        return zeros[block]

    yield lambda: monkeypatch.setattr(Block, "host_views", property(host_views))


# -- equal to plain training ---------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"stash": "device"},
    {"stash": "host", "ahead": 0},
    {"resident": 1, "keep": 2},
    {"schedule": "depth_first"},
    {"update": "deferred", "max_grad_norm": 0.1},
    {"rollback": True, "ahead": 2},
]
CASES: list[Any] = [
    *(((), settings) for settings in SETTINGS),  # every dtype in one model
    *(((dtype,), {"stash": "host"}) for dtype in (*DTYPES, *LIBRARY)),
    *(
        pytest.param((dtype,), settings, marks=pytest.mark.slow)
        for dtype in LIBRARY
        for settings in ({"schedule": "depth_first"}, {"keep": 2})
    ),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("late", [False, True], ids=["emulated", "late"])
@pytest.mark.parametrize(("dtypes", "settings"), CASES, ids=str)
def test_equal_to_plain_training(
    dtypes: tuple[Any, ...],
    settings: dict[str, Any],
    late: bool,
    poison: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps; from the second on, what is not trained shows zeros wherever it is not in a slot."""
    monkeypatch.setattr("l2l_core.schedule_rules.MIN_CHUNK_BYTES", 64)  # so that small layers are sent in chunks too
    config = RelayConfig(micro_batches=K, seed=3, **settings)
    model, twin = make_model(*dtypes), InCore(make_model(*dtypes), config)
    before = {name: bits(param) for name, param in model.named_parameters() if not param.requires_grad}
    relay = make_relay(model, config, device=LateDevice() if late else EmulatedDevice())
    first = relay.step(batch_of(0))
    assert first.loss == twin.step(batch_of(0)) and (late or first.verified.startswith("equal to the step in core"))
    assert not unlike(model, twin.model)
    poison()
    for unit in (relay.shell, *relay.stack):
        unit.set_data([view for block in unit.blocks for view in block.host_views])
    for seed in (1, 2):
        assert relay.step(batch_of(seed)).loss == twin.step(batch_of(seed))
    assert not {*unlike(model, twin.model)}.difference(before)
    blocks = relay.store.masters.blocks
    kept = {name: bits(view) for b in blocks for name, view in zip(b.names, b.views, strict=True)}
    assert {name: kept[name] for name in before} == before
    relay.close()


def padded(params: list[nn.Parameter]) -> int:
    """Bytes in a slot, where each parameter begins at a multiple of 64."""
    places = {(p.data_ptr(), p.dtype): p.numel() * p.dtype.itemsize for p in params}  # 8-bit codes have two names
    return sum(-(-nbytes // 64) * 64 for nbytes in places.values())


@pytest.mark.all_cases
@pytest.mark.parametrize("dtype", [*DTYPES, *LIBRARY_CASES], ids=str)
def test_loads_and_slots_have_the_bytes_of_the_dtypes(dtype: torch.dtype) -> None:
    with make_relay(make_model(dtype)) as relay:
        result = relay.step(batch_of(0))
        shell, layer = padded(relay.shell.params), padded(relay.stack[0].params)
        assert result.bytes_loaded == shell + (2 * LAYERS - 2) * layer  # there are two slots
        assert (
            max(
                sample.bytes_by_category.get("weights", 0) for sample in result.trace.memory if sample.place == "device"
            )
            == shell + 2 * layer
        )
        assert relay.stack[0].nbytes == layer and relay.host.by_category()["weights"] == shell + LAYERS * layer
        assert relay.forecast(batch_of(1)).peak_device_bytes == relay.step(batch_of(1)).peak_device_bytes
        trained = [p for unit in (relay.shell, *relay.stack) for p in unit.params if p.requires_grad]
        assert result.bytes_pushed == padded(trained)
        assert sum(1 for state in relay.optimizer.state.values() if state) == len(trained)


def test_device_bytes_are_flat_in_depth() -> None:
    peaks = set()
    for layers in (4, 16):
        model = make_model(torch.int8)
        model.layers = nn.ModuleList(Layer(Int8()) for _ in range(layers))
        with make_relay(model) as relay:
            peaks.add(relay.step(batch_of(0)).peak_device_bytes)
    assert len(peaks) == 1, peaks


@pytest.mark.parametrize("optimizer", [adamw, every_adamw])
def test_verify_compares_their_bytes(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_relay(make_model(), optimizer=optimizer) as relay:
        relay.step(batch_of(0))
        report = relay.verify(batch_of(1))
        assert report.equal and report.max_abs_diff == 0.0, str(report)
        block = next(block for block in relay.stack[0].blocks if block.in_bytes)
        run = relay._runner.step

        def damaging(*args: Any, **given: Any) -> Any:
            block.views[0].view(-1)[0] += 1
            return run(*args, **given)

        monkeypatch.setattr(relay._runner, "step", damaging)
        report = relay.verify(batch_of(1))
        assert not report.equal and block.names[0] in report.rows[1].different, str(report)


@pytest.mark.parametrize("kind", LIBRARY)
def test_verify_compares_scales_and_tables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that a relay alone changes is found, in the step's own rows."""
    with make_relay(make_model(kind)) as relay:
        relay.step(batch_of(0))
        block, run = next(block for block in relay.stack[0].blocks if block.in_bytes), relay._runner.step
        first = block.layout.pieces.index  # 8-bit codes have two names
        parts = [i for i, piece in enumerate(block.layout.pieces) if first(piece) == i and i]
        assert len(parts) == {"nf4": 5, "nf4 without nested statistics": 2, "fp4": 5, "8 bits": 1}[kind]
        for index in parts:
            damaged, before = block.views[index], block.views[index].clone()

            def damaging(*args: Any, damaged: Tensor = damaged, **given: Any) -> Any:
                result = run(*args, **given)
                damaged.view(-1)[0] += 1  # after the step: neither losses nor gradients show it
                return result

            monkeypatch.setattr(relay._runner, "step", damaging)
            report = relay.verify(batch_of(1))
            damaged.copy_(before)
            assert not report.equal and report.rows[1].different == (block.names[index],), str(report)
        monkeypatch.undo()
        assert relay.verify(batch_of(1)).equal


def test_half_the_precision_leaves_them_as_they_are() -> None:
    with make_relay(make_model(torch.int8), replace(CONFIG, precision="bf16")) as relay:
        result = relay.step(batch_of(0))
        kept = [p for p in relay.stack[0].params if p.dtype == torch.int8]
        usual = [p for p in relay.stack[0].params if p.dtype == torch.float32]
        slots = 2 * (padded(kept) + padded(usual) // 2) + padded(
            [p for p in relay.shell.params if p.dtype == torch.int8]
        )
        slots += padded([p for p in relay.shell.params if p.dtype == torch.float32]) // 2
        assert max(s.bytes_by_category.get("weights", 0) for s in result.trace.memory if s.place == "device") == slots
        with torch.autocast("cpu", torch.bfloat16):
            in_core = InCore(make_model(torch.int8)).step(batch_of(0))
        assert result.loss == pytest.approx(in_core, rel=1e-2)


def test_master_dtypes_that_are_mixed_with_frozen_ones() -> None:
    """Adapters in bfloat16, which the optimizer rounds to, beside frozen norms in float32 and a base of integers."""
    model = make_model(torch.int8)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.bfloat16()
    make = partial(in_bf16(torch.optim.AdamW, weights=True), lr=1e-2)
    with make_relay(model, replace(CONFIG, update="deferred"), lambda m: make(m.parameters())) as relay:
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal
        assert {p.dtype for p in model.layers[0].parameters()} == {torch.int8, torch.float32, torch.bfloat16}


def test_weights_that_layers_and_the_shell_share() -> None:
    def tied() -> nn.Module:
        model = make_model(torch.float16)
        model.layers[2].base.weight = model.layers[0].base.weight
        model.layers[1].base = model.embed
        return model

    model, twin = tied(), InCore(tied())
    with make_relay(model) as relay:
        assert sum(block.shared and block.in_bytes for block in relay.store.masters.blocks) == 3
        for seed in range(3):
            assert relay.step(batch_of(seed)).loss == twin.step(batch_of(seed))
        assert not unlike(model, twin.model)


def test_close_gives_each_one_its_own_memory() -> None:
    model, twin = make_model(), make_model()
    with make_relay(model) as relay:
        relay.step(batch_of(0))
    assert {name for name in unlike(model, twin)} == {n for n, p in twin.named_parameters() if p.requires_grad}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


# -- saves, edits, branches ------------------------------------------------------------------------------------------------


def trained_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2)


def blank(model: nn.Module) -> nn.Module:
    """The same model with zeros for all its bytes, so that what a load leaves out is seen."""
    for param in model.parameters():
        param.data.untyped_storage().fill_(0)
        for part in vars(getattr(param, "quant_state", None) or object).values():
            if isinstance(part, Tensor):
                part.zero_()
    return model


@pytest.mark.parametrize("dtypes", [(), *((name,) for name in LIBRARY)], ids=str)
def test_a_save_goes_on_to_the_bit(dtypes: tuple[Any, ...], tmp_path: Path) -> None:
    twin = InCore(make_model(*dtypes))
    with make_relay(make_model(*dtypes)) as relay:
        for seed in range(2):
            assert relay.step(batch_of(seed)).loss == twin.step(batch_of(seed))
        relay.save(tmp_path / "run")
    loaded = Relay.load(tmp_path / "run", blank(make_model(*dtypes)), trained_adamw, EmulatedDevice(), loss=loss)
    with loaded:
        assert not unlike(loaded.model, twin.model)
        for seed in (2, 3):
            assert loaded.step(batch_of(seed)).loss == twin.step(batch_of(seed))
        assert not unlike(loaded.model, twin.model)


@pytest.mark.parametrize("shelf", [False, True], ids=["memory", "shelf"])
def test_a_save_holds_each_of_them_once(shelf: bool, tmp_path: Path) -> None:
    """In a file beside that of the layer, with the bytes of the model."""
    expected = {name: bits(param) for name, param in make_model().named_parameters() if not param.requires_grad}
    with on_shelf(make_model(), tmp_path) if shelf else make_relay(make_model()) as relay:
        relay.save(tmp_path / "run")
        keys = [unit.key for unit in (relay.shell, *relay.stack)]
    [generation] = (tmp_path / "run").glob("step-*")
    found: dict[str, list[str]] = {}
    for path in generation.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            found.setdefault(name, []).append(path.name)
            if name.removeprefix("weights/") in expected:
                assert bits(tensor) == expected[name.removeprefix("weights/")], name
    assert all(len(files) == 1 for files in found.values()), found
    assert {f"frozen%3A{key}.safetensors" for key in keys} <= {file for [file] in found.values()}


def test_a_save_of_other_dtypes_is_refused(tmp_path: Path) -> None:
    with make_relay(make_model(torch.float16)) as relay:
        relay.save(tmp_path / "run")
    with pytest.raises(ValueError, match="float16"):
        Relay.load(tmp_path / "run", make_model(torch.bfloat16), trained_adamw, EmulatedDevice(), loss=loss)


EDITS: dict[str, Callable[[Any], list[Any]]] = {
    "duplicate": lambda base: [Duplicate(1)],
    "drop": lambda base: [Drop(1)],
    "swap": lambda base: [Swap(0, 2)],
    "copy": lambda base: [Insert(1, init="copy")],
    "identity": lambda base: [Insert(1)],  # a scale becomes 0
    "module": lambda base: [Insert(1, module=Layer(base()))],
    "freeze": lambda base: [Freeze(1)],
    "group": lambda base: [Duplicate(0), Drop(2), Swap(0, 1), Freeze(0)],
}


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "dtype", [torch.int8, *(pytest.param(name, marks=pytest.mark.slow) for name in LIBRARY)], ids=str
)
@pytest.mark.parametrize("name", EDITS)
def test_edits_and_their_inverses(name: str, dtype: Any, tmp_path: Path) -> None:
    """The edited model trains as in core, a save of it goes on, and an undo is exact."""
    if name == "identity" and dtype in LIBRARY:
        pytest.skip("no scale of it can be 0")
    with make_relay(make_model(dtype), optimizer=every_adamw) as relay:
        relay.step(batch_of(0))
        before = {name: bits(tensor) for name, tensor in state_of(relay.model).items()}
        relay.apply(*EDITS[name](BASES[dtype]))
        assert relay.verify(batch_of(1)).equal
        relay.undo()
        assert {name: bits(tensor) for name, tensor in state_of(relay.model).items()} == before
        relay.redo()
        relay.save(tmp_path / "run")
        modules = {"L003": Layer(BASES[dtype]())} if name == "module" else {}
        factory = partial(torch.optim.AdamW, lr=1e-2)
        with Relay.load(
            tmp_path / "run", blank(make_model(dtype)), factory, modules, device=EmulatedDevice(), loss=loss
        ) as loaded:
            for seed in (1, 2):
                assert loaded.step(batch_of(seed)).loss == relay.step(batch_of(seed)).loss
            assert not unlike(loaded.model, relay.model)
            for one in (relay, loaded):
                one.undo()
            assert not unlike(loaded.model, relay.model)
            assert relay.step(batch_of(3)).loss == loaded.step(batch_of(3)).loss


def test_float16_layers_may_be_mixed() -> None:
    with make_relay(make_model(torch.float16)) as relay:
        relay.step(batch_of(0))
        relay.apply(Insert(1, init="interpolate"))
        a, new, b = (unit.module.base.weight for unit in relay.stack[:3])
        assert torch.equal(new, torch.lerp(a, b, 0.5)) and new.dtype == torch.float16
        assert relay.verify(batch_of(1)).equal


@pytest.mark.parametrize(
    ("edit", "match", "remedy"),
    [
        (Insert(1, init="interpolate"), "codes that have no mean", Insert(1, init="copy")),
        (Interpolate(0, 1), "codes that have no mean", Insert(1, init="copy")),
        (Insert(1, init="fresh"), "codes cannot be drawn at random", Insert(1, init="copy")),
    ],
    ids=str,
)
def test_edits_that_would_make_codes_are_refused(edit: Any, match: str, remedy: Any) -> None:
    model = make_model(torch.int8)
    with make_relay(model) as relay:
        relay.step(batch_of(0))
        before = {name: bits(tensor) for name, tensor in state_of(model).items()}
        with pytest.raises(ValueError, match=match):
            relay.apply(edit)
        assert {name: bits(tensor) for name, tensor in state_of(model).items()} == before
        relay.apply(remedy)
        assert relay.verify(batch_of(1)).equal


def test_unfreeze_leaves_them_frozen() -> None:
    with make_relay(make_model(torch.float16), optimizer=every_adamw) as relay:
        relay.apply(Freeze(1))
        relay.apply(Unfreeze(1))
        assert {p.dtype for p in relay.stack[1].params if p.requires_grad} == {torch.float32}
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal


def test_the_copy_of_a_frozen_layer_trains_the_rest() -> None:
    with make_relay(make_model(torch.int8), optimizer=every_adamw) as relay:
        relay.step(batch_of(0))
        relay.apply(Freeze(1))
        relay.apply(Duplicate(1))
        new = relay.stack[2]
        assert [p.requires_grad for p in new.params] == [p.dtype == torch.float32 for p in new.params]
        assert relay.verify(batch_of(1)).equal


def test_branches_share_them(tmp_path: Path) -> None:
    other = make_relay(make_model(torch.int8))
    with make_relay(make_model(torch.int8)) as relay, other:
        for one in (relay, other):
            one.step(batch_of(0))
        relay.fork("b")
        relay.step(batch_of(1))
        copied = sum(b.nbytes for u in (relay.shell, *relay.stack) for b in u.blocks if not b.in_bytes)
        assert relay.branches[-1].name == "main"
        assert relay.branches[-1].nbytes == copied + relay.store.masters.state_bytes
        relay.apply(Drop(1))
        relay.save(tmp_path / "run")
        with Relay.load(
            tmp_path / "run", blank(make_model(torch.int8)), trained_adamw, EmulatedDevice(), loss=loss
        ) as loaded:
            for one in (relay, loaded):
                one.switch("main")
            expected = other.step(batch_of(2)).loss
            assert relay.step(batch_of(2)).loss == loaded.step(batch_of(2)).loss == expected
            assert not unlike(relay.model, other.model) and not unlike(loaded.model, other.model)


# -- in files -------------------------------------------------------------------------------------------------------------

one_adamw = partial(torch.optim.AdamW, lr=1e-2)


def on_shelf(
    model: nn.Module, folder: Path, config: RelayConfig = CONFIG, resume: bool = False, **options: Any
) -> Relay:
    shelf = FileShelf(folder=folder / "shelf", memory_bytes=64 << 20, resume=resume)
    return make_relay(model, config, lambda model: one_adamw, shelf=shelf, **options)


@pytest.mark.parametrize("dtypes", [(), *((name,) for name in LIBRARY)], ids=str)
def test_a_shelf_reads_them_and_writes_them_once(dtypes: tuple[Any, ...], tmp_path: Path) -> None:
    """In memory they show zeros."""
    twin = InCore(make_model(*dtypes))
    with on_shelf(make_model(*dtypes), tmp_path) as relay:
        records = tmp_path / "shelf" / "records"
        times = {path.name: path.stat().st_mtime_ns for path in records.iterdir()}
        for seed in range(2):
            assert relay.step(batch_of(seed)).loss == twin.step(batch_of(seed))
        frozen = {path.name: path.stat().st_mtime_ns for path in records.iterdir() if path.name.startswith("frozen")}
        assert frozen == {name: time for name, time in times.items() if name.startswith("frozen")}
        assert {name[-2:] for name in frozen} == {".a"} and len(frozen) == LAYERS + 1  # no second copy
        assert relay.verify(batch_of(2)).equal
        assert relay.forecast(batch_of(2)).peak_device_bytes == relay.step(batch_of(2)).peak_device_bytes
        twin.step(batch_of(2))
        assert not any(bool(view.any()) for b in relay.store.masters.blocks if b.in_bytes for view in b.host_views)
        assert relay.shelf is not None
        kept = {name: bits(tensor) for name, tensor in relay.shelf.weights()}
        assert [name for name, p in twin.model.named_parameters() if kept[name] != bits(p)] == []
        with pytest.raises(RuntimeError, match=r"the weights of this model .* are in"):
            relay.model.state_dict()
    with on_shelf(make_model(*dtypes), tmp_path, resume=True) as relay:
        assert relay.step(batch_of(3)).loss == twin.step(batch_of(3))


@pytest.mark.parametrize("late", [False, True], ids=["emulated", "late"])
def test_a_shelf_in_bfloat16(late: bool, tmp_path: Path) -> None:
    """A device that cannot cast gets trained weights cast, and bytes as they are."""
    config = replace(CONFIG, precision="bf16")
    with make_relay(make_model(torch.int8, torch.float16), config, optimizer=lambda model: one_adamw) as relay:
        expected = [relay.step(batch_of(seed)).loss for seed in range(2)]
    device = LateDevice() if late else EmulatedDevice()
    with on_shelf(make_model(torch.int8, torch.float16), tmp_path, config, device=device) as relay:
        assert [relay.step(batch_of(seed)).loss for seed in range(2)] == expected


@pytest.mark.parametrize("dtype", [torch.int8, *LIBRARY], ids=str)
def test_edits_and_saves_of_a_shelf(dtype: Any, tmp_path: Path) -> None:
    with (
        make_relay(make_model(dtype), optimizer=lambda model: one_adamw) as other,
        on_shelf(make_model(dtype), tmp_path) as relay,
    ):
        relay.step(batch_of(0))
        relay.save(tmp_path / "run")
        other.step(batch_of(0))
        for edits in ([Duplicate(1)], [Drop(0)], [Insert(1, module=Layer(BASES[dtype]()))], [Swap(0, 2)]):
            for one in (relay, other):
                one.apply(*copy.deepcopy(edits))
            assert relay.step(batch_of(1)).loss == other.step(batch_of(1)).loss
        relay.undo()
        assert relay.verify(batch_of(2)).equal
    shelf = FileShelf(folder=tmp_path / "again", memory_bytes=64 << 20)
    loaded = Relay.load(
        tmp_path / "run", blank(make_model(dtype)), one_adamw, device=EmulatedDevice(), loss=loss, shelf=shelf
    )
    with loaded, make_relay(make_model(dtype), optimizer=lambda model: one_adamw) as other:
        other.step(batch_of(0))
        assert loaded.step(batch_of(1)).loss == other.step(batch_of(1)).loss


# -- refused ---------------------------------------------------------------------------------------------------------------


def as_buffers(model: nn.Module) -> nn.Module:
    """The remedy: what is not trained and not float32 as buffers."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and not param.requires_grad and param.dtype != torch.float32:
                del module._parameters[name]
                module.register_buffer(name, param.data)
    return model


def test_several_sources_of_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = {name: param.detach().clone() for name, param in make_model().named_parameters()}
    model = make_model()
    shelf = FileShelf(
        folder=tmp_path / "shelf", memory_bytes=64 << 20, weights=lambda name, into: into.copy_(values[name])
    )
    with pytest.raises(ValueError, match=r"embed.weight is torch.int8 and not trained.*fill the shelf from the model"):
        make_relay(model, optimizer=every_adamw, shelf=shelf)
    assert not unlike(model, make_model()) and not (tmp_path / "shelf").exists()
    for each in (as_buffers(make_model()), make_model()):  # both remedies
        given = replace(shelf, weights=None) if each.embed._parameters else shelf
        model, twin = copy.deepcopy(each), InCore(each)
        with make_relay(
            model, optimizer=lambda model: one_adamw, shelf=replace(given, folder=tmp_path / str(id(each)))
        ) as relay:
            for seed in range(2):
                assert relay.step(batch_of(seed)).loss == twin.step(batch_of(seed))


def test_a_shelf_of_a_model_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter weight of a Int8 is torch.int8 and not trained"), empty_weights():
        make_model(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_trained_ones_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Beside a quantised base the remedy is not `model.float()`, which would destroy it."""

    def adapters(dtype: torch.dtype) -> nn.Module:
        model = make_model(torch.int8)
        for param in model.parameters():
            if param.requires_grad:
                param.data = param.data.to(dtype)
        return model

    model = adapters(dtype)
    with pytest.raises(
        ValueError, match=rf"{dtype} and trained: the masters are float32.*p.data = p.data.float\(\)"
    ) as refusal:
        make_relay(model)
    assert "model.float()" not in str(refusal.value)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    with make_relay(model) as relay:
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal
        assert model.embed.weight.dtype == torch.int8


def test_a_model_in_float16_is_told_to_freeze_or_to_cast() -> None:
    model = make_model(torch.float16).half()
    with pytest.raises(ValueError, match=r"float16.*freeze it"):
        make_relay(model.requires_grad_(True))


def test_thawed_ones_are_refused() -> None:
    model = make_model(torch.float16)
    with make_relay(model) as relay:
        relay.step(batch_of(0))
        weight = model.layers[1].base.weight.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"layers.1.base.weight \(torch.float16\) was not trained when the relay was made"
        ):
            relay.step(batch_of(1))
        weight.requires_grad_(False)
        assert relay.verify(batch_of(1)).equal
    weight.requires_grad_(True)
    weight.data = weight.data.float()
    with make_relay(model) as relay:
        relay.step(batch_of(1))
        assert relay.verify(batch_of(2)).equal and not relay.stack[1].blocks[-1].in_bytes


def test_tensors_whose_values_are_elsewhere_are_refused() -> None:
    model = make_model(torch.int8)
    with warnings.catch_warnings(action="ignore"):  # deprecated
        scaled = torch.quantize_per_tensor(torch.randn(WIDTH, WIDTH), 0.01, 0, torch.qint8)
    model.layers[0].base.weight = frozen(scaled)
    with pytest.raises(ValueError, match=r"layers.0.base.weight .*values are in other tensors"):
        make_relay(model)


class Parts(nn.Module):
    """The remedy: integers, or float8, and scales of a tensor of torchao as parameters."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.codes, self.scale = frozen(weight.qdata), frozen(weight.scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_tensors_of_torchao_are_refused(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: the extra peers")
    model = make_model(torch.int8)
    for layer in model.layers:
        layer.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        quantization.quantize_(layer.base, getattr(quantization, name)())
    expected = model.eval()(batch_of(0)["x"])
    with pytest.raises(ValueError, match=r"layers.0.base.weight is a \w+8Tensor .*values are in other tensors"):
        make_relay(model)
    for layer in model.layers:
        layer.base = Parts(layer.base.weight)
    torch.testing.assert_close(model(batch_of(0)["x"]), expected)
    with make_relay(model.train()) as relay:
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal
        assert relay.stack[0].blocks[0].in_bytes


needs_bitsandbytes = pytest.mark.skipif(bitsandbytes is None, reason="bitsandbytes is not installed: the extra quant")


def packing_model() -> Any:
    """Layers that an evaluation packs anew, as on a CPU with AVX512-BF16, where adapters would get no gradient."""
    model = make_model(torch.int8)
    for layer in model.layers:
        middle = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").requires_grad_(False).to("cpu")
        middle.support_avx512bf16_for_cpu = True
        layer.base = nn.Sequential(nn.Linear(WIDTH, 64), middle, nn.Linear(64, WIDTH)).requires_grad_(False)
    return model


def packs(model: Any) -> list[bool]:
    return [layer.base[1].support_avx512bf16_for_cpu for layer in model.layers]


@needs_bitsandbytes
def test_weights_that_an_evaluation_packed_anew_are_refused() -> None:
    model = packing_model()
    weight = model.layers[1].base[1].weight
    weight.data, weight.quant_state = bitsandbytes.functional._convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    with pytest.raises(ValueError, match=r"layers.1.base.1.weight was packed anew .* Load or quantise the base again"):
        make_relay(model)
    model = packing_model()
    with make_relay(model) as relay:
        relay.evaluate(batch_of(0))
        relay.step(batch_of(0))
        relay.apply(Duplicate(1))
        assert relay.verify(batch_of(1)).equal
        assert packs(model) == [False] * 4
        dropped = relay.stack[1].module
        relay.apply(Drop(1))
        assert dropped.base[1].support_avx512bf16_for_cpu
        relay.undo()
        assert packs(model) == [False] * 4
    assert packs(model) == [True] * 4  # as they were


@needs_bitsandbytes
def test_a_relay_that_cannot_be_made_leaves_the_packing_as_it_was() -> None:
    model = packing_model()
    model.layers[2].a.data = model.layers[2].a.data.bfloat16()
    with pytest.raises(ValueError, match="make all that is trained in it bfloat16 or float32"):
        make_relay(model, optimizer=lambda model: in_bf16(torch.optim.AdamW, weights=True)(model.parameters(), lr=1e-2))
    assert packs(model) == [True] * 3


def test_layers_with_them_are_refused_where_the_relay_cannot_keep_them(tmp_path: Path) -> None:
    """An inserted module is looked at as the model is."""
    values = {name: param.detach().clone() for name, param in as_buffers(make_model(torch.int8)).named_parameters()}
    shelf = FileShelf(
        folder=tmp_path / "shelf", memory_bytes=64 << 20, weights=lambda name, into: into.copy_(values[name])
    )
    with make_relay(as_buffers(make_model(torch.int8)), optimizer=lambda model: one_adamw, shelf=shelf) as relay:
        relay.step(batch_of(0))
        with pytest.raises(ValueError, match="torch.int8 and not trained"):
            relay.apply(Insert(1, module=Layer(Int8())))
        relay.apply(Insert(1, module=as_buffers(Layer(Int8()))))
        relay.step(batch_of(1))


def test_workers_are_not_simulated() -> None:
    with make_relay(make_model(torch.int8)) as relay:
        trace = relay.step(batch_of(0)).trace
        with pytest.raises(ValueError, match="which every worker holds whole"):
            relay.forecast(batch_of(0), workers=2)
        with pytest.raises(ValueError, match="which every worker holds whole"):
            simulate(Profile.of(trace), relay.config, workers=2)
    with make_relay(as_buffers(make_model(torch.int8))) as relay:
        assert relay.forecast(batch_of(0), workers=2).seconds > 0

"""What a relay refuses is refused for its true reason, before anything is trained, and the remedy that is named works."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from l2l_core import Insert, Relay, RelayConfig
from l2l_core.model.reference import train_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, head: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(make() for _ in range(3)), head()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def objective(model: nn.Module, part: Any) -> Tensor:
    return model(part[0]).square().mean()


CONFIG = RelayConfig(seed=0, micro_batches=2)
sgd = partial(torch.optim.SGD, lr=0.1)


def relay_over(model: nn.Module, objective: Any = objective, **options: Any) -> Relay:
    options = {"optimizer": sgd, "config": CONFIG, "loss_over": "micro-batch"} | options
    return Relay(model, objective=objective, **options)


def batch(step: int = 0) -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(step)),)


def copied(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_as_before(model: nn.Module, before: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def assert_equal_to_plain(
    make: Callable[[], nn.Module], objective: Any = objective, optimizer: Any = sgd, **options: Any
) -> None:
    """Two steps of the relay give the bits of plain training."""
    model, twin = make(), make()
    plain = optimizer(twin.parameters())
    with relay_over(model, objective, optimizer=optimizer, **options) as relay:
        for step in range(2):
            parts = [(half,) for half in batch(step)[0].chunk(2)]
            seeds = [CONFIG.micro_batch_seed(step, k) for k in range(2)]
            assert relay.step(batch(step)).loss == float(sum(train_step(twin, plain, parts, objective, [2, 2], seeds)))
            assert_as_before(model, copied(twin))


# -- TorchScript -------------------------------------------------------------------------------------------------------


class Holding(nn.Module):
    """A layer with a scripted part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.own = torch.jit.script(Block()), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.part(x))


def scripted() -> nn.Module:
    return torch.jit.script(Block())


def traced() -> nn.Module:
    return torch.jit.trace(Block(), torch.randn(2, 8))


SCRIPTED = {
    "layers": (lambda: Chain(scripted), r"module 'layers\.0' is scripted"),
    "traced layers": (lambda: Chain(traced), r"module 'layers\.0' is traced"),
    "part of layers": (lambda: Chain(Holding), r"module 'layers\.0\.part' is scripted"),
    "shell": (lambda: Chain(head=scripted), "module 'head' is scripted"),
    "model": (lambda: torch.jit.script(nn.Sequential(Block(), Block())), "this Sequential is scripted"),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*Tracer:Warning")


@pytest.mark.parametrize("case", SCRIPTED)
def test_torchscript_is_refused_when_the_relay_is_made(case: str) -> None:
    make, cause = SCRIPTED[case]
    with pytest.raises(ValueError, match=f"{cause}.*Give it the original.*torch.compile on layers"):
        relay_over(make(), layers=["layers.0"] if case == "shell" else None)


def test_a_scripted_module_cannot_become_a_layer() -> None:
    with relay_over(Chain()) as relay:
        relay.step(batch())
        with pytest.raises(ValueError, match="is scripted"):
            relay.apply(Insert(at=1, module=scripted(), init="copy"))
        relay.step(batch())


def test_a_scripted_function_in_a_layer_is_fine() -> None:
    @torch.jit.script
    def twice(x: Tensor) -> Tensor:
        return x * 2

    class Calling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(twice(x))

    assert_equal_to_plain(lambda: Chain(Calling))


# -- parametrize.cached ------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.inner, "weight", Doubled())


class CachedInside(Parametrized):
    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + super().forward(x)


class CachedAround(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x)


@pytest.mark.parametrize("do", ["step", "evaluate", "verify", "forecast"])
@pytest.mark.parametrize(
    "make", [partial(Chain, Parametrized), partial(Chain, head=Parametrized)], ids=["layers", "shell"]
)
def test_a_step_in_a_cached_block_is_refused(make: Callable[[], nn.Module], do: str) -> None:
    model = make()
    with relay_over(model) as relay:
        before = copied(model)
        with parametrize.cached(), pytest.raises(ValueError, match=r"parametrize\.cached.*Do not use"):
            getattr(relay, do)(batch())
        assert_as_before(model, before)
        relay.step(batch())
        assert relay.verify(batch(1)).equal


@pytest.mark.parametrize("parts", [{"make": Parametrized}, {"head": Parametrized}], ids=["layers", "shell"])
def test_a_cached_block_around_layers_is_refused(parts: dict[str, Any]) -> None:
    model = CachedAround(**parts)
    with relay_over(model) as relay:
        before = copied(model)
        with pytest.raises(ValueError, match=r"parametrize\.cached.*Do not use"):
            relay.step(batch())
        assert_as_before(model, before)
    assert not parametrize._cache_enabled


def test_a_cached_block_in_one_layer_is_fine() -> None:
    assert_equal_to_plain(partial(Chain, CachedInside))


def test_a_cached_block_without_parametrized_weights_is_fine() -> None:
    assert_equal_to_plain(CachedAround)


# -- penalties ---------------------------------------------------------------------------------------------------------


def penalised(model: nn.Module, part: Any) -> Tensor:
    return objective(model, part) + 0.01 * sum(param.square().sum() for param in model.parameters())


def penalised_first(model: nn.Module, part: Any) -> Tensor:
    return 0.01 * sum(param.square().sum() for param in model.parameters()) + objective(model, part)


class Inward(Chain):
    """The model's own code reads a layer's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[1].inner.weight.mean()


@pytest.mark.parametrize("make, loss", [(Chain, penalised), (Chain, penalised_first), (Inward, objective)])
def test_a_penalty_on_weights_of_layers_is_refused(make: Callable[[], nn.Module], loss: Any) -> None:
    model = make()
    with relay_over(model, loss) as relay:
        before = copied(model)
        with pytest.raises(
            RuntimeError,
            match=r"a parameter of layer layers\.\d, layers\.\d\.\S+, .*depth_first.*weight_decay.*on an attribute of the layer",
        ):
            relay.step(batch())
        assert_as_before(model, before)


class CallsAPart(Chain):
    """The model's own code calls a part of its first layer, as DiT calls the embedding of its first block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].inner(x)


@pytest.mark.parametrize("remedy", ["depth_first", "layers"])
def test_a_part_of_a_layer_is_called_outside_of_it_with_either_remedy(remedy: str) -> None:
    with relay_over(CallsAPart()) as relay:
        with pytest.raises(
            RuntimeError, match=r"layers\.0\.inner\.\w+, outside.*depth_first.*of all layers but layers\.0"
        ):
            relay.step(batch())
    by_schedule = {"config": RelayConfig(seed=0, micro_batches=2, schedule="depth_first")}
    assert_equal_to_plain(
        CallsAPart, **(by_schedule if remedy == "depth_first" else {"layers": ["layers.1", "layers.2"]})
    )


class EmbedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=0.5)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.embed(tokens))


class Embeds(nn.Module):
    """Tokens in the shell, or in each layer, with rows of a limited norm."""

    def __init__(self, in_layers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(EmbedBlock() if in_layers else Block() for _ in range(3))
        self.embed = nn.Embedding(20, 8, max_norm=None if in_layers else 0.5)

    def embeddings(self) -> list[nn.Embedding]:
        return [part for part in self.modules() if isinstance(part, nn.Embedding) and part.max_norm]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens) if isinstance(layer, EmbedBlock) else layer(x)
        return x


@pytest.mark.parametrize("in_layers", [False, True])
@pytest.mark.parametrize("schedule", ["layer_first", "depth_first"])
@pytest.mark.filterwarnings("ignore:the loss of a few rows was not compared")  # then the step raises
def test_an_embedding_with_a_limited_norm_is_rescaled_before_the_step(in_layers: bool, schedule: Any) -> None:
    tokens = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(0))
    config = RelayConfig(seed=0, micro_batches=2, **({} if schedule == "layer_first" else {"schedule": schedule}))
    model, twin = Embeds(in_layers), Embeds(in_layers)
    name = "layers.0.embed" if in_layers else "embed"
    with relay_over(model, config=config) as relay:
        words = rf"a weight, {name}\.weight of shape.*Embedding\(max_norm=0\.5\).*{name}\.max_norm = None.*embedding_renorm_"
        with pytest.raises(RuntimeError, match=words.replace("layers.0", r"layers\.0")):
            relay.step((tokens,))
        embeddings = model.embeddings()
        for embedding in embeddings:
            embedding.max_norm = None
        plain = sgd(twin.parameters())
        for step in range(3):
            for embedding in embeddings:
                torch.embedding_renorm_(embedding.weight.detach(), tokens, 0.5, 2.0)
            relay.step((tokens,))
            parts, seeds = [(half,) for half in tokens.chunk(2)], [config.micro_batch_seed(step, k) for k in range(2)]
            train_step(twin, plain, parts, objective, [2, 2], seeds)
            assert_as_before(model, copied(twin))


class KeepingPenalty(Block):
    """The first remedy."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = 0.01 * sum(param.square().sum() for param in self.parameters())
        return super().forward(x)


def penalised_by_attributes(model: Any, part: Any) -> Tensor:
    return objective(model, part) + sum(layer.penalty for layer in model.layers)


def test_a_penalty_kept_on_an_attribute_is_equal() -> None:
    assert_equal_to_plain(partial(Chain, KeepingPenalty), penalised_by_attributes)


class Hooked(Chain):
    """The same for layers that somebody else has written."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.inner.register_forward_hook(self.keep_penalty)

    @staticmethod
    def keep_penalty(module: Any, _args: Any, output: Tensor) -> Tensor:
        module.penalty = 0.01 * sum(param.square().sum() for param in module.parameters())
        return output


def test_a_penalty_kept_by_a_hook_is_equal() -> None:
    def loss(model: Any, part: Any) -> Tensor:
        return objective(model, part) + sum(layer.inner.penalty for layer in model.layers)

    assert_equal_to_plain(Hooked, loss)


def test_the_optimizers_weight_decay_is_equal() -> None:
    """The second one."""
    assert_equal_to_plain(Chain, optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.02))


def test_a_penalty_on_weights_of_the_shell_is_equal() -> None:
    def loss(model: Any, part: Any) -> Tensor:
        return objective(model, part) + 0.01 * sum(param.square().sum() for param in model.head.parameters())

    assert_equal_to_plain(Chain, loss)


def test_a_tensor_from_inside_is_another_matter() -> None:
    """It is no parameter, and the message says so."""
    kept: list[Tensor] = []

    class Leaking(Block):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner(x)
            kept.append(inner.sum())
            return x + torch.tanh(inner)

    def loss(model: nn.Module, part: Any) -> Tensor:
        kept.clear()
        return objective(model, part) + kept[1]

    with relay_over(Chain(Leaking), loss, config=RelayConfig(seed=0, micro_batches=1)) as relay:
        with pytest.raises(RuntimeError, match="a tensor from inside layer"):
            relay.step(batch())

"""Operations and bytes of a large transformer, by closed formulas of its shape.

A layer is Megatron-LM's: attention and a perceptron four times as wide, with dropout, in 16-bit numbers. Operations and
parameters are those of arXiv 2104.04473; activations are those of Korthikanti et al., arXiv 2205.05198, without sequence
parallelism. Embedding and output share their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBER_BYTES = 2  # of weights, gradients and activations
OPTIMIZER_BYTES = 12  # per parameter: master weights and two moments of AdamW, in 32 bits


@dataclass(frozen=True)
class TransformerShape:
    """Shape of a transformer.

    Attributes:
        layers: number of layers.
        width: numbers per token between layers.
        heads: attention heads of a layer.
        sequence: tokens of a row.
        vocabulary: number of different tokens.

    Example:
        >>> from l2l_core.pipelines import TransformerShape
        >>> shape = TransformerShape(layers=32, width=4096, heads=32)
        >>> round(shape.parameters / 1e9, 1)  # billions
        6.7
    """

    layers: int
    width: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51_200

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.sequence, self.vocabulary) < 1:
            raise ValueError(f"{self}: each number is 1 or more")

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocabulary + self.sequence) * self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def attention_flop(self) -> float:
        """Operations of one layer's attention matrices in the forward of a row: the part that grows with the square."""
        return 4 * self.sequence**2 * self.width

    @property
    def layer_flop(self) -> float:
        """Operations of one layer in the forward of a row."""
        return 24 * self.sequence * self.width**2 + self.attention_flop

    @property
    def head_flop(self) -> float:
        """Operations of the output layer in the forward of a row."""
        return 2 * self.sequence * self.width * self.vocabulary

    @property
    def step_flop(self) -> float:
        """Operations of a row in a step with full recompute, the count of Megatron-LM's table; the output runs once."""
        return 4 * self.layers * self.layer_flop + 3 * self.head_flop

    def record_bytes(
        self, tensor: int = 1, attention: bool = True, gelu_bits: float = 16.0, linear_share: float = 1.0
    ) -> float:
        """Return the bytes of a row that one layer keeps for backward.

        Args:
            tensor: ranks that share the layer; norms, dropouts and inputs are whole on each.
            attention: keep the attention matrices, or recompute them.
            gelu_bits: per input of GELU, kept for its derivative.
            linear_share: rows kept of the inputs of linear layers (randomized products).
        """
        per_token = 6 + 4 * linear_share  # whole on every rank: norms and dropouts, and two inputs of linear layers
        per_token += (6 + 10 * linear_share + 8 * gelu_bits / 16) / tensor
        if attention:
            per_token += 5 * self.heads * self.sequence / self.width / tensor
        return self.sequence * self.width * per_token

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a row between two layers."""
        return NUMBER_BYTES * self.sequence * self.width

    @property
    def loss_bytes(self) -> int:
        """Bytes of a row that the output and the loss keep: logits in 32 bits, and two inputs."""
        return 4 * self.sequence * (self.width + self.vocabulary)


def state_bytes(parameters: float, ranks: int = 1, zero: int = 0) -> dict[str, float]:
    """Return bytes per rank of weights, gradients and optimizer state, sharded over ranks in stages of ZeRO.

    Mixed precision with AdamW: 2 + 2 + 12 bytes per parameter; stage 1 shards the optimizer state, 2 gradients too, 3 all
    (arXiv 1910.02054).

    Raises:
        ValueError: there is no such stage.

    Example:
        >>> from l2l_core.pipelines import state_bytes
        >>> state_bytes(7e9, ranks=8, zero=1)
        {'weights': 14000000000.0, 'gradients': 14000000000.0, 'optimizer': 10500000000.0}
    """
    if zero not in range(4):
        raise ValueError(f"zero={zero}: stages of ZeRO are 1, 2 and 3; 0 shards nothing")
    sizes = {"weights": NUMBER_BYTES, "gradients": NUMBER_BYTES, "optimizer": OPTIMIZER_BYTES}
    sharded = {"weights": zero >= 3, "gradients": zero >= 2, "optimizer": zero >= 1}
    return {name: parameters * size / (ranks if sharded[name] else 1) for name, size in sizes.items()}

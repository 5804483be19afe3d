"""Programs that start a way of the table, to be copied into a cell or a file.

On a card they train with plain PyTorch, with peft, bitsandbytes or DeepSpeed, or with a relay. On an emulated device, in core
and recompute run as plans of `l2l_core.strategies`, which meter their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core import EmulatedDevice
from workbench.fit.fit_table import RELAY_ON_NF4, FitWay
from workbench.fit.model_source import ModelSource

STEPS = 3  # of a program


@dataclass(frozen=True)
class StartCode:
    """Makes the programs of all ways for one model and batch.

    Args:
        source: the model, or the code that makes it.
        rows, length: of the random batch that the program trains on.
        precision: "bf16" or "fp32".
        device: an emulated device; None for a card.
        shelf_folder: folder of the files of a relay on disk.
        base_folder: folder for the weights of a base that is quantised, if the model has none.
    """

    source: ModelSource
    rows: int
    length: int
    precision: str
    device: EmulatedDevice | None = None
    shelf_folder: str = "out/shelf"
    base_folder: str = "out/base"

    def text(self, way: FitWay) -> str:
        """Return the program that starts a way."""
        if way.name == RELAY_ON_NF4:
            body = self._relay_on_nf4(way)
        elif way.name == "relay" or way.name == "relay on disk":
            body = self._relay(way)
        elif way.name == "ZeRO-Offload":
            body = self._zero_offload(way)
        elif self.device is not None and way.name in ("in core", "recompute"):
            body = self._plan(way)
        else:
            body = self._plain(way)
        imports = sorted({line for line in (*body.imports, *self._model_imports(way)) if line})
        return "\n".join(
            [f"# {way.name}: {way.micro_batches} micro-batches", "import torch", *imports, "", *body.lines, ""]
        )

    # -- models and batches --------------------------------------------------------------------------------------------

    def _model_imports(self, way: FitWay) -> Sequence[str]:
        if self.source.module is not None:
            return ()
        return (f"from transformers import AutoConfig, {self.source.auto_class}",)

    def _model_lines(self, empty: bool = False) -> list[str]:
        """Return lines that define model and batch; `empty` makes parameters without memory."""
        source = self.source
        if source.module is not None:
            return [source.code, ""]
        if empty:
            make = [
                "with empty_weights():  # parameters without memory: the relay fills one layer at a time",
                f"    model = {source.auto_class}.from_config(config).train()",
            ]
        elif source.weights:
            make = [f"model = {source.auto_class}.from_pretrained({source.weights!r}, dtype=torch.float32).train()"]
        else:
            make = [f"model = {source.auto_class}.from_config(config).train()  # random weights"]
        return [source.code, *make, source.batch_code(self.rows, self.length), ""]

    # -- plain training ------------------------------------------------------------------------------------------------

    def _plain(self, way: FitWay) -> _Program:
        imports, prepare = list[str](), ["model.to(device)"]
        optimizer = "torch.optim.AdamW(model.parameters(), lr=1e-4)"
        if way.name == "LoRA":
            imports.append("from peft import LoraConfig, get_peft_model  # pip install peft")
            prepare.insert(0, 'model = get_peft_model(model, LoraConfig(target_modules="all-linear"))')
            if self.precision == "bf16":
                prepare.insert(0, "model.bfloat16()  # frozen weights; peft keeps its adapters in float32")
            optimizer = "torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)"
        if way.name == "8-bit optimizer":
            imports.append("import bitsandbytes  # pip install bitsandbytes")
            optimizer = "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)"
        if way.recomputes:
            checkpointing, lines = self._checkpointing
            imports += checkpointing
            prepare += lines
        lines = [
            *self._model_lines(),
            'device = "cuda" if torch.cuda.is_available() else "cpu"',
            *prepare,
            f"optimizer = {optimizer}",
            *self._loop(way.micro_batches, way.recomputes),
        ]
        return _Program(imports, lines)

    @property
    def _checkpointing(self) -> tuple[Sequence[str], Sequence[str]]:
        """Imports and lines that make backward run the layers again."""
        module = self.source.module
        if module is None or hasattr(module, "gradient_checkpointing_enable"):
            return (), ("model.gradient_checkpointing_enable()",)
        imports = ("from functools import partial", "from torch.utils.checkpoint import checkpoint")
        layers = "layers" if "layers" in self.source.options else "find_layers(model).values()"
        return (*imports, *["from l2l_core import find_layers"] * (layers != "layers")), (
            f"for layer in {layers}:",
            "    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)",
        )

    def _loop(self, count: int, recomputes: bool) -> list[str]:
        # with the cache, copies of all weights would stay until the end of forward, although backward makes them again
        cache = ", cache_enabled=False" if recomputes else ""
        return [
            f"count = {count}  # micro-batches",
            f"for step in range({STEPS}):",
            "    for k in range(count):",
            f"        part = {self.source.part_code}",
            f"        with torch.autocast(device, torch.bfloat16, enabled={self.precision == 'bf16'}{cache}):",
            f"            mean = {self.source.loss_code} / count",
            "        mean.backward()",
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    print(step, count * mean.item())  # of the last micro-batch",
        ]

    # -- this project --------------------------------------------------------------------------------------------------

    def _plan(self, way: FitWay) -> _Program:
        policy = "Plain" if way.name == "in core" else "Full"
        imports = ["from l2l_core import EmulatedDevice", f"from l2l_core.strategies import {policy}, Lab"]
        lines = [
            *self._model_lines(),
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
            f"device = {self.device!r}",
            f"lab = Lab(model, batch, optimizer, device, micro_batches={way.micro_batches}{self._options})",
            f"for step in range({STEPS}):",
            f"    result = lab.step(lab.plan({policy}()))",
            "    print(step, result.loss, result.peak_device_bytes)",
        ]
        return _Program(imports, lines)

    def _relay(self, way: FitWay) -> _Program:
        on_disk = way.name == "relay on disk"
        empty = on_disk and self.source.module is None
        names = ["Relay", "RelayConfig"] + ["EmulatedDevice"] * (self.device is not None)
        names += ["FileShelf"] * on_disk + ["empty_weights"] * empty
        settings = f"micro_batches={way.micro_batches}, precision={self.precision!r}, stash='host'"
        lines = self._model_lines(empty)
        arguments = f"model, make_optimizer, device={repr(self.device) if self.device else repr('cuda')}, config=config_of_relay"
        lines += [
            "make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)",
            f"config_of_relay = RelayConfig({settings})",
        ]
        if on_disk:
            lines += self._shelf_lines(way, empty)
            arguments += ", shelf=shelf"
        lines += [
            f"with Relay({arguments}{self._options}) as relay:",
            f"    for step in range({STEPS}):",
            "        result = relay.step(batch)",
            "        print(step, result.loss, result.peak_device_bytes)",
        ]
        return _Program(["from functools import partial", f"from l2l_core import {', '.join(sorted(names))}"], lines)

    def _relay_on_nf4(self, way: FitWay) -> _Program:
        """Return a program that quantises the weights of a folder, which it fills first if the model has none."""
        source, folder = self.source, self.source.weights or self.base_folder
        lines = [source.code]
        if not source.weights:
            lines.append(f"{source.auto_class}.from_config(config).save_pretrained({folder!r})  # random weights")
        lines += [
            source.batch_code(self.rows, self.length),
            "",
            "make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)",
            f"config_of_relay = RelayConfig(micro_batches={way.micro_batches}, precision={self.precision!r}, stash='host')",
            'lora = LoraConfig(r=8, target_modules="all-linear")',
            "options = dict(quantize='nf4', adapters=lora, device='cuda')",
            f"with Relay.from_pretrained({folder!r}, make_optimizer, config=config_of_relay, **options) as relay:",
            f"    for step in range({STEPS}):",
            "        result = relay.step(batch)",
            "        print(step, result.loss, result.peak_device_bytes)",
        ]
        library = "from peft import LoraConfig  # pip install peft bitsandbytes accelerate"
        return _Program([library, "from functools import partial", "from l2l_core import Relay, RelayConfig"], lines)

    def _shelf_lines(self, way: FitWay, empty: bool) -> list[str]:
        shelf = f"shelf = FileShelf(folder={self.shelf_folder!r}, memory_bytes={way.pool_bytes}"
        if not empty:
            return [
                "# from here on the weights are in the folder: relay.shelf.save_pretrained writes them",
                f"{shelf})",
            ]
        if self.source.weights:
            return [f"{shelf}, weights={self.source.weights!r})"]
        return [
            "",
            "def fill(name, param):  # random weights: matrices normal, norms one, biases zero",
            '    param.normal_(0, 0.02) if param.dim() > 1 else param.fill_(float(name.endswith("weight")))',
            "",
            f"{shelf}, weights=fill)",
        ]

    @property
    def _options(self) -> str:
        """Arguments that a module of the user needs, as the user gave them to `Fit`."""
        return "" if self.source.module is None else "".join(f", {name}={name}" for name in self.source.options)

    # -- DeepSpeed -----------------------------------------------------------------------------------------------------

    def _zero_offload(self, way: FitWay) -> _Program:
        bf16 = str(self.precision == "bf16")
        lines = [
            *self._model_lines(),
            *self._checkpointing[1],
            "settings = {",
            f'    "train_batch_size": {self.rows},',
            f'    "train_micro_batch_size_per_gpu": {self.rows // way.micro_batches},',
            '    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},',
            f'    "bf16": {{"enabled": {bf16}}},',
            '    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},',
            "}",
            "engine, *_ = deepspeed.initialize(model=model, config=settings)  # start with: deepspeed FILE.py",
            f"count, device = {way.micro_batches}, engine.device",
            f"for step in range({STEPS}):",
            "    for k in range(count):",
            f"        part = {self.source.part_code}",
            f"        mean = {self.source.loss_code.replace('model', 'engine')}",
            "        engine.backward(mean)",
            "        engine.step()",
            "    print(step, mean.item())",
        ]
        return _Program(["import deepspeed  # pip install deepspeed", *self._checkpointing[0]], lines)


@dataclass(frozen=True)
class _Program:
    imports: Sequence[str]
    lines: Sequence[str]

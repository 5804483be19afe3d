"""A model quantised while it is loaded: memory of a capped process that trains a step of adapters on it.

    python benchmarks/pretrained.py --params 1e8            (a minute)
    python benchmarks/pretrained.py --params 3e9 --cap "6 GB"
    python benchmarks/pretrained.py --params 3e9 --cap "2 GB" --sides shelf

A Llama of about so many parameters is written as random shards in bfloat16, one layer at a time. Then processes load it:
`Relay.from_pretrained` with NF4 and LoRA of rank 8 on all matrices, which trains a step, in memory and on a shelf; and, for
comparison, transformers and peft alone, which only load it. All are capped by RLIMIT_DATA (heap and private writable mappings);
resident bytes are the system's VmHWM, code and mapped files included. The folder is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import peak_resident_bytes, report, show
from safetensors.torch import save_file

from l2l_core.trace import format_bytes, parse_bytes

SIDES = {
    "relay": "Relay.from_pretrained, a step",
    "shelf": "Relay.from_pretrained onto a shelf, a step",
    "transformers": "transformers and peft alone, loading only",
}


def shape_of(params: float, vocabulary: int) -> dict[str, Any]:
    """Sizes of a Llama of about so many parameters: 12 width^2 a layer, about 110 times as wide as deep."""
    width = max(128, round((params * 110 / 12) ** (1 / 3) / 128) * 128)
    layers = max(2, round((params - 2 * vocabulary * width) / (12 * width**2)))
    sizes = {"hidden_size": width, "intermediate_size": round(8 * width / 3 / 64) * 64, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": width // 128, "vocab_size": vocabulary}


def write_model(folder: Path, params: float, vocabulary: int = 32_000) -> int:
    """Write configuration and shards; return the number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape_of(params, vocabulary), architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "shell"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = tensor.shape
    torch.manual_seed(0)
    for file, shapes in shards.items():
        save_file({name: random_weight(shape) for name, shape in shapes.items()}, folder / file)
    files = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(param.numel() for param in model.parameters())


def random_weight(shape: torch.Size) -> torch.Tensor:
    """Return a matrix of small numbers, or ones for a norm."""
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) if len(shape) > 1 else torch.ones(shape).bfloat16()


# -- in a capped process -----------------------------------------------------------------------------------------------


def load(side: str, folder: str, dtype: torch.dtype, rows: int, length: int, memory: str) -> dict[str, Any]:
    """Load the model, and train a step if it is the relay's side; return bytes and seconds."""
    import logging

    import peft  # pyright: ignore[reportMissingImports] - optional
    import transformers

    from l2l_core import EmulatedDevice, FileShelf, Relay, RelayConfig

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    before, began_s = peak_resident_bytes(), time.perf_counter()
    if side == "transformers":
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=settings, device_map="cpu", dtype=dtype
        )
        peft.get_peft_model(model, lora)
        return {"before": before, "loaded": peak_resident_bytes(), "load_s": time.perf_counter() - began_s}
    config = RelayConfig(micro_batches=1, stash="host", verify="never")
    options: dict[str, Any] = {"device": EmulatedDevice(), "config": config}
    if side == "shelf":
        options["shelf"] = FileShelf(folder=Path(folder) / "shelf", memory_bytes=memory)
    with Relay.from_pretrained(folder, quantize="nf4", adapters=lora, dtype=dtype, **options) as relay:
        seen: dict[str, Any] = {
            "before": before,
            "loaded": peak_resident_bytes(),
            "load_s": time.perf_counter() - began_s,
        }
        seen["weights"] = relay.host.by_category().get("weights", 0)  # none between steps of a shelf
        model: Any = relay.model
        tokens = torch.randint(model.config.vocab_size, (rows, length))
        result = relay.step({"input_ids": tokens, "labels": tokens})
        seen |= {"loss": result.loss, "step_s": result.seconds, "device": result.peak_device_bytes}
        seen |= {"stepped": peak_resident_bytes(), "link": result.bytes_loaded, "pushed": result.bytes_pushed}
    return seen


def in_process(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run `load` in a capped process; return what it found, or the last line of its error."""
    told = {"side": side, "folder": str(folder), "dtype": args.dtype, "rows": args.rows, "length": args.length}
    told["memory"] = args.memory
    told["cap"] = parse_bytes(args.cap, "cap")
    command = [sys.executable, __file__, "--inside", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e8)
    parser.add_argument("--cap", default="6 GB")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="a shelf has room for the shell three times")
    parser.add_argument("--memory", default="256 MB", help="memory_bytes of the shelf")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--dtype", default="bfloat16", help="of what is not quantised")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--folder", help="on a disk with room for 2 bytes per parameter; default: a temporary one")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        told = json.loads(args.inside)
        resource.setrlimit(resource.RLIMIT_DATA, (told.pop("cap"),) * 2)
        print(json.dumps(load(**{**told, "dtype": getattr(torch, told["dtype"])})))
        return
    with tempfile.TemporaryDirectory(prefix="pretrained-", dir=args.folder) as folder:
        params = write_model(Path(folder), args.params, args.vocabulary)
        files = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"{params:,} parameters, {format_bytes(files)} of files, cap {args.cap}")
        seen = {side: in_process(side, Path(folder), args) for side in args.sides}
    for side, found in seen.items():
        if "error" in found:
            print(f"{SIDES[side]}: {found['error']}")
    names = ("before", "loaded", "stepped", "weights", "device", "link")
    cells = [
        (SIDES[side], *(format_bytes(found[name]) if name in found else "–" for name in names))
        for side, found in seen.items()
    ]
    heads = ("resident: imports", "loaded", "stepped", "weights by the ledger", "device", "loaded over the link")
    show(("", *heads), cells)
    for side, found in seen.items():
        times = {name: f"{found[name]:.1f} s" for name in ("load_s", "step_s") if name in found}
        print(f"{SIDES[side]}: {times}")
    report("pretrained", {"arguments": vars(args), "params": params, "files": files, "seen": seen})


if __name__ == "__main__":
    main()

"""Arguments of transformers' `Trainer` as settings of a relay, and refusal of those that a relay cannot honour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import TrainingArguments

from l2l_core.config import RelayConfig

_IN_BACKWARD = ("lomo", "adalomo")  # optimizers that update weights during backward, as those of each layer do


def relay_config_of(given: RelayConfig, args: TrainingArguments) -> RelayConfig:
    """Return the settings of a trainer's relay: those that the user has given, completed by the trainer's arguments.

    Raises:
        ValueError: a setting was given that an argument of the trainer decides.
    """
    clip = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
    precision = "bf16" if args.bf16 else "fp32"
    for name, value, default, argument in (
        ("micro_batches", given.micro_batches, 1, "gradient_accumulation_steps"),
        ("max_grad_norm", given.max_grad_norm, None, "max_grad_norm"),
        ("precision", given.precision, precision, "bf16"),
    ):
        if value not in (default, "fp32"):
            raise ValueError(
                f"relay_config=RelayConfig({name}={value!r}): an argument of the trainer decides it. Leave it out, and give "
                f"TrainingArguments({argument}=...)"
            )
    if given.verify not in ("first", "never"):
        raise ValueError(
            f"relay_config=RelayConfig(verify={given.verify!r}): steps of a trainer are not compared with training in core, as "
            "its code counts tokens and metrics in every forward. Leave it out, and compare a batch outside of the trainer: "
            "Relay(model, ...).verify(batch)"
        )
    update = "deferred" if clip is not None and given.update == "eager" else given.update
    seed = args.seed if given.seed is None else given.seed
    # No comparison with training in core: the trainer's own code counts tokens and metrics
    return replace(given, update=update, max_grad_norm=clip, precision=precision, seed=seed, verify="never")


def refuse_arguments(trainer: Any) -> None:
    """Raise ValueError if an argument of a trainer cannot be honoured by its relay."""
    for argument, why, remedy in _refused(trainer.args, trainer):
        raise ValueError(f"{argument}: {why}. {remedy}")


def _prepares_inputs(trainer: Any) -> str:
    """Return the name of the class with a `_prepare_inputs` beside that of transformers, as GRPO's; empty if there is none."""
    kinds = (kind for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind))
    return next((kind.__name__ for kind in kinds if not kind.__module__.startswith("transformers.")), "")


def _refused(args: TrainingArguments, trainer: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every argument that cannot be honoured, with the reason and a remedy."""
    optim = str(getattr(args.optim, "value", args.optim))
    if args.fp16:
        yield "fp16=True", "a relay has no loss scaling", "Use bf16=True, or fp16=False for float32"
    if args.fp16_full_eval or args.bf16_full_eval:
        name = "fp16_full_eval" if args.fp16_full_eval else "bf16_full_eval"
        yield (
            f"{name}=True",
            "it casts the weights, which the relay owns",
            f"Use {name}=False; bf16=True evaluates in bfloat16",
        )
    if args.deepspeed or trainer.is_deepspeed_enabled:
        yield f"deepspeed={args.deepspeed!r}", "it moves weights and optimizer itself", "Use deepspeed=None"
    if args.fsdp or trainer.is_fsdp_enabled:
        yield f"fsdp={args.fsdp!r}", "it shards the weights, which the relay owns", "Leave fsdp out"
    if args.torch_compile:
        yield (
            "torch_compile=True",
            "it compiles the model as one graph, in which layers are not separate",
            "Use torch_compile=False, and compile layers one by one (layer.compile())",
        )
    if args.activation_checkpointing:
        yield (
            "activation_checkpointing=True (formerly gradient_checkpointing)",
            "a relay recomputes each layer itself",
            "Use activation_checkpointing=False",
        )
    if args.world_size > 1:
        yield (
            f"{args.world_size} processes",
            "this trainer trains with one",
            "Start it without torchrun; for several, call relay.step in a loop, with Relay(workers=Workers())",
        )
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs",
            "the trainer would put the model into DataParallel, and a relay computes on one GPU",
            "Set CUDA_VISIBLE_DEVICES=0 before Python starts",
        )
    if trainer.is_model_parallel or getattr(trainer.model, "hf_device_map", None):
        yield "a model with device_map", "its layers are on several devices", "Load it without device_map"
    if getattr(args, "predict_with_generate", False) and args.device.type != "cpu":
        yield (
            "predict_with_generate=True",
            f"it generates with the whole model on {args.device}",
            "Use predict_with_generate=False, and generate after training, without a relay",
        )
    if args.gradient_accumulation_steps > 1 and (preparing := _prepares_inputs(trainer)):
        yield (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}",
            f"{preparing} prepares inputs by the number of batches that it has trained (it generates, and buffers), and the "
            "micro-batches of a relay take turns",
            "Use gradient_accumulation_steps=1 and a larger per_device_train_batch_size",
        )
    if optim in _IN_BACKWARD or optim.endswith("_layerwise"):
        yield (
            f"optim={optim!r}",
            "it updates weights during backward",
            "Use optim='adamw_torch_fused' or optim='adafactor'",
        )

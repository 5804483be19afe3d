"""Programs with models for pictures: timm, torchvision and diffusers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import ROWS, adamw, pictures
from torch import Tensor, nn

STEPS = 3
model_case = partial(case, "models")


def trains_on_pictures(side: Side, make: Callable[[], nn.Module], size: int = 32, **options: Any) -> None:
    torch.manual_seed(0)
    model = make().train()
    with side.training(model, adamw(model, lr=1e-3), loss=nn.CrossEntropyLoss(), **options) as step:
        for n in range(STEPS):
            step(pictures(n, size))


def timm_model(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **settings)


def vision_model(name: str, **settings: Any) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, num_classes=5, **settings)


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 5, "dropout": 0.1}
    return VisionTransformer(image_size=32, patch_size=8, **sizes)


PICTURES: list[tuple[str, str, Callable[[], nn.Module], int]] = [
    ("timm", "test_vit with drop_path", partial(timm_model, "test_vit", img_size=32, drop_path_rate=0.2), 32),
    ("timm", "test_convnext", partial(timm_model, "test_convnext"), 32),
    ("timm", "test_efficientnet, batch norm", partial(timm_model, "test_efficientnet"), 64),
    ("timm", "resnet10t, batch norm", partial(timm_model, "resnet10t"), 64),
    ("torchvision", "resnet18", partial(vision_model, "resnet18"), 64),
    ("torchvision", "VisionTransformer with dropout", vision_transformer, 32),
    ("torchvision", "mobilenet_v3_small", partial(vision_model, "mobilenet_v3_small"), 64),
]
for library, what, make, size in PICTURES:
    model_case(library, what)(partial(trains_on_pictures, make=make, size=size))


def trains_on_mixtures(side: Side, loss: Callable[..., Tensor]) -> None:
    import numpy
    from timm.data import Mixup

    torch.manual_seed(0), numpy.random.seed(0)
    mixup, model = Mixup(mixup_alpha=0.8, num_classes=5), timm_model("test_vit", img_size=32)
    with side.training(model, adamw(model), loss=loss) as step:
        for n in range(STEPS):
            step(mixup(*pictures(n)))


@model_case("timm", "Mixup, and SoftTargetCrossEntropy called in the user's loss")
def mixed_pictures(side: Side) -> None:
    from timm.loss import SoftTargetCrossEntropy

    criterion = SoftTargetCrossEntropy()
    trains_on_mixtures(side, lambda outputs, batch: criterion(outputs, batch[1]))


@model_case("timm", "Mixup, and loss=SoftTargetCrossEntropy() as it is")
def mixed_pictures_as_they_are(side: Side) -> None:
    from timm.loss import SoftTargetCrossEntropy

    trains_on_mixtures(side, SoftTargetCrossEntropy())


@model_case("timm", "set_grad_checkpointing()", "remove torch.utils.checkpoint")
def checkpointed(side: Side) -> None:
    def make() -> nn.Module:
        model: Any = timm_model("test_vit", img_size=32)
        model.set_grad_checkpointing(not side.is_remedied)
        return model

    trains_on_pictures(side, make)


# -- diffusers -------------------------------------------------------------------------------------------------------


def noisy(step: int, channels: int = 3, side: int = 16) -> dict[str, Tensor]:
    """Pictures, noise and times."""
    g = torch.Generator().manual_seed(step)
    shape = (ROWS, channels, side, side)
    clean, noise = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return {"clean": clean, "noise": noise, "time": torch.randint(1000, (ROWS,), generator=g)}


def denoising(model: nn.Module, batch: dict[str, Tensor], **inputs: Any) -> Tensor:
    """Predict the noise that a scheduler has added."""
    from diffusers import DDPMScheduler

    seen = DDPMScheduler().add_noise(batch["clean"], batch["noise"], batch["time"])
    return nn.functional.mse_loss(model(seen, batch["time"], **inputs).sample, batch["noise"])


def trains_denoiser(side: Side, make: Callable[[], nn.Module], objective: Any = denoising, channels: int = 3) -> None:
    torch.manual_seed(0)
    model = make().train()
    with side.training(model, adamw(model, lr=1e-3), objective=objective) as step:
        for n in range(STEPS):
            step(noisy(n, channels))


@model_case("diffusers", "UNet2DModel, noise of a DDPMScheduler")
def unet(side: Side) -> None:
    from diffusers import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    trains_denoiser(side, partial(UNet2DModel, **sizes, **kinds, attention_head_dim=8))


@model_case("diffusers", "UNet2DConditionModel with encoder states")
def conditional_unet(side: Side) -> None:
    from diffusers import UNet2DConditionModel

    kinds = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    sizes = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        states = batch["clean"].flatten(2).transpose(1, 2)[:, :8]
        return denoising(model, batch, encoder_hidden_states=states)

    channels = {"in_channels": 3, "out_channels": 3, "cross_attention_dim": 3, "attention_head_dim": 8}
    trains_denoiser(side, partial(UNet2DConditionModel, **sizes, **kinds, **channels), objective)


@model_case("diffusers", "DiTTransformer2DModel")
def diffusion_transformer(side: Side) -> None:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 16, "patch_size": 4}

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["clean"], timestep=batch["time"], class_labels=batch["time"] % 5).sample
        return nn.functional.mse_loss(found, batch["noise"])

    trains_denoiser(side, partial(DiTTransformer2DModel, in_channels=3, num_embeds_ada_norm=1000, **sizes), objective)


@model_case("diffusers", "AutoencoderKL, sampled codes and a KL term")
def autoencoder(side: Side) -> None:
    from diffusers import AutoencoderKL

    def objective(model: Any, batch: dict[str, Tensor]) -> Tensor:
        codes = model.encode(batch["clean"]).latent_dist
        found = model.decode(codes.sample()).sample
        return nn.functional.mse_loss(found, batch["clean"]) + 1e-3 * codes.kl().mean()

    sizes = {"block_out_channels": (16,), "norm_num_groups": 4, "latent_channels": 2, "sample_size": 16}
    trains_denoiser(side, partial(AutoencoderKL, **sizes), objective)

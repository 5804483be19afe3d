"""Gradients of data parallelism in fewer bytes: int8 with a scale per block, or the largest elements alone.

Hooks of DDP, written here since torch's fail on gloo (`quantization_pertensor_hook`) or do not exist. Each rank compresses its
gradients, an all-gather hands all messages to all ranks, and each adds them in the order of ranks, so that all update alike.
A rank adds the part that it did not send to its next gradients (error feedback, arXiv 1809.07599). Otherwise small gradients
would never be sent.

An all-gather sends p-1 times the message of a rank, an all-reduce 2 (p-1)/p times the gradients. So int8 sends more than no
compression does from 8 ranks on for float32, and from 16 on for float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Tensor = torch.Tensor


class CompressedGradients(ABC):
    """DDP's hook that averages compressed gradients; state of one rank.

    Invariant: for each parameter, values sent so far and `unsent` add up to its gradients so far, but for rounding.
    """

    def __init__(self) -> None:
        self.unsent: dict[Any, Tensor] = {}  # by parameter, since DDP orders its buckets anew after the first step

    @abstractmethod
    def compress(self, values: Tensor) -> Tensor:
        """Return values of shape (n,) as a message of bytes."""

    @abstractmethod
    def decompress(self, message: Tensor, like: Tensor) -> Tensor:
        """Return the values of a message, in the shape and dtype of `like`."""

    @abstractmethod
    def message_bytes(self, elements: int, itemsize: int) -> int:
        """Return the bytes of a message for so many elements."""

    def average(self, bucket: Any) -> Any:
        """Return a future of the mean over ranks of a bucket's gradients, as they were sent.

        Args:
            bucket: DDP's `GradBucket`.
        """
        buffer, params = bucket.buffer(), bucket.parameters()
        values = buffer + torch.cat([self.unsent.get(each, torch.zeros_like(each)).flatten() for each in params])
        message = self.compress(values)
        left = (values - self.decompress(message, values)).split([each.numel() for each in params])
        self.unsent.update({param: part.view_as(param) for param, part in zip(params, left, strict=True)})
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, message)  # a future's callback would run on gloo's thread, where no profiler sees it
        mean = torch.futures.Future[Tensor]()
        mean.set_result(sum((self.decompress(each, values) for each in messages), torch.zeros(())) / len(messages))
        return mean


class Int8Gradients(CompressedGradients):
    """Gradients rounded to int8, with a float32 scale per block of 256 elements."""

    block = 256

    def compress(self, values: Tensor) -> Tensor:
        blocks = nn.functional.pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        scales = (blocks.abs().amax(1) / 127).float()
        smallest = torch.finfo(torch.float32).tiny  # for a block of zeros
        numbers = (blocks / scales.clamp_min(smallest)[:, None]).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([numbers.flatten()[: len(values)].view(torch.uint8), scales.view(torch.uint8)])

    def decompress(self, message: Tensor, like: Tensor) -> Tensor:
        numbers, scales = message[: len(like)].view(torch.int8), message[len(like) :].clone().view(torch.float32)
        return numbers.to(like.dtype) * scales.to(like.dtype).repeat_interleave(self.block)[: len(like)]

    def message_bytes(self, elements: int, itemsize: int) -> int:
        return elements + 4 * -(-elements // self.block)


class LargestGradients(CompressedGradients):
    """The largest 1 % of a gradient's elements, with their positions as int32."""

    share = 0.01

    def compress(self, values: Tensor) -> Tensor:
        positions = values.abs().topk(self._count(len(values))).indices
        return torch.cat([values[positions].view(torch.uint8), positions.int().view(torch.uint8)])

    def decompress(self, message: Tensor, like: Tensor) -> Tensor:
        values, positions = message.split([self._count(len(like)) * each for each in (like.itemsize, 4)])
        whole = torch.zeros_like(like)
        whole[positions.clone().view(torch.int32).long()] = values.view(like.dtype)
        return whole

    def message_bytes(self, elements: int, itemsize: int) -> int:
        return self._count(elements) * (itemsize + 4)

    def _count(self, elements: int) -> int:
        return math.ceil(elements * self.share)

"""The actions of a pipeline step by rank, with a text form that can be read, edited and parsed.

kind  operation on one stage and one micro-batch
F     forward; keeps the record that backward reads, or its input alone if an R follows
R     recompute: forward again from the kept input, for the record
B     backward
I     the part of backward that the stage before waits for: the gradient of the input
W     the rest of that backward: the gradients of the weights

An action is written as in `torch.distributed.pipelining`, stage before kind before micro-batch: `2F0`. Sends and receives
are not written, since they follow: F needs the output of the stage before, B and I need the gradient of the stage after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

KINDS = "FRBIW"
_WORD = re.compile(rf"(\d+)([{KINDS}])(\d+)")
_HEAD = re.compile(r"pipeline (\S+) micro_batches=(\d+)( weights=host)?")
_LINE = re.compile(r"\s*(\d+)\s*\|(.*)")


class PipelineError(ValueError):
    """A plan that would compute something else than a training step, or that never ends.

    Attributes:
        rank: rank of the action.
        index: position of the action in `PipelinePlan.ranks[rank]`; their number if an action is missing.

    Example:
        >>> from dataclasses import replace
        >>> from l2l_core.pipelines import PipelineError, check_pipeline, gpipe
        >>> plan = gpipe(2, 2)
        >>> try:
        ...     check_pipeline(replace(plan, ranks=(plan.ranks[0][:-1], plan.ranks[1])))
        ... except PipelineError as error:
        ...     print(error.rank, error)
        0 at the end of rank 0: 0B1 is missing. Remedy: append 0B1
    """

    def __init__(self, rank: int, index: int, message: str) -> None:
        super().__init__(message)
        self.rank, self.index = rank, index


class PipelineAction(NamedTuple):
    """An action of a pipeline; `str` writes it as in torch.

    Example:
        >>> from l2l_core.pipelines import PipelineAction
        >>> str(PipelineAction(stage=1, kind="F", k=0))  # forward of micro-batch 0 in stage 1
        '1F0'
    """

    stage: int
    kind: str
    k: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.k}"


Actions = tuple[PipelineAction, ...]


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The actions of one step of a pipeline, for every rank in order.

    `str(plan)` has a line per rank; `PipelinePlan.parse` reads it.

    Attributes:
        name: of the schedule.
        micro_batches: number of micro-batches.
        ranks: actions by rank.
        weights_on_host: True if ranks load the weights of any stage from the host, as a relay does. Otherwise all actions of
            a stage are on the rank that holds its weights.

    Example:
        >>> from l2l_core.pipelines import PipelinePlan, gpipe
        >>> plan = gpipe(2, 2)
        >>> print(plan)
        pipeline GPipe micro_batches=2
          0 | 0F0 0F1 0B0 0B1
          1 | 1F0 1F1 1B0 1B1
        >>> PipelinePlan.parse(str(plan)) == plan
        True
    """

    name: str
    micro_batches: int
    ranks: tuple[Actions, ...]
    weights_on_host: bool = False

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max((action.stage for actions in self.ranks for action in actions), default=-1)

    @cached_property
    def place(self) -> dict[PipelineAction, tuple[int, int]]:
        """The rank of every action, and its position there; of an action that is there twice, the first."""
        places: dict[PipelineAction, tuple[int, int]] = {}
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                places.setdefault(action, (rank, index))
        return places

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that have actions on a rank."""
        return sorted({action.stage for action in self.ranks[rank]})

    def recomputes(self, stage: int, k: int) -> bool:
        """Return whether a micro-batch is recomputed in a stage, so that its forward keeps the input alone."""
        return PipelineAction(stage, "R", k) in self.place

    def gradient_of(self, stage: int, k: int) -> PipelineAction:
        """Return the action that makes the gradient of a stage's input: its I, or its B."""
        split = PipelineAction(stage, "I", k)
        return split if split in self.place else PipelineAction(stage, "B", k)

    def needs(self, action: PipelineAction) -> list[PipelineAction]:
        """Return the actions that must have finished before this one, wherever they run."""
        stage, kind, k = action
        first = PipelineAction(stage, "F", k)
        if kind == "F":
            return [PipelineAction(stage - 1, "F", k)] if stage else []
        if kind == "W":
            return [PipelineAction(stage, "I", k)]
        gradient = [self.gradient_of(stage + 1, k)] if stage + 1 < self.stages else []
        if kind == "R":
            return [first, *(gradient if self.is_read_at_once(action) else [])]
        return [PipelineAction(stage, "R", k) if self.recomputes(stage, k) else first, *gradient]

    def is_read_at_once(self, action: PipelineAction) -> bool:
        """Return whether the rank's next action is the backward that reads the record of this F or R."""
        rank, index = self.place[action]
        return self.ranks[rank][index + 1 : index + 2] == (self.gradient_of(action.stage, action.k),)

    def in_order(self) -> Iterator[PipelineAction]:
        """Yield the actions of all ranks in an order in which they can run.

        Raises:
            PipelineError: every rank waits for another.
        """
        position, done = [0] * len(self.ranks), set[PipelineAction]()
        while any(i < len(actions) for i, actions in zip(position, self.ranks, strict=True)):
            before = len(done)
            for rank, actions in enumerate(self.ranks):
                while position[rank] < len(actions) and done.issuperset(self.needs(actions[position[rank]])):
                    done.add(actions[position[rank]])
                    yield actions[position[rank]]
                    position[rank] += 1
            if len(done) == before:
                raise self._deadlock(position, done)

    def _deadlock(self, position: Sequence[int], done: set[PipelineAction]) -> PipelineError:
        rank = next(r for r, i in enumerate(position) if i < len(self.ranks[r]))
        action = self.ranks[rank][position[rank]]
        missing = next(need for need in self.needs(action) if need not in done)
        where = self.place.get(missing)
        if where is None:
            remedy = f"add {missing}, or remove {action}"
        else:
            stop = self.ranks[where[0]][position[where[0]]]
            remedy = f"move {missing} before {stop} on rank {where[0]}, or {action} further back"
        text = f"action {position[rank]} of rank {rank} ({action}): it needs {missing}, which never runs before it"
        return PipelineError(rank, position[rank], f"{text}. Remedy: {remedy}")

    def in_flight(self, rank: int) -> int:
        """Return the largest number of records that a rank keeps at once: micro-batches, counted once for every stage.

        A forward that is recomputed leaves its input, which is not counted here.
        """
        most, count = 0, 0
        for stage, kind, k in self.ranks[rank]:
            count += kind == "R" or (kind == "F" and not self.recomputes(stage, k))
            most = max(most, count)
            count -= kind in "BW"
        return most

    def __str__(self) -> str:
        head = f"pipeline {self.name} micro_batches={self.micro_batches}{' weights=host' * self.weights_on_host}"
        return "\n".join([head, *(f"{rank:>3} | {_words(actions)}" for rank, actions in enumerate(self.ranks))])

    __repr__ = __str__  # a notebook shows it

    @staticmethod
    def parse(text: str) -> PipelinePlan:
        """Parse the text form.

        Raises:
            ValueError: with the line and the word that cannot be read.
        """
        head, *lines = [line for line in text.splitlines() if line.strip()] or [""]
        match = _HEAD.fullmatch(head.strip())
        if match is None:
            raise ValueError(f"{head!r}: the first line is written as `pipeline NAME micro_batches=4`")
        ranks: list[Actions] = []
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is None or int(found[1]) != len(ranks):
                raise ValueError(f"{line!r}: the line of rank {len(ranks)} is written as `{len(ranks)} | 0F0 0B0`")
            ranks.append(tuple(_parse_word(word, line) for word in found[2].split()))
        return PipelinePlan(match[1], int(match[2]), tuple(ranks), match[3] is not None)

    def csv(self) -> str:
        """Return the plan in the form that torch's pipeline runtime loads: a row per rank.

        Raises:
            ValueError: torch runs each stage on one rank, and has no action for a recompute.
        """
        if self.weights_on_host:
            raise ValueError(
                f"{self.name} runs a stage on several ranks, and torch's runtime runs each stage on the rank that holds it. "
                "Choose another schedule to run, and simulate this one"
            )
        rows = [[str(action) for action in actions if action.kind != "R"] for actions in self.ranks]
        return "".join(",".join(row) + "\n" for row in rows)


def _words(actions: Actions) -> str:
    return " ".join(map(str, actions))


def _parse_word(word: str, line: str) -> PipelineAction:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{word!r} in {line!r} is no action: write stage, letter ({', '.join(KINDS)}) and micro-batch, as in `2F0`"
        )
    return PipelineAction(int(match[1]), match[2], int(match[3]))

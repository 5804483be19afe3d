"""The frame of a script: what it asks for, how it trains, and the check that it begins and goes as the session did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent, wrap

from workbench.session.batches import SourceKind
from workbench.session.race_result import STEPS_PER_ROUND


@dataclass(frozen=True)
class ScriptFrame:
    """What differs from script to script.

    Attributes:
        lines: that do what the session did, in order.
        names: imported from the engine.
        config: of the relay at the beginning, as code.
        begun: steps, branch, keys of layers and lines of the journal then.
        kind: of the source of batches.
        turn: tells a scheduler of the learning rate of a step; "" without one.
        has_schedule: whether a schedule edits layers or lets some sit out.
        has_race: whether branches raced.
    """

    lines: Sequence[str]
    names: Sequence[str]
    config: str
    start_state: tuple[int, str, Sequence[str], int]
    kind: SourceKind
    scheduler_step: str
    has_schedule: bool
    has_race: bool


def render_script(frame: ScriptFrame) -> str:
    """Write the whole program."""
    more = ["schedule"] * frame.has_schedule + ["scheduler"] * bool(frame.scheduler_step)
    given = "".join(f", {name}" for name in more)
    step = "schedule.step(relay, batch)" if frame.has_schedule else "relay.step(batch)"
    parts = [
        _HEAD.format(names=", ".join(frame.names), imports="\n".join(_imports(frame))),
        _stubs(frame),
        _BY_HAND,
        f"def reproduce(relay, batches{given}):\n" + indent(_start_check(frame), "    "),
        indent(_TRAIN.format(step=step, turn=f"\n    {frame.scheduler_step}" if frame.scheduler_step else ""), "    "),
        *([indent(_ATTEMPT, "    ")] if frame.has_schedule else []),
        *([indent(_race_function(frame), "    ")] if frame.has_race else []),
        indent("\n".join([*frame.lines, "return losses"]), "    "),
        _run_function(frame, more),
    ]
    # Parts bring blank lines of their own: at most one stays in a function, and two between functions.
    return re.sub(r"\n{3,}(?=    )", "\n\n", re.sub(r"\n{4,}", "\n\n\n", "\n".join(parts)))


_HEAD = '''"""What a session of the workbench did with a relay, as a program that does it again.

Write make_relay() and batches() (and what else raises NotImplementedError), then run it. Losses and weights are the same to
the bit where the model, its seed, the batches and the machine are the same.
"""

{imports}

from l2l_core import {names}

'''

_BY_HAND = '''
def by_hand(what, relay):
    """The session did this with code or a module that it cannot write down. Do it here; where it changed nothing, return."""
    raise NotImplementedError(f"by_hand(): the session did something that this script cannot know; write it there: {what}")

'''

_TRAIN = '''
waiting = []  # the batch that was taken and that no step was made on

def take():
    """Look at the next batch; one that draws random numbers draws them now, and not only when it is trained on."""
    if not waiting:
        waiting.append(next(batches))
    return waiting[0]

def train_on(batch):
    losses.append({step}.loss){turn}

def train(steps, loss=None):
    """Make steps on the next batches; `loss` is what the last of them had in the session."""
    for _ in range(steps):
        train_on(take())
        waiting.clear()
    check(loss)

def check(loss):
    """Compare the last loss with that of the session; None where there is none to compare with."""
    if loss is not None and losses[-1] != loss:
        warnings.warn(
            f"the loss of step {{relay.steps}} of {{relay.branch}} is {{losses[-1]!r}}, and in the session it was {{loss!r}}: "
            "the model, its seed, the batches or the machine are others"
        )
'''

_ATTEMPT = '''
def attempt(batch):
    """A step on this batch failed in the session: make the edits that were due before it, as many as could be made."""
    with suppress(Exception), relay.expect(batch):
        schedule.prepare(relay)
'''

_RACE = '''
def race(steps, last, tried=()):
    """Train branches in turn on the same batches, {round} steps of each at a time, and go back.

    `steps` are those of each branch, `last` the loss of its last one, and in `tried` are those whose next step failed.
    """
    home, done, kept, taken = relay.branch, dict.fromkeys(steps, 0), [None] * {round}, 0{begin}
    while racing := [name for name in steps if done[name] < steps[name] + (name in tried)]:
        name = min(racing, key=lambda name: done[name] // {round})
        step, place = done[name], done[name] % {round}
        if relay.branch != name:
            relay.switch(name){load}
        if step == taken:
            kept[place], taken = copy.deepcopy(take()), taken + 1
        done[name] += 1
        if step == steps[name]:
            {failed}
            continue
        train_on(kept[place])
        if done[name] == taken:
            waiting.clear(){keep}
        if done[name] == steps[name]:
            check(last.get(name))
    if relay.branch != home:
        relay.switch(home){end}
'''

_RATES = {  # of a race: each branch has a state of the scheduler of its own
    "begin": "\n    begun = copy.deepcopy(scheduler.state_dict())\n    rates = dict.fromkeys([home, *steps], begun)",
    "load": "\n        scheduler.load_state_dict(copy.deepcopy(rates[name]))",
    "keep": "\n        rates[name] = copy.deepcopy(scheduler.state_dict())",
    "end": "\n    scheduler.load_state_dict(rates[home])",
}


def _race_function(frame: ScriptFrame) -> str:
    failed = "attempt(kept[place])" if frame.has_schedule else "pass  # but its batch was taken"
    return _RACE.format(
        round=STEPS_PER_ROUND, failed=failed, **(_RATES if frame.scheduler_step else dict.fromkeys(_RATES, ""))
    )


def _imports(frame: ScriptFrame) -> Iterator[str]:
    if frame.has_race:
        yield "import copy"
    if frame.kind == "iterable":
        yield "import itertools"
    yield "import warnings"
    if frame.has_schedule:
        yield "from contextlib import suppress"
    if any("replace(" in line for line in frame.lines):
        yield "from dataclasses import replace"


def _stubs(frame: ScriptFrame) -> str:
    """The functions that somebody has to write."""
    steps, branch, keys, edits = frame.start_state
    layers = f"{len(keys)} layers, {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"{len(keys)} layer"
    past = f", {edits} lines of its journal" if edits else ""
    asked = [
        _stub(
            "make_relay",
            f"The relay as the session found it: {layers}, after step {steps} of {branch}{past}.",
            f"build the model from its seed and return Relay(model, ..., config={frame.config})",
        ),
        _stub("batches", *_BATCHES[frame.kind]),
    ]
    if frame.has_schedule:
        asked.append(
            _stub("make_schedule", "The schedule of the session.", "return what Session(schedule=...) was given")
        )
    if frame.scheduler_step:
        asked.append(
            _stub("make_scheduler", "The scheduler of the learning rate, as it was when the session began.",
                 "return one over relay.optimizer, as Session(scheduler=...) was given", "relay")
        )  # fmt: skip
    return "\n".join(asked)


_BATCHES = {
    "iterable": (
        "What the session was given as batches (a list, a DataLoader with the same seed); when it ends, it begins again.",
        "return it here",
    ),
    "iterator": ("The batches that the session was given, from its first one on.", "return an iterator of them"),
    "function": ("The next batch, as the session's own function returned it.", "return a batch"),
}


def _stub(name: str, docstring: str, remedy: str, args: str = "") -> str:
    escaped = json.dumps(docstring, ensure_ascii=False)[1:-1]  # a name of a branch may hold quotes and backslashes
    return f'''
def {name}({args}):
    """{escaped}"""
    raise NotImplementedError(
        {f"{name}() is not written yet: {remedy}"!r}
    )
'''


def _start_check(frame: ScriptFrame) -> str:
    """Check that the relay is the one with which the session began."""
    steps, branch, keys, edits = frame.start_state
    listed = "\n".join(f"    {line}" for line in wrap(", ".join(map(repr, keys)) + ",", 110))
    return f'''"""Do all of it; the loss of every step, in the order in which they were made."""
losses = []
begun = {steps}, {branch!r}, {edits}, {frame.config}, [
{listed}
]
found = relay.steps, relay.branch, len(relay.journal), relay.config, [layer.key for layer in relay.stack]
if found != begun:
    raise ValueError(
        f"steps, branch, lines of the journal, settings and layers of this relay are {{found}}, and the session began with "
        f"{{begun}}: return such a relay from make_relay()"
    )
'''


def _run_function(frame: ScriptFrame, more: Sequence[str]) -> str:
    source = {
        "iterable": "itertools.chain.from_iterable(itertools.repeat(batches()))",
        "iterator": "iter(batches())",
        "function": "iter(batches, object())",  # until it returns that very object, which is never
    }[frame.kind]
    made = {"schedule": "make_schedule()", "scheduler": "make_scheduler(relay)"}
    given = "".join(f", {made[name]}" for name in more)
    return f"""

if __name__ == "__main__":
    relay = make_relay()
    losses = reproduce(relay, {source}{given})
    print(f"{{len(losses)}} steps are made again" + (f"; the last loss is {{losses[-1]!r}}" if losses else ""))
"""

"""Template of a script: functions for the user to write, the training loop, and checks against the session."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent, wrap

from workbench.session.batches import SourceKind
from workbench.session.notebook_source import NotebookSource
from workbench.session.race_result import STEPS_PER_ROUND


@dataclass(frozen=True)
class ScriptFrame:
    """Values of the template.

    Attributes:
        lines: lines that repeat the session, in order.
        names: names imported from the engine.
        config: code of the relay's configuration at the beginning.
        own_schedule: name of a function in it that is the relay's schedule; "" for none.
        start_state: steps, branch, keys of layers and number of journal entries at the beginning.
        kind: kind of the source of batches.
        scheduler_step: line that steps the learning rate scheduler; "" without one.
        has_schedule: True if the session has a schedule of the layers.
        has_race: True if branches raced.
        notebook: code of the notebook that made the relay and the batches; None if it is not known.
    """

    lines: Sequence[str]
    names: Sequence[str]
    config: str
    own_schedule: str
    start_state: tuple[int, str, Sequence[str], int]
    kind: SourceKind
    scheduler_step: str
    has_schedule: bool
    has_race: bool
    notebook: NotebookSource | None = None


def render_script(frame: ScriptFrame) -> str:
    """Return the program."""
    more = ["schedule"] * frame.has_schedule + ["scheduler"] * bool(frame.scheduler_step)
    given = "".join(f", {name}" for name in more)
    step = "schedule.step(relay, batch)" if frame.has_schedule else "relay.step(batch)"
    parts = [
        _HEAD.format(names=", ".join(frame.names), imports="\n".join(_imports(frame)), todo=_todo(frame)),
        _stubs(frame),
        _BY_HAND,
        f"def reproduce(relay, batches{given}):\n" + indent(_start_check(frame), "    "),
        indent(_TRAIN.format(step=step, turn=f"\n    {frame.scheduler_step}" if frame.scheduler_step else ""), "    "),
        *([indent(_ATTEMPT, "    ")] if frame.has_schedule else []),
        *([indent(_race_function(frame), "    ")] if frame.has_race else []),
        indent("\n".join([*frame.lines, "return losses"]), "    "),
        _run_function(frame, more),
    ]
    # Parts begin and end with blank lines: keep at most one in a function, and two between functions.
    return re.sub(r"\n{3,}(?=    )", "\n\n", re.sub(r"\n{4,}", "\n\n\n", "\n".join(parts)))


_HEAD = '''"""A program that repeats a session of the workbench.

{todo} Losses and weights are
the same to the bit if the model, its seed, the batches and the machine are the same.
"""

{imports}

from l2l_core import {names}

'''

_BY_HAND = '''
def by_hand(what, relay):
    """Repeat a change that the session made with code or a module; return if it changed nothing."""
    raise NotImplementedError(f"by_hand(): the session made a change that has no code here; write it there: {what}")

'''

_TRAIN = '''
waiting = []  # the batch that was taken and not used

def take():
    """Return the next batch without using it; random numbers of the source are drawn here, as in the session."""
    if not waiting:
        waiting.append(next(batches))
    return waiting[0]

def train_on(batch):
    losses.append({step}.loss){turn}

def train(steps, loss=None):
    """Make steps on the next batches; `loss` is the last loss in the session."""
    for _ in range(steps):
        train_on(take())
        waiting.clear()
    check(loss)

def check(loss):
    """Compare the last loss with that of the session, unless it is None."""
    if loss is not None and losses[-1] != loss:
        warnings.warn(
            f"the loss of step {{relay.steps}} of {{relay.branch}} is {{losses[-1]!r}}, but {{loss!r}} in the session: "
            "the model, its seed, the batches or the machine differ"
        )
'''

_ATTEMPT = '''
def attempt(batch):
    """Make the edits before a step that failed in the session, as far as they succeed."""
    with suppress(Exception), relay.expect(batch):
        schedule.prepare(relay)
'''

_RACE = '''
def race(steps, last, tried=()):
    """Train branches in turn on the same batches, {round} steps of each at a time, and return to the active branch.

    `steps` has the number of steps of each branch, `last` its last loss, and `tried` the branches whose next step failed.
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

_RATES = {  # lines of a race that keep the state of the scheduler for each branch
    "begin": "\n    begun = copy.deepcopy(scheduler.state_dict())\n    rates = dict.fromkeys([home, *steps], begun)",
    "load": "\n        scheduler.load_state_dict(copy.deepcopy(rates[name]))",
    "keep": "\n        rates[name] = copy.deepcopy(scheduler.state_dict())",
    "end": "\n    scheduler.load_state_dict(rates[home])",
}


def _race_function(frame: ScriptFrame) -> str:
    failed = "attempt(kept[place])" if frame.has_schedule else "pass  # the batch was taken"
    return _RACE.format(
        round=STEPS_PER_ROUND, failed=failed, **(_RATES if frame.scheduler_step else dict.fromkeys(_RATES, ""))
    )


def _todo(frame: ScriptFrame) -> str:
    if frame.notebook is None:
        return "Write make_relay(), batches() and every other function that raises NotImplementedError, then run it."
    return "It runs as it is, except for functions that raise NotImplementedError, if there are any."


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
    """Return the functions for the user to write."""
    steps, branch, keys, edits = frame.start_state
    layers = f"{len(keys)} layers, {keys[0]} to {keys[-1]}" if len(keys) > 1 else f"{len(keys)} layer"
    past = f", {edits} journal entries" if edits else ""
    stubs = (
        [_from_notebook(frame.notebook, frame.kind)]
        if frame.notebook is not None
        else [
            _stub(
                "make_relay",
                f"Return the relay as at the beginning of the session: {layers}, after step {steps} of {branch}{past}.",
                f"build the model from its seed and return Relay(model, ..., config={frame.config})",
            ),
            _stub("batches", *_BATCHES[frame.kind]),
        ]
    )
    if frame.has_schedule:
        stubs.append(
            _stub("make_schedule", "Return the schedule of the session.", "return the schedule= of the Session")
        )
    if frame.scheduler_step:
        stubs.append(
            _stub(
                "make_scheduler",
                "Return the learning rate scheduler in its state at the beginning of the session.",
                "return one over relay.optimizer, like the scheduler= of the Session",
                "relay",
            )
        )
    return "\n".join(stubs)


def _from_notebook(source: NotebookSource, kind: SourceKind) -> str:
    """Return `make_relay` and `batches` with the code of the notebook."""
    call = "()" if kind == "function" else ""
    return f'''
made = {{}}  # the batches, which the same code makes

def make_relay():
    """Return the relay, as the cells of the notebook made it."""
{indent(source.code, "    ")}
    made["batches"] = {source.batches}
    return {source.relay}

def batches():
    """Return what the cells of the notebook made; call make_relay() first."""
    return made["batches"]{call}
'''


_BATCHES = {
    "iterable": (
        "Return the batches of the session (a list, a DataLoader with the same seed); they are repeated when they end.",
        "return them here",
    ),
    "iterator": ("Return an iterator over the batches of the session, from its first one.", "return an iterator"),
    "function": ("Return the next batch, like the function that the session called.", "return a batch"),
}


def _stub(name: str, docstring: str, remedy: str, args: str = "") -> str:
    escaped = json.dumps(docstring, ensure_ascii=False)[1:-1]  # the name of a branch may contain quotes and backslashes
    return f'''
def {name}({args}):
    """{escaped}"""
    raise NotImplementedError(
        {f"{name}() is not written yet: {remedy}"!r}
    )
'''


def _start_check(frame: ScriptFrame) -> str:
    """Return the check that the relay has the state at the beginning of the session."""
    steps, branch, keys, edits = frame.start_state
    listed = "\n".join(f"    {line}" for line in wrap(", ".join(map(repr, keys)) + ",", 110))
    # The function has no code here: it is the one of make_relay().
    own = frame.own_schedule
    config = frame.config.replace(f"schedule={own}", "schedule=relay.config.schedule") if own else frame.config
    return f'''"""Repeat the session, and return the loss of every step in order."""
losses = []
begun = {steps}, {branch!r}, {edits}, {config}, [
{listed}
]
found = relay.steps, relay.branch, len(relay.journal), relay.config, [layer.key for layer in relay.stack]
if found != begun:
    raise ValueError(
        f"steps, branch, journal entries, settings and layers of this relay are {{found}}, but the session began with "
        f"{{begun}}: return such a relay from make_relay()"
    )
'''


def _run_function(frame: ScriptFrame, more: Sequence[str]) -> str:
    source = {
        "iterable": "itertools.chain.from_iterable(itertools.repeat(batches()))",
        "iterator": "iter(batches())",
        "function": "iter(batches, object())",  # the sentinel is a new object, so it never ends
    }[frame.kind]
    made = {"schedule": "make_schedule()", "scheduler": "make_scheduler(relay)"}
    given = "".join(f", {made[name]}" for name in more)
    return f"""

if __name__ == "__main__":
    relay = make_relay()
    losses = reproduce(relay, {source}{given})
    print(f"{{len(losses)}} steps were repeated" + (f"; the last loss is {{losses[-1]!r}}" if losses else ""))
"""

"""Exotic features of random shells: a name, and a function that writes lines to a shell and its drafts of layers."""

from __future__ import annotations

from collections.abc import Callable

from program_shell import Shell


def _within(head: str, lines: list[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines)]


def _writes(*choices: str | list[str], parts: str | list[str] = ()) -> Callable[[Shell], None]:
    def feature(shell: Shell) -> None:
        shell.part(*([parts] if isinstance(parts, str) else parts))
        choice = shell.rng.choice(choices)
        shell.write(*([choice] if isinstance(choice, str) else choice))

    return feature


# -- layers called in other ways than one after another --------------------------------------------------------------


def _again(shell: Shell) -> None:
    index, source = shell.layer(), shell.pick()
    for _ in range(shell.rng.choice([1, 2])):
        shell.emit(shell.call(index, shell.rng.choice([source, None])))
    if shell.rng.random() < 0.5:
        shell.emit(shell.call(index, source))
        shell.write("{v} = {p} + {q}")


def _loop(shell: Shell) -> None:
    index, times = shell.layer(), shell.rng.choice(["3", "1 + int(way(x[0, 0, 0] > 0))", "len(x)"])
    v, p = shell.new(), shell.pick()
    lines = [f"{v} = {p}", *_within(f"for _ in range({times}):", [*shell.call(index, v), f"{v} = {shell.pool[-1]}"])]
    shell.emit(lines)
    shell.pool = [name for name in shell.pool if name not in _made(lines)] + [v]


def _all_in_a_loop(shell: Shell) -> None:
    plain = [i for i, draft in enumerate(shell.drafts) if draft.given == "{p}" and draft.got == ["{v} = {call}"]]
    if len(plain) < len(shell.drafts):
        return _again(shell)
    v, p = shell.new(), shell.pick()
    skip = shell.rng.choice([["if way(i == 1 and x[0, 0, 0] > 0):", "    continue"], []])
    shell.emit([f"{v} = {p}", *_within("for i, layer in enumerate(self.layers):", [*skip, f"{v} = layer({v})"])])
    shell.pool.append(v)
    return None


def _skipped(shell: Shell) -> None:
    v, p = shell.new(), shell.pick()
    choice = shell.rng.choice(["x[0, 0, 0] > 0", "random.random() < 0.5", "len(x) > 1", f"{p}[0, 0, 0] > 0"])
    lines = [
        f"{v} = {p}",
        *_within(f"if way({choice}):", [*shell.call(shell.layer(), p), f"{v} = {shell.pool[-1]} + {p}"]),
    ]
    shell.emit(lines)
    shell.pool = [name for name in shell.pool if name not in _made(lines[1:]) or name == v] + [v]


def _either(shell: Shell) -> None:
    v, p = shell.new(), shell.pick()
    before = [*shell.pool]
    one = [*shell.call(shell.layer(), p), f"{v} = {shell.pool[-1]}"]
    two = [*shell.call(shell.layer(), p), f"{v} = {shell.pool[-1]}"]
    shell.emit([*_within("if way(x[0, 0, 0] > 0):", one), *_within("else:", two)])
    shell.pool = [*before, v]


def _under(head: str, after: str = "") -> Callable[[Shell], None]:
    def feature(shell: Shell) -> None:
        lines = shell.call(shell.layer())
        for _ in range(shell.rng.choice([0, 0, 1])):
            lines += shell.call(shell.layer(), shell.pool[-1])
        v = shell.pool[-1]
        shell.emit([*_within(head, lines), *([after.format(v=v)] if after else [])])
        if not after:
            shell.write("{v} = {p} + {q}")

    return feature


def _autocast(shell: Shell) -> None:
    before, v = [*shell.pool], shell.new()
    lines = [f"{v} = F.linear({shell.pick()}, self.w)"] if shell.rng.random() < 0.5 else []
    shell.pool += [v] if lines else []
    lines += shell.call(shell.layer()) if not lines or shell.rng.random() < 0.7 else []
    out = shell.new()
    shell.emit(
        [*_within('with torch.autocast("cpu", dtype=torch.bfloat16):', lines), f"{out} = {shell.pool[-1]}.float()"]
    )
    shell.pool = [*before, out]


def _parts_through(shell: Shell) -> None:
    """A layer for each part of a tensor."""
    index, v, p = shell.layer(), shell.new(), shell.pick()
    if shell.drafts[index].given != "{p}" or shell.drafts[index].got != ["{v} = {call}"]:
        return shell.write("{v} = torch.cat([t * 2 for t in {p}.chunk(2, -1)], -1)")
    f = f"self.layers[{index}]"
    choices = [
        f"{v} = torch.cat([{f}(t) for t in {p}.split(1, 1)], 1)",
        f"{v} = torch.stack([{f}(t.unsqueeze(1))[:, 0] for t in {p}.unbind(1)], 1)",
        f"{v} = {f}({p}.reshape(-1, 1, 8)).reshape({p}.shape)",
        f"{v} = {f}({p}[:, :2]).sum(1, keepdim=True) + {p}",
        f"{v} = sum([{f}(t) for t in ({p}, {shell.pick()})])",
        f"{v} = {p}.index_add(0, *(lambda i: (i, {f}({p}[i])))((x[:, 0, 0] > 0).nonzero()[:, 0]))",
        f"{v} = checkpoint({f}, {p}, use_reentrant={shell.rng.choice([True, False])})",
    ]
    shell.emit([shell.rng.choice(choices)])
    shell.pool.append(v)
    return None


def _twins(shell: Shell) -> None:
    """One tensor through several layers, added up."""
    source, total = shell.pick(), []
    for index in (shell.layer(), shell.layer(), shell.layer()):
        shell.emit(shell.call(index, source))
        total += [shell.pool[-1]] if shell.rng.random() < 0.75 else []  # else nobody reads it
        if shell.rng.random() < 0.4:
            total.append(shell.new())
            shell.emit([f"{total[-1]} = {source} + 0.0"])
    total = total or [source]
    v = shell.new()
    shell.emit(
        [
            shell.rng.choice(
                [
                    f"{v} = {' + '.join(total)}",
                    f"{v} = sum([{', '.join(total)}])",
                    f"{v} = torch.stack([{', '.join(total)}]).mean(0)",
                ]
            )
        ]
    )
    shell.pool.append(v)


# -- what is kept over layer calls -----------------------------------------------------------------------------------


def _over_calls(first: list[str], then: list[str], parts: str | list[str] = ()) -> Callable[[Shell], None]:
    """`first`, a layer call or two, and `then`; `{a}` names the same tensor in both."""

    def feature(shell: Shell) -> None:
        a, p = shell.new(), shell.pick()
        shell.part(*([parts] if isinstance(parts, str) else parts))
        shell.emit([line.replace("{a}", a).replace("{p}", p) for line in first])
        for _ in range(shell.rng.choice([1, 2])):
            shell.emit(shell.call(shell.layer()))
        v, p = shell.new(), shell.pick()
        shell.emit([line.replace("{a}", a).replace("{v}", v).replace("{p}", p) for line in then])
        shell.pool.append(v)

    return feature


# -- hooks, and what is read from inside layers ------------------------------------------------------------------------


def _observes(*templates: str) -> Callable[[Shell], None]:
    def feature(shell: Shell) -> None:
        line = shell.rng.choice(templates)
        shell.part(line.replace("{i}", str(shell.layer())).replace("{n}", str(len(shell.parts))))
        if "self.lin" in line:
            shell.write("{v} = self.lin({p})")

    return feature


def _side(shell: Shell) -> None:
    index = shell.layer()
    shell.drafts[index].add("self.m = nn.Linear(8, 8)", "h = h + self.m(x)")
    shell.part(f"self.layers[{index}].m.register_forward_hook(lambda m, a, o: self.side.append(o))")
    shell.lines.insert(0, "self.side = []")
    shell.emit(shell.call(index))
    if shell.rng.random() < 0.5:
        shell.emit(shell.call(shell.layer()))
    shell.write("{v} = {p} + sum(self.side)")


def _attribute(shell: Shell) -> None:
    index = shell.layer()
    value = shell.rng.choice(["h", "h.detach()", "h * 2", "h[:, :1]", "torch.tanh(x)"])
    shell.drafts[index].add([], f"self.out = {value}")
    shell.emit(shell.call(index))
    if shell.rng.random() < 0.5:
        shell.emit(shell.call(shell.layer()))
    shell.write(f"{{v}} = {{p}} + self.layers[{index}].out")


def _auxiliary(shell: Shell) -> None:
    index = shell.layer()
    shell.drafts[index].add([], "self.aux = 0.1 * h.pow(2).mean()")
    shell.emit(shell.call(index))
    shell.loss.append(f"model.layers[{index}].aux")


def _peeks(*templates: str) -> Callable[[Shell], None]:
    def feature(shell: Shell) -> None:
        index = shell.layer()
        shell.drafts[index].add("self.u = nn.Linear(8, 8)", "h = h + self.u(h)")
        template = shell.rng.choice(templates)
        shell.write(template.replace("{i}", f"self.layers[{index}]"))

    return feature


def _ties(shell: Shell, names: list[str], line: str, uses: str = "") -> None:
    count = min(len(shell.drafts), shell.rng.choice([2, 2, 3]))
    chosen = shell.rng.sample(range(len(shell.drafts)), count)
    for index in chosen:
        shell.drafts[index].add("self.t = nn.Linear(8, 8)", "h = h + 0.5 * self.t(h)")
    first = chosen[0]
    shell.part(*(line.replace("{i}", str(first)).replace("{j}", str(other)) for other in chosen[1:]))
    if uses:
        shell.part(*(name.replace("{i}", str(first)) for name in names))
        for _ in range(shell.rng.choice([1, 1, 2])):
            shell.write(uses)


def _tied_layers(shell: Shell) -> None:
    _ties(
        shell,
        [],
        shell.rng.choice(
            ["self.layers[{j}].t.weight = self.layers[{i}].t.weight", "self.layers[{j}].t = self.layers[{i}].t"]
        ),
    )


def _tied_to_shell(shell: Shell) -> None:
    index = shell.layer()
    shell.drafts[index].add("self.t = nn.Linear(8, 8)", "h = h + 0.5 * self.t(h)")
    shell.part("self.tied = nn.Linear(8, 8)", f"self.tied.weight = self.layers[{index}].t.weight")
    for _ in range(shell.rng.choice([1, 1, 2])):
        shell.write("{v} = self.tied({p})")


def _shared_with_shell(shell: Shell) -> None:
    line = "self.layers[{j}].t = self.layers[{i}].t"
    if shell.rng.random() < 0.5:
        _ties(shell, ["self.sub = self.layers[{i}].t"], line, "{v} = self.sub({p})")
        return
    index = shell.layer()
    shell.drafts[index].add("self.t = nn.Linear(8, 8)", "h = h + 0.5 * self.t(h)")
    shell.part(f"self.sub = self.layers[{index}].t")
    shell.write("{v} = self.sub({p})")


def _same_layer(shell: Shell) -> None:
    """A whole inner block belongs to two layers, its buffers too."""
    chosen = shell.rng.sample(range(len(shell.drafts)), 2)
    for index in chosen:
        shell.drafts[index].add("self.e = nn.Sequential(nn.Linear(8, 8), Bent())", "h = h + self.e(h)")
    shell.part(f"self.layers[{chosen[1]}].e = self.layers[{chosen[0]}].e")


_SCALES = ["{p}.register_hook(lambda g: g * 0.5)", '{p}.register_hook(lambda g: seen("tensor", g))']
_BN = "{v} = self.bn({p}.transpose(1, 2)).transpose(1, 2)"
_EMA = ["with torch.no_grad():", "    self.ema.mul_(0.9).add_({p}.mean((0, 1)), alpha=0.1)"]
_EMA_PART = 'self.register_buffer("ema", torch.ones(8))'

SHELL_FEATURES: dict[str, Callable[[Shell], None]] = {
    "layer called again": _again,
    "layer in a loop": _loop,
    "all layers in a loop": _all_in_a_loop,
    "layer skipped": _skipped,
    "either layer": _either,
    "layer under no_grad": _under("with torch.no_grad():"),
    "layer under inference-like eval": _under("with torch.set_grad_enabled(len(x) > 1):"),
    "layer with saved tensors moved": _under("with torch.autograd.graph.save_on_cpu():"),
    "layer with a chosen attention": _under("with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):"),
    "autocast": _autocast,
    "layer for each part": _parts_through,
    "several layers on one tensor": _twins,
    "detached between layers": _writes("{v} = {p}.detach()", "{v} = {p} + {q}.detach()"),
    "gate without gradient in the shell": _writes(
        "{v} = torch.where(x > 0, {p}, 0.3)", "{v} = {p} * 0.0 + x", "{v} = (x > 0) * {p}"
    ),
    "long skip": _over_calls(["{a} = {p} + 0.0"], ["{v} = {a} + {p}"]),
    "long skip of a view": _over_calls(["{a} = {p}[:, :1]"], ["{v} = {a} + {p}"]),
    "long skip of a transpose": _over_calls(["{a} = {p}.transpose(0, 1)"], ["{v} = {a}.transpose(0, 1) * {p}"]),
    "long skip through a shell weight": _over_calls(["{a} = self.w.t()"], ["{v} = {p} @ {a}"]),
    "weight made once": _over_calls(["{a} = torch.tanh(self.w)"], ["{v} = F.linear({p}, {a})"]),
    "accumulator in place": _over_calls(["{a} = torch.zeros_like(x)", "{a} += {p}"], ["{a} += {p}", "{v} = {a}"]),
    "accumulator of a layer's input": _over_calls(["{a} = {p} + 1", "{a} *= 0.5"], ["{a} += {p}", "{v} = {a} * 1.0"]),
    "filled in place": _over_calls(
        ["{a} = torch.zeros_like(x)", "{a}[:, 0] = {p}[:, 0]"], ["{a}[:, 1] = {p}[:, 1]", "{v} = {a}"]
    ),
    "list of outputs": _over_calls(["self.outs = [{p}]"], ["self.outs.append({p})", "{v} = sum(self.outs)"]),
    "local list of outputs": _over_calls(["{a} = [{p}]"], ["{a}.append({p})", "{v} = torch.stack({a}).mean(0)"]),
    "attribute of the shell": _over_calls(["self.note = {p}"], ["{v} = {p} + self.note"], "self.note = None"),
    "number on the shell": _over_calls(["self.rows = len(x)"], ["{v} = {p} / self.rows"], "self.rows = 0"),
    "noise kept": _over_calls(["{a} = torch.rand_like(x)"], ["{v} = {p} * {a} * random.random()"]),
    "mask kept": _over_calls(["{a} = x > 0"], ["{v} = {p}.masked_fill({a}, 0.0)"]),
    "shell buffer kept": _over_calls(
        ["{a} = self.scale * 2"], ["{v} = {p} * {a} * self.scale"], 'self.register_buffer("scale", torch.ones(8))'
    ),
    "no_grad kept": _over_calls(["with torch.no_grad():", "    {a} = torch.sigmoid({p})"], ["{v} = {p} * {a}"]),
    "shell weight in several segments": _over_calls(
        ["{a} = self.lin(self.lin({p}))"], ["{v} = self.lin(self.lin({p})) + {a}"]
    ),
    "hook on a tensor": _writes(
        *(["if {p}.requires_grad:", f"    {line}"] for line in _SCALES),
        *(["{v} = self.lin({p})", line.replace("{p}", "{v}")] for line in _SCALES),
    ),
    "hook over calls": _over_calls(
        ["{a} = self.lin({p})", "{a}.register_hook(lambda g: g * 0.5)"], ["{v} = {p} + {a}"]
    ),
    "forward hook": _observes(
        'self.layers[{i}].register_forward_hook(lambda m, a, o: seen("forward {n}", o))',
        'self.layers[{i}].register_forward_pre_hook(lambda m, a: seen("pre {n}", a))',
        'next(self.layers[{i}].children()).register_forward_hook(lambda m, a, o: seen("inner {n}", o))',
        "self.layers[{i}].register_forward_pre_hook(lambda m, a: (a[0] * 0.5, *a[1:]))",
    ),
    "backward hook": _observes(
        'self.layers[{i}].register_full_backward_hook(lambda m, a, o: seen("backward {n}", o))',
        'next(self.layers[{i}].children()).register_full_backward_hook(lambda m, a, o: seen("inner backward {n}", o))',
        'self.lin.register_full_backward_hook(lambda m, a, o: seen("shell backward {n}", o))',
        "next(self.layers[{i}].parameters()).register_hook(lambda g: g * 0.5)",
    ),
    "side outputs by a hook": _side,
    "output on an attribute": _attribute,
    "auxiliary loss": _auxiliary,
    "weight of a layer read": _peeks(
        "{v} = F.linear({p}, {i}.u.weight)", "{v} = {p} + 0.1 * {i}.u.weight.pow(2).sum()"
    ),
    "submodule of a layer called": _peeks("{v} = {i}.u({p})"),
    "custom function in the shell": _writes(
        "{v} = Sine.apply({p})",
        "{v} = Kept.apply({p})",
        "{v} = Noted.apply({p})",
        "{v} = Square.apply({p}, self.s)",
        parts="self.s = nn.Parameter(torch.ones(8))",
    ),
    "gradient in the shell": _writes(
        [
            "t = {p}.detach().requires_grad_()",
            "(g,) = torch.autograd.grad(torch.tanh(self.lin(t)).sum(), t)",
            "{v} = {p} + g",
        ],
        [
            "t = {p}.detach().requires_grad_()",
            "(g,) = torch.autograd.grad(self.lin(t).pow(2).sum(), t, create_graph=True)",
            "{v} = {p} + g",
        ],
    ),
    "memory of the last micro-batch": _over_calls(
        ["{a} = {p} if self.before is None else {p} + self.before"],
        ["self.before = {p}.detach().mean((0, 1))", "{v} = {p} + {a}"],
        "self.before = None",
    ),
    "teacher in the shell": _writes(
        [
            "with torch.no_grad():",
            "    self.teacher.weight.lerp_(self.lin.weight, 0.1)",
            "{v} = self.lin({p}) + self.teacher({p})",
        ],
        parts=["self.teacher = nn.Linear(8, 8)", "self.teacher.requires_grad_(False)"],
    ),
    "data in the shell": _writes("{v} = {p} + {q}.data", ["{v} = {p} * 1.0", "{v}.data.mul_(0.5)"]),
    "batch norm in the shell": _writes(_BN, parts="self.bn = nn.BatchNorm1d(8)"),
    "ema in the shell": _writes(
        [*_EMA, "{v} = {p} * self.ema"],
        ["{v} = {p} * self.ema", *_EMA],
        ["{v} = {p} + self.ema", *_EMA],
        parts=_EMA_PART,
    ),
    "own statistics in the shell": _writes("{v} = self.bent({p})", parts="self.bent = Bent()"),
    "in place in the shell": _writes(
        "{v} = self.lin({p}).relu_()",
        ["{v} = {p} * 1.0", "{v}[:, 0] = 0.0"],
        ["{v} = {p} * 2", "{v}.add_({q})"],
        ["{v} = {p}", "{v} += 0.1"],
    ),
    "in place on a view": _writes(
        ["{v} = {p} * 1.0", "{v}[:, 1].mul_(0.5)"], ["{v} = {p} * 1.0", "for t in {v}.unbind(1):", "    t.add_(0.1)"]
    ),
    "checkpoint in the shell": _writes(
        "{v} = checkpoint(self.lin, {p}, use_reentrant=False)", "{v} = checkpoint(self.lin, {p}, use_reentrant=True)"
    ),
    "batch needs a gradient": _writes(["{v} = x.clone().requires_grad_()"], ["{v} = {p} + x.clone().requires_grad_()"]),
    "part of the shell frozen": _writes(
        "{v} = self.still({p})", parts=["self.still = nn.Linear(8, 8)", "self.still.requires_grad_(False)"]
    ),
    "weights tied": _tied_layers,
    "weight tied to the shell": _tied_to_shell,
    "submodule shared with the shell": _shared_with_shell,
    "block shared by layers": _same_layer,
    "layer in eval": _observes("self.layers[{i}].eval()"),
    "layer frozen": _observes("self.layers[{i}].requires_grad_(False)"),
}


def _made(lines: list[str]) -> set[str]:
    """Names that the lines assign."""
    targets = (line.split(" = ")[0] for line in lines if " = " in line)
    return {name.strip() for target in targets for name in target.split(",")}

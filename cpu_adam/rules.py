"""The rules by which a step changes a master and its state: one torch op per operation.

[Note: Arithmetic]
Every result is fixed by a written sequence of operations on float32, each rounded once, to
nearest, ties to even: + - x / of two operands, and the square root. Nothing is contracted: no
`alpha=`, lerp, addcmul, addcdiv, pow or foreach, which round once where the sequence rounds twice.
Scalars are computed in float64 and rounded once to 0-d tensors on the device of the data (a divisor
that is a number or lives on another device may become a multiplication by its reciprocal).
Subnormal numbers count: the calling thread must not flush them (FTZ, DAZ). Under these rules block
size, slicing, threads, instruction set and device cannot change a bit. One thing is left open, as
IEEE 754 does: the sign and payload of a NaN among float32 values. (A bfloat16 weight that becomes
NaN is always 0x7FC0: see `split`.)

[Note: Square root]
torch's float32 sqrt on a CPU is wrong in the last place for 17% of inputs, and its float64 sqrt is
a threaded library call: with more than one thread each call waits for threads of its own, which on
a busy machine costs a scheduling quantum per block. `1 / (1 / sqrt(x))` in float64, rounded to
float32, is the correctly rounded float32 square root, and both its ops are plain vector loops. Why:
scale x so that float32 square roots are the even integers below 2**25 and the midpoints between
them the odd integers M. x is then an integer other than M*M, so sqrt(x) differs from M by at least
1 / (2 * M*M) > 2**-51 of itself, whereas three float64 roundings err by less than
3 * 2**-53 < 2**-51 of it: no midpoint is crossed. (Zero, infinity, and every subnormal, which is
normal in float64, come out right by themselves.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cpu_adam.formats import scratch_bytes


class Factors:
    """The scalars of one step, each rounded once to float32; `f["lr"]` is one to compute with."""

    def __init__(self, factors: Mapping[str, float], device: torch.device) -> None:
        """factors: what the `factors` of the hyper-parameters gave."""
        rounded = torch.tensor([*factors.values()], dtype=torch.float32, device="cpu")
        self.numbers: dict[str, float] = dict(zip(factors, rounded.tolist()))
        """To decide by."""
        # What is copied from pageable memory is taken before the call returns: nobody need wait.
        self._tensors = dict(zip(factors, rounded.to(device, non_blocking=True).unbind()))

    def __getitem__(self, name: str) -> Tensor:
        """0-d, on the device of the data."""
        return self._tensors[name]


class Scratch:
    """The temporaries of one block, in uint8 memory: the first `scratch_bytes(elements)` of it."""

    def __init__(self, elements: int, memory: Tensor) -> None:
        self.elements = elements
        size = scratch_bytes(elements)
        rows = memory[:size].view(6, size // 6)  # `compact.CodedScratch` knows them, too.
        self.master, self.gradient, self.term = rows[:3].view(torch.float32)[:, :elements].unbind()
        self.bits = rows[3].view(torch.int32)[:elements]
        wide = rows[4:].view(-1)
        self.wide = wide.view(torch.float64)[:elements]
        self.mask = wide[:elements].view(torch.bool)
        """In the place of `wide`."""


Rule = Callable[[Tensor, Tensor, Mapping[str, Tensor], Factors, Scratch], None]
"""Changes a float32 master and its states, by name, in place, by a gradient that it only reads."""


def adam(p: Tensor, g: Tensor, states: Mapping[str, Tensor], f: Factors, s: Scratch) -> None:
    """AdamW (arXiv 1711.05101) or Adam (arXiv 1412.6980), with t the number of the step:

    g = g + weight_decay * p                    if L2 decay
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    d = sqrt(v) * (1 / sqrt(1 - beta2**t)) + eps
    p = p - (p * (lr * weight_decay) + (m / d) * (lr / (1 - beta1**t)))

    The decay is 0 unless it is decoupled. (A factor 1 - lr * weight_decay would be rounded to the
    same side in every step, by up to 3e-8 of the weight: more than all else over many steps.) The
    product in v is taken from the left, as torch takes it: it overflows where g does by the root of
    1 - beta2 only, and from there on (5.8e20 at beta2 = 0.999) v is infinite and p rests.
    """
    m, v = states["exp_avg"], states["exp_avg_sq"]
    g = decayed(p, scaled(g, f, s), f, s)
    m.add_(torch.sub(g, m, out=s.term).mul_(f["rest1"]))
    v.mul_(f["beta2"]).add_(torch.mul(g, f["rest2"], out=s.term).mul_(g))
    adam_step(p, m, square_root(v, s.wide, out=s.term), f, s)


def adam_step(p: Tensor, m: Tensor, root: Tensor, f: Factors, s: Scratch) -> None:
    """The last two lines of `adam`, with `root` the square root of v, which is overwritten."""
    denominator = root.mul_(f["correction2"]).add_(f["eps"])
    move = torch.div(m, denominator, out=root).mul_(f["step_size"])
    p.sub_(torch.mul(p, f["decay"], out=s.gradient).add_(move))


def lion(p: Tensor, g: Tensor, states: Mapping[str, Tensor], f: Factors, s: Scratch) -> None:
    """Lion (arXiv 2302.06675). The sign of 0 is 0, that of NaN is NaN.

    u = beta1 * m + (1 - beta1) * g
    m = beta2 * m + (1 - beta2) * g
    p = p - (p * (lr * weight_decay) + lr * sign(u))
    """
    m = states["exp_avg"]
    g = scaled(g, f, s)
    u = torch.mul(m, f["beta1"], out=s.bits.view(torch.float32))
    u.add_(torch.mul(g, f["rest1"], out=s.term))
    m.mul_(f["beta2"]).add_(torch.mul(g, f["rest2"], out=s.term))
    sign = torch.sign(u, out=s.term)
    torch.where(torch.ne(u, u, out=s.mask), u, sign, out=sign)
    p.sub_(torch.mul(p, f["decay"], out=s.gradient).add_(sign.mul_(f["lr"])))


def sgd(p: Tensor, g: Tensor, states: Mapping[str, Tensor], f: Factors, s: Scratch) -> None:
    """SGD as in torch.optim.SGD. Without momentum its buffer b is neither read nor written.

    g = g + weight_decay * p                    if decay
    b = g                                       at step 1
    b = momentum * b + (1 - dampening) * g      later
    p = p - lr * g                              without momentum
    p = p - lr * (g + momentum * b)             with nesterov
    p = p - lr * b                              else
    """
    buffer = states["momentum_buffer"]
    momentum, lr = f["momentum"], f["lr"]
    g = decayed(p, scaled(g, f, s), f, s)
    if not f.numbers["kept"]:
        buffer = g
    elif f.numbers["fresh"]:
        buffer.copy_(g)
    else:
        buffer.mul_(momentum).add_(torch.mul(g, f["rest"], out=s.term))
    if f.numbers["nesterov"]:
        direction = torch.mul(buffer, momentum, out=s.term)
        p.sub_(torch.add(g, direction, out=s.term).mul_(lr))
    else:
        p.sub_(torch.mul(buffer, lr, out=s.term))


RULES: dict[str, Rule] = {"adam": adam, "lion": lion, "sgd": sgd}
"""Every rule there is, by the name that its hyper-parameters have."""


def scaled(g: Tensor, f: Factors, s: Scratch) -> Tensor:
    """The gradient in float32, multiplied by the scale unless that is 1."""
    if g.dtype != torch.float32:
        g = s.gradient.copy_(g)
    return g if f.numbers["scale"] == 1.0 else torch.mul(g, f["scale"], out=s.gradient)


def decayed(p: Tensor, g: Tensor, f: Factors, s: Scratch) -> Tensor:
    """The gradient with its L2 term, where there is one."""
    if f.numbers["decay_l2"] == 0.0:
        return g
    return torch.add(g, torch.mul(p, f["decay_l2"], out=s.term), out=s.gradient)


def square_root(x: Tensor, wide: Tensor, out: Tensor) -> Tensor:
    """The correctly rounded float32 square root, by float64 scratch: see [Note: Square root]."""
    return out.copy_(wide.copy_(x).rsqrt_().reciprocal_())

"""What the user assigns to `p.grad`: whether it fits, and whether it can be what that shows.

[Note: Assigned gradients]
What is assigned to `p.grad` becomes what `p.grad` shows, with memory of its own, which may be part
of a buffer of the user's: changes of it count, and sums are written to it, as torch's own are. What
cannot be written to, or is of another dtype than the sums, is copied. Torch would add two gradients
that share memory in one place; here that is refused when a backward begins.
"""

from __future__ import annotations

import torch

from offload.extents import expanded, refuse_sparse, require_values
from offload.profile import Parameter


def require_fitting(one: Parameter, gradient: object, kept: str, device: torch.device) -> None:
    """Refuse what torch would not take as the gradient of a parameter on `device`.

    Of another dtype than the parameter may be what is summed in that, `kept`.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is of another shape, dtype, or device, sparse, or without values; or the
            parameter was frozen at attach.
    """
    what = f"to {one.name}.grad was assigned"
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"{what} a {type(gradient).__name__}: a tensor is needed, or None")
    if tuple(gradient.shape) != one.shape or not one.trainable:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} was assigned to {one.name} of shape "
            f"{one.shape}{'' if one.trainable else ', which was frozen at attach'}"
        )
    if gradient.layout is not torch.strided:
        refuse_sparse(f"{what} a tensor that is {gradient.layout}")
    dtypes = {one.dtype: None, kept: None}  # In this order, once each.
    if str(gradient.dtype).removeprefix("torch.") not in dtypes:
        more = "" if kept == "float32" else ", or sum in Config(gradient_dtype='fp32')"
        raise ValueError(
            f"{what} a tensor of {gradient.dtype}, but its gradients are of {' or '.join(dtypes)}, "
            f"and torch converts none either: assign it .to(torch.{kept}){more}"
        )
    if gradient.device.type not in ("cpu", device.type):
        raise ValueError(
            f"{what} a tensor on {gradient.device}, but the model computes on {device.type}, and "
            "gradients are kept in CPU memory: make it there, torch.zeros_like(p) does"
        )
    require_values(one.name, gradient)


def require_shape(one: Parameter, gradient: torch.Tensor) -> None:
    """Refuse what is shown of a parameter's gradient where its data was set to something else.

    Raises:
        ValueError: it is of another shape.
    """
    if tuple(gradient.shape) != one.shape:
        raise ValueError(
            f"the gradient of {one.name} is of shape {tuple(gradient.shape)} now, the parameter "
            f"of {one.shape}: likely its data was set; assign a gradient of the parameter's shape"
        )


def lies_in(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether an assigned gradient is a view of its own home."""
    start = window.data_ptr()
    return start <= gradient.data_ptr() < start + max(1, window.nbytes)


def may_be_shown(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether `p.grad` can be what was assigned, and the sum in `window` be written to it."""
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return False
    apart = gradient.is_inference() or expanded(gradient)
    return gradient.dtype == window.dtype and not apart

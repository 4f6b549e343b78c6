"""State formats: which slots the state of a parameter has, and where they lie in a record.

Pure data and arithmetic; imports no torch, so that planners can use it. A record is the optimizer
state of one chunk of `elements` parameters: its slots one after the other, each an array of one
item per element, each starting on a cache line, the whole padded to a cache line. (Padding to disk
blocks belongs to whoever writes files.) The typed views of a record are `cpu_adam.views`.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOT_ALIGNMENT_BYTES = 64
"""Every slot of a record starts at a multiple of this: one cache line, one widest vector."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One array of a record: an item per element."""

    name: str
    """Key of the slot in the mapping that `views` returns and `update` takes."""
    dtype: str
    """Name of a torch dtype, such as `float32` or `int16`."""
    bytes_per_element: int
    """Bytes of one item."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The optimizer state of parameters of one dtype: a row of `FORMATS`.

    >>> FORMATS["exact"].slot_offsets(100), FORMATS["exact"].record_bytes(100)
    ((0, 256, 704), 1152)
    """

    name: str
    """Name of the row."""
    weight_dtype: str
    """Name of the torch dtype in which the weight is served to the model."""
    slots: tuple[Slot, ...]
    """The slots in the order in which they lie in a record."""
    serves: tuple[str, ...] = ("exact",)
    """What a user may ask for (`states=`) to get this row for weights of `weight_dtype`."""

    @property
    def bytes_per_element(self) -> int:
        """Bytes of state per element, without padding and without the weight itself."""
        return sum(slot.bytes_per_element for slot in self.slots)

    def slot_offsets(self, elements: int) -> tuple[int, ...]:
        """Byte offset of each slot in the record of a chunk of `elements`, in slot order."""
        return self._layout(elements)[:-1]

    def record_bytes(self, elements: int) -> int:
        """Bytes of the record of a chunk of `elements`: a multiple of `SLOT_ALIGNMENT_BYTES`."""
        return self._layout(elements)[-1]

    def _layout(self, elements: int) -> tuple[int, ...]:
        """Offset of every slot, then the end of the record."""
        assert elements >= 0, elements
        offsets = [0]
        for slot in self.slots:
            lines = -(-elements * slot.bytes_per_element // SLOT_ALIGNMENT_BYTES)
            offsets.append(offsets[-1] + lines * SLOT_ALIGNMENT_BYTES)
        return tuple(offsets)


_MOMENTS = (Slot("exp_avg", "float32", 4), Slot("exp_avg_sq", "float32", 4))

FORMATS: dict[str, StateFormat] = {
    row.name: row
    for row in (
        # The float32 master is the bfloat16 weight plus the residue: see `cpu_adam.split`.
        StateFormat("exact", "bfloat16", (Slot("residue", "int16", 2), *_MOMENTS)),
        # A float32 weight is its own master.
        StateFormat("fp32", "float32", _MOMENTS, serves=("exact", "fp32")),
    )
}
"""Every state format there is, by name. To add one, add a row."""


def format_for(weight_dtype: str, states: str = "exact") -> StateFormat:
    """The state format for trainable weights of `weight_dtype` when the user asked for `states`.

    Raises ValueError where no row of `FORMATS` serves the pair, saying what to do instead.

    >>> format_for("bfloat16").name, format_for("float32").name
    ('exact', 'fp32')
    """
    for row in FORMATS.values():
        if row.weight_dtype == weight_dtype and states in row.serves:
            return row
    supported = ", ".join(
        f"{row.weight_dtype} with states={name!r}"
        for row in FORMATS.values()
        for name in row.serves
    )
    if not any(states in row.serves for row in FORMATS.values()):
        cause = f"states={states!r} is not a format that this version has"
        remedy = "use states='exact'"
    elif weight_dtype == "float16":
        cause = (
            "the model was cast to half precision, whose range is too small for weights in training"
        )
        remedy = "keep the parameters in float32 and train under torch.autocast"
    elif any(row.weight_dtype == weight_dtype for row in FORMATS.values()):
        cause = f"states={states!r} is a format for weights of another dtype"
        remedy = "use states='exact'"
    else:
        cause = "the model was built or cast in a dtype that no state format serves"
        remedy = "convert the model with model.to(torch.bfloat16) or model.float(), or freeze it"
    raise ValueError(
        f"asked for an optimizer state of trainable {weight_dtype} weights with states={states!r}; "
        f"found state formats only for {supported}; likely cause: {cause}; try: {remedy}"
    )

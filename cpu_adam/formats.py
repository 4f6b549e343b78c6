"""State formats: which slots the state of a parameter has, and where they lie in a record.

Pure data and arithmetic, in which dtypes are names, so that planners can use it. (That torch is
imported is the package's doing, not this file's.) A record is the optimizer state of one chunk of
`elements` parameters: its slots one after the other, each an array of one item per element or per
group of elements, each starting on a cache line, the whole padded to a cache line. (Padding to disk
blocks belongs to whoever writes files.) The typed views of a record are `cpu_adam.views`.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOT_ALIGNMENT_BYTES = 64
"""Every slot of a record starts at a multiple of this: one cache line, one widest vector."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One array of a record: an item per element, or per group of them."""

    name: str
    """Key of the slot in the mapping that `views` returns and `update` takes."""
    dtype: str
    """Name of a torch dtype, such as `float32` or `int16`."""
    bytes_per_item: int
    """Bytes of one item."""
    elements_per_item: int = 1
    """Elements that share an item: groups are counted from the first element of the parameter."""

    def items(self, elements: int) -> int:
        """Items for a span of `elements` that starts with a group; its last one may be short."""
        return -(-elements // self.elements_per_item)


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
    rule: str = "adam"
    """Name of the rule that updates by this state: that of its hyper-parameters."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of state per element, without padding and without the weight itself."""
        return sum(slot.bytes_per_item / slot.elements_per_item for slot in self.slots)

    @property
    def group_elements(self) -> int:
        """Elements that belong together: spans start at multiples of this in their parameter."""
        return max(slot.elements_per_item for slot in self.slots)

    @property
    def coded(self) -> bool:
        """Whether moments are codes in groups that share scales: see `cpu_adam.compact`."""
        return self.group_elements > 1

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
            lines = -(-slot.items(elements) * slot.bytes_per_item // SLOT_ALIGNMENT_BYTES)
            offsets.append(offsets[-1] + lines * SLOT_ALIGNMENT_BYTES)
        return tuple(offsets)


GROUP_ELEMENTS = 128
"""Elements that share their scales in the compact format."""

_RESIDUE = Slot("residue", "int16", 2)
_MOMENTS = (Slot("exp_avg", "float32", 4), Slot("exp_avg_sq", "float32", 4))
_CODES = (
    Slot("exp_avg", "uint8", 1),
    Slot("exp_avg_sq", "uint8", 1),
    Slot("exp_avg_scale", "float32", 4, GROUP_ELEMENTS),
    Slot("exp_avg_sq_scale", "float32", 4, GROUP_ELEMENTS),
)
_LION = Slot("exp_avg", "float32", 4)
_SGD = Slot("momentum_buffer", "float32", 4)
_BOTH = ("exact", "fp32")

SUM_BLOCK_ELEMENTS = 1024
"""Elements of one inner tree of `sum_of_squares`. Part of its definition."""

FORMATS: dict[str, StateFormat] = {
    row.name: row
    for row in (
        # The float32 master is the bfloat16 weight plus the residue: see `cpu_adam.split`.
        StateFormat("exact", "bfloat16", (_RESIDUE, *_MOMENTS)),
        # A float32 weight is its own master.
        StateFormat("fp32", "float32", _MOMENTS, serves=_BOTH),
        # A byte per moment: see `cpu_adam.compact`.
        StateFormat("compact", "bfloat16", (_RESIDUE, *_CODES), serves=("compact",)),
        StateFormat("lion_exact", "bfloat16", (_RESIDUE, _LION), rule="lion"),
        StateFormat("lion_fp32", "float32", (_LION,), serves=_BOTH, rule="lion"),
        StateFormat("sgd_exact", "bfloat16", (_RESIDUE, _SGD), rule="sgd"),
        StateFormat("sgd_fp32", "float32", (_SGD,), serves=_BOTH, rule="sgd"),
    )
}
"""Every state format there is, by name. To add one, add a row."""


DEVICE_BLOCK_ELEMENTS = 4 * 1024 * 1024
"""So many elements torch's operations work on at a time on a device, where launches cost most."""

GROUP_SCRATCH_ITEMS = 16
"""Of four bytes, for each group of coded states, beside what is for each element."""


def scratch_bytes(elements: int, *, coded: bool = False) -> int:
    """Bytes of the temporaries with which torch's operations update `elements`, a block of them
    (`DEVICE_BLOCK_ELEMENTS`) at a time.

    Six arrays of four bytes per element, each on a boundary that suits every device; of `coded`
    states (`StateFormat.coded`) one more, and some numbers for each group.
    """
    groups = -(-min(elements, DEVICE_BLOCK_ELEMENTS) // GROUP_ELEMENTS)
    per_group = 7 * GROUP_ELEMENTS + GROUP_SCRATCH_ITEMS if coded else 6 * GROUP_ELEMENTS
    return 4 * per_group * groups


def squares_bytes(elements: int) -> int:
    """Bytes of the temporaries with which torch's operations sum the squares of `elements`, a block
    of them at a time.

    Never more than those of their update, `scratch_bytes`.
    """
    wide = min(SUM_BLOCK_ELEMENTS, 1 << max(elements - 1, 0).bit_length())
    block = -(-min(elements, DEVICE_BLOCK_ELEMENTS) // wide) * wide
    return 8 * (block + (1 << max(-(-elements // wide) - 1, 0).bit_length()))


def format_for(weight_dtype: str, states: str = "exact", rule: str = "adam") -> StateFormat:
    """The state format for trainable weights of `weight_dtype` when the user asked for `states`.

    rule: the one that updates them. Raises ValueError where no row of `FORMATS` serves all three,
    saying what to do instead.

    >>> format_for("bfloat16").name, format_for("float32").name
    ('exact', 'fp32')
    """
    rows = [row for row in FORMATS.values() if row.rule == rule]
    for row in rows:
        if row.weight_dtype == weight_dtype and states in row.serves:
            return row
    served: dict[str, list[str]] = {}
    for row in rows:
        served.setdefault(row.weight_dtype, []).append(repr(row.serves[0]))
    found = " and ".join(f"{name} (states={' or '.join(of)})" for name, of in served.items())
    if not rows:
        cause = f"{rule!r} is not a rule that this version has"
        remedy = f"use one of {', '.join(sorted({row.rule for row in FORMATS.values()}))}"
    elif not any(states in row.serves for row in rows):
        cause = f"states={states!r} is not a format that this version has for {rule}"
        remedy = "use states='exact', or weights in bfloat16 (model.to(torch.bfloat16))"
    elif weight_dtype == "float16":
        cause = (
            "the model was cast to half precision, whose range is too small for weights in training"
        )
        remedy = (
            "convert the model with model.to(torch.bfloat16), or keep the parameters in float32 "
            "and train under torch.autocast"
        )
    elif weight_dtype in served:
        cause = f"states={states!r} is a format for weights of another dtype"
        remedy = "use states='exact'"
    else:
        cause = "the model was built or cast in a dtype that no state format serves"
        remedy = "convert the model with model.to(torch.bfloat16) or model.float(), or freeze it"
    so = f" with states={states!r}" if weight_dtype in served else "" if rows else f" by {rule}"
    raise ValueError(
        f"{weight_dtype} weights cannot be trained{so}; asked for their state under {rule} with "
        f"states={states!r}; found formats only for {found or 'other rules'}; likely cause: "
        f"{cause}; try: {remedy}"
    )

"""The numbers by which the kernels know each choice: one table; the extension exports its own."""

# The places in a tuple are the values of the C++ enum.
CODES: dict[str, tuple[str, ...]] = {
    "activation": ("sigmoid", "erf", "relu", "relu2", "identity", "step", "softcap"),
    "gate_up": ("gate_up", "up_gate", "interleaved"),
    "layout": ("kn", "nk"),
    "score": ("logits", "softmax", "sigmoid", "sqrtsoftplus"),
    "normalize": ("none", "softmax", "sum", "clamped_sum"),
    "group_value": ("top2", "max"),
    "shared": ("tensor", "row", "group", "block"),
}


class Choice(int):
    """A number for the kernels that prints as the name of the choice."""

    name: str

    def __new__(cls, value: int, name: str) -> "Choice":
        """The number `value`, called `name`."""
        self = super().__new__(cls, value)
        self.name = name
        return self


def choice(kind: str, name: str) -> Choice:
    """The code of `name`, one of `CODES[kind]`."""
    return Choice(CODES[kind].index(name), name)

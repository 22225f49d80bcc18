"""What functions say of their choices while they are traced, for whoever explains them."""

import contextlib
import itertools
from collections.abc import Generator
from typing import Any

import jax

_numbers = itertools.count(1)
_heard: dict[int, list[str]] = {}
# Part of JAX's trace context, another one for each listener: so that a function which was traced
# before is traced again, and speaks.
_listener: Any = jax.make_user_context(0)


@contextlib.contextmanager
def listening() -> Generator[list[str]]:
    """Collects what is told inside."""
    number = next(_numbers)
    _heard[number] = []
    try:
        with _listener(number):
            yield _heard[number]
    finally:
        del _heard[number]


def tell(text: str) -> None:
    """Says one line, once however often it is traced."""
    heard = _heard.get(_listener.value)
    if heard is not None and text not in heard:
        heard.append(text)

"""Collections of objects that live as long as others refer to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class WeakList(Generic[T]):
    """In the order in which they were added. Any thread may add one while another thread goes through them.

    A WeakSet fails then: even to make a list of it runs code of Python for each item.
    """

    def __init__(self) -> None:
        self._items: WeakKeyDictionary[T, None] = WeakKeyDictionary()

    def add(self, item: T) -> None:
        self._items[item] = None

    def clear(self) -> None:
        self._items.clear()

    def __iter__(self) -> Iterator[T]:
        for reference in self._items.keyrefs():  # a list, which is made in one step
            if (item := reference()) is not None:
                yield item

"""The one place where generators without I/O meet threads and tasks.

A generator yields each ``Call`` that it wants to be made, and is sent what that returned; what it raised is raised
inside of the generator. So one algorithm serves threads and tasks, and a simulation can drive it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Call:
    """``target.method(*arguments, **options)``; for tasks its twin, ``await target.amethod(...)``.

    ``on``: the target, where it is another one than the driver's.
    """

    __slots__ = ("arguments", "method", "on", "options")

    def __init__(
        self, method: str, arguments: Sequence[Any] = (), options: Mapping[str, Any] = _NONE, on: object = None
    ) -> None:
        self.method, self.arguments, self.options, self.on = method, arguments, options, on


Steps = Generator[Call, Any, T]
Translate = Callable[[Exception], Exception]


def _unchanged(error: Exception) -> Exception:
    return error


def drive(steps: Steps[T], target: object, translate: Translate = _unchanged) -> T:
    """Return what the generator returns, or raise what it raises.

    ``translate``: makes of an error of a call the one that is raised inside of the generator.

    What interrupts this function itself closes the generator, and so does a BaseException in a call, such as the one of
    Ctrl-C.
    """
    try:
        call = next(steps)
        while True:
            try:
                answer = getattr(target if call.on is None else call.on, call.method)(*call.arguments, **call.options)
            except Exception as error:
                call = steps.throw(translate(error))
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        steps.close()
        raise


async def adrive(steps: Steps[T], target: object, translate: Translate = _unchanged) -> T:
    """``drive()`` for tasks. Where the task is cancelled, the generator is closed."""
    try:
        call = next(steps)
        while True:
            try:
                answer = await getattr(target if call.on is None else call.on, f"a{call.method}")(
                    *call.arguments, **call.options
                )
            except Exception as error:
                call = steps.throw(translate(error))
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        steps.close()
        raise

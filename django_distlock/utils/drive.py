"""Runs generators without I/O in threads and tasks. Only this module does it.

A generator yields each ``Call`` that must be made. It is sent the result of the call; an error of the call is raised
inside the generator. So threads and tasks share one algorithm, and a simulation can drive it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Call:
    """A call of ``target.method(*arguments, **options)``; in tasks of its twin, ``await target.amethod(...)``.

    ``on``: the target, if it is not the driver's.
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

    ``translate``: gets the error of a call, and returns the error to raise inside the generator.

    An interruption of this function itself closes the generator. So does a BaseException in a call, for example by
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
    """``drive()`` for tasks. If the task is cancelled, the generator is closed."""
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

"""User and password from a credential provider of redis-py, for new connections and for open ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

from redis.credentials import CredentialProvider, StreamingCredentialProvider
from redis.exceptions import AuthenticationError, ResponseError

from ...utils import fork
from ...utils.clock import clock
from ...utils.events import about_event
from ...utils.guards import new_guard
from ...utils.shared_answer import SharedAnswer
from ...utils.text import printable
from ...utils.threads import start_thread
from ...utils.wakeup import WakeEvent
from .errors import NoCredentials, NotSent
from .exchange import NO_TIME, AsyncDirectExchange
from .scripts import pack

logger = logging.getLogger("django_distlock")


class Secret(str):
    """A password that debug pages and error trackers do not show among the variables of a traceback."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"


class SecretCommand(bytes):
    """A command with a password, which they do not show either."""

    def __repr__(self) -> str:
        return "b'…'"


class Login(CredentialProvider):
    """The answer of a provider for one connection: user and password, or the password alone.

    ``number``: how many tokens the provider had streamed when it was asked.
    """

    def __init__(self, parts: Sequence[str], number: int) -> None:
        if not isinstance(parts, tuple | list) or len(parts) not in (1, 2):
            raise TypeError(f"it gives (user, password) or (password,), and not a {type(parts).__name__}")
        self._parts = tuple(Secret(part) if isinstance(part, str) else part for part in parts)
        self.number = number

    def get_credentials(self) -> Any:
        return self._parts

    async def get_credentials_async(self) -> Any:
        return self._parts

    @property
    def packed(self) -> bytes:
        return SecretCommand(pack("AUTH", *self._parts))


class Credentials:
    """A credential provider, asked on behalf of all connections of this process.

    ``get_credentials()`` is called in a separate thread, for threads and tasks alike. It may take any time, or ask a
    service while an event loop waits. A provider that renews tokens by itself would do so on the loop that asked first,
    and end with that loop. Callers that want an answer at the same time share one call.

    If a ``StreamingCredentialProvider`` streams a token, the next exchange on each open connection first sends the
    token to the server.
    """

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider
        self._newest: Login | None = None  # streamed token
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)
        if isinstance(provider, StreamingCredentialProvider):
            provider.on_next(self._on_token)
            provider.on_error(self._on_error)

    @classmethod
    def of(cls, provider: CredentialProvider | Credentials) -> Credentials:
        """One for each provider, because a provider streams its tokens only to the last callback."""
        if isinstance(provider, Credentials):
            return provider
        with _guard:
            credentials = _known.get(id(provider))
            if credentials is None:
                credentials = _known[id(provider)] = cls(provider)
            return credentials

    def _reset_after_fork(self) -> None:
        self._guard = new_guard()
        self._question: SharedAnswer[Login] | None = None  # that a thread asks now
        self._connections: WeakSet[Any] = WeakSet()  # that get streamed tokens

    def login(self, timeout: float, *, anew: bool = False) -> Login:
        """The answer of the provider. ``anew``: do not share a question that others have asked before.

        Raises NoCredentials if it fails, or has no answer within ``timeout`` seconds.
        """
        question, answered = self._ask(anew=anew), WakeEvent()
        question.notify(answered)
        answered.wait(timeout)
        return _answer(question, timeout)

    async def alogin(self, timeout: float, *, anew: bool = False) -> Login:
        question, answered = self._ask(anew=anew), WakeEvent()
        question.notify(answered)
        await answered.await_set(timeout)
        return _answer(question, timeout)

    def follow(self, connection: Any, login: Login) -> None:
        """Give each later token to the connection, which began with that login."""
        with self._guard:
            self._connections.add(connection)
            newest = self._newest
        if newest and newest.number > login.number:
            _renew(connection, newest)

    def _ask(self, *, anew: bool) -> SharedAnswer[Login]:
        question: SharedAnswer[Login] = SharedAnswer()
        try:
            with self._guard:
                if (known := self._question) and not anew:
                    return known
                self._question = question
            if start_thread("distlock-credentials", self._ask_provider, question) is None:
                self._ask_provider(question)
        except BaseException:  # interrupted: perhaps nobody asks
            self._forget(question)
            raise
        return question

    def _ask_provider(self, question: SharedAnswer[Login]) -> None:
        number = self._newest.number if self._newest else 0
        question.find(lambda: Login(self._provider.get_credentials(), number))
        self._forget(question)

    def _forget(self, question: SharedAnswer[Login]) -> None:
        if self._question is question:
            self._question = None

    # A provider calls these in some thread; or on some event loop, and awaits the result

    def _on_token(self, token: Any) -> Any:
        # As redis-py does: the user is the "object id" of Microsoft Entra.
        parts = tuple(filter(None, (token.try_get("oid"), token.get_value())))
        with self._guard:
            newest = self._newest = Login(parts, self._newest.number + 1 if self._newest else 1)
            connections = list(self._connections)
        for connection in connections:
            _renew(connection, newest)
        return _Nothing()

    def _on_error(self, error: Exception) -> Any:
        logger.warning(
            "The credential provider %s of locks streams no new token: %s. New connections ask it all the same.",
            type(self._provider).__name__, printable(str(error)), extra=about_event("token-not-streamed"),
        )  # fmt: skip
        return _Nothing()


_guard = new_guard()
_known: WeakValueDictionary[int, Credentials] = WeakValueDictionary()  # by the id of the provider, which they keep


def _reset_after_fork() -> None:
    global _guard
    _guard = new_guard()


fork.in_child(_reset_after_fork)


class _Nothing:
    """The result of a callback, for providers that await it and for those that do not."""

    def __await__(self) -> Iterator[None]:
        return iter(())


def _answer(question: SharedAnswer[Login], timeout: float) -> Login:
    if not question.is_there:
        raise NoCredentials(f"it gave no answer within {timeout:.1f} s")
    try:
        return question.result()
    except BaseException as error:
        raise NoCredentials(f"{type(error).__name__}: {error}") from error


# A connection gets an attribute in the place of its method ``exchange``, which costs other connections nothing. If the
# connection is in use, its current exchange continues.


def _renew(connection: Any, login: Login) -> None:
    connection.new_login = login
    exchange = _aexchange if isinstance(connection, AsyncDirectExchange) else _exchange
    connection.exchange = partial(exchange, ref(connection))  # a weak reference: else it would be a cycle


def take_new_login(connection: Any) -> Login | None:
    """The login that the caller must now send to the server; None: there is no new one."""
    vars(connection).pop("exchange", None)  # first: a later token sets it again
    login: Login | None = vars(connection).pop("new_login", None)
    return login


def _exchange(itself: ref[Any], packed: bytes, number: int, timeout: float | None) -> list[Any]:
    """``exchange()`` of a connection, after the new login was sent to the server."""
    connection: Any = itself()
    began, login, exchange = clock(), take_new_login(connection), type(connection).exchange
    if login:
        with _taken_for_not_sent():
            _raise_if_error(*exchange(connection, login.packed, 1, timeout))
    left = None if timeout is None else max(NO_TIME, began + timeout - clock())
    replies: list[Any] = exchange(connection, packed, number, left)
    return replies


async def _aexchange(itself: ref[Any], packed: bytes, number: int, timeout: float) -> list[Any]:
    connection: Any = itself()
    began, login, exchange = clock(), take_new_login(connection), type(connection).exchange
    if login:
        with _taken_for_not_sent():
            _raise_if_error(*await exchange(connection, login.packed, 1, timeout))
    replies: list[Any] = await exchange(connection, packed, number, max(NO_TIME, began + timeout - clock()))
    return replies


@contextmanager
def _taken_for_not_sent() -> Iterator[None]:
    """Treat a refusal as "not sent": the connection is of no use any more, and the next one asks the provider."""
    try:
        yield
    except (AuthenticationError, ResponseError) as error:
        raise NotSent(f"The server refused a new login: {error}") from error


def _raise_if_error(reply: Any) -> None:
    if isinstance(reply, Exception):
        raise reply

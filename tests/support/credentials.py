"""A user of some servers whose password changes, and credential providers that know it."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
from redis.auth.idp import IdentityProviderInterface
from redis.auth.token import SimpleToken
from redis.auth.token_manager import CredentialsListener, RetryPolicy, TokenManager, TokenManagerConfig
from redis.credentials import CredentialProvider, StreamingCredentialProvider

USER = "rotating"
RIGHTS = ("on", "~*", "&*", "+@all")


class Account(IdentityProviderInterface):
    """``USER`` on all these servers. Who asks for the password while it changes gets the new one.

    ``admins``: clients of the servers, of another user.
    """

    def __init__(self, admins: Sequence[redis.Redis]) -> None:
        self._admins, self._guard = admins, threading.Lock()
        self._number, self.asked = 0, 0
        self.change()

    def change(self) -> None:
        """Only the new password is valid."""
        with self._guard:
            self._number += 1
            for admin in self._admins:
                admin.execute_command("ACL", "SETUSER", USER, "resetpass", f">{self.password}", *RIGHTS)

    def throw_out(self) -> None:
        """Whoever is in."""
        for admin in self._admins:
            admin.execute_command("CLIENT", "KILL", "USER", USER)

    @property
    def password(self) -> str:
        return f"password {self._number}"

    def ask(self) -> str:
        with self._guard:
            self.asked += 1
            return self.password

    def request_token(self, force_refresh: bool = False) -> SimpleToken:
        """Of redis-py's identity providers: a token that is valid for a second."""
        now = time.time() * 1000
        return SimpleToken(self.ask(), now + 1000, now, {"oid": USER})

    def close(self) -> None:
        for admin in self._admins:
            admin.execute_command("ACL", "DELUSER", USER)


class Asked(CredentialProvider):
    """Says what the account says, ``seconds`` later."""

    def __init__(self, account: Account, seconds: float = 0.0) -> None:
        self._account, self._seconds = account, seconds

    def get_credentials(self) -> tuple[str, str]:
        said = USER, self._account.ask()
        time.sleep(self._seconds)
        return said


class Pushing(StreamingCredentialProvider):
    """Streams a token when it is told to; ``login`` is what it says to who asks."""

    def __init__(self, user: str, password: str) -> None:
        self.login = user, password
        self.on_token: Callable[[Any], Any] = lambda token: None
        self.on_failure: Callable[[Exception], Any] = lambda error: None

    def get_credentials(self) -> tuple[str, str]:
        return self.login

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self.on_token = callback

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        self.on_failure = callback

    def is_streaming(self) -> bool:
        return True

    def push(self, user: str, password: str) -> Awaitable[None]:
        result: Awaitable[None] = self.on_token(SimpleToken(password, -1, 0, {"oid": user}))
        return result


class Managed(StreamingCredentialProvider):
    """As that of redis-entraid, by redis-py's own token manager: streams from the first question on."""

    def __init__(self, account: Account) -> None:
        self._listener = CredentialsListener()
        self._manager = TokenManager(account, TokenManagerConfig(0.5, 0, 100, RetryPolicy(3, 3)))
        self._is_streaming = False

    def get_credentials(self) -> tuple[str, str]:
        token = self._manager.acquire_token().get_token()
        if not self._is_streaming:
            self._manager.start(self._listener, skip_initial=True)
            self._is_streaming = True
        return token.try_get("oid"), token.get_value()

    async def get_credentials_async(self) -> tuple[str, str]:
        token = (await self._manager.acquire_token_async()).get_token()
        if not self._is_streaming:
            await self._manager.start_async(self._listener, skip_initial=True)
            self._is_streaming = True
        return token.try_get("oid"), token.get_value()

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self._listener.on_next = callback

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        self._listener.on_error = callback

    def is_streaming(self) -> bool:
        return self._is_streaming

    def stop(self) -> None:
        self._manager.stop()

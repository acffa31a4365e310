"""Commands that are about the client's connection, and about the channels to which it listens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import info
from .resp import OK, Push, Replies, ServerError, Status

if TYPE_CHECKING:
    from ..engine.scheduler import Process, Scheduler
    from .sessions import Session


class ConnectionCommands:
    mode = "standalone"
    password: str
    sessions: list[Session]
    scheduler: Scheduler
    hint_delay: Callable[[Process], float | None] = staticmethod(lambda process: 0.0)  # None: it is lost

    def _do_hello(self, session: Session, *words: str) -> Any:
        if words and words[0] not in ("2", "3"):
            raise ServerError("NOPROTO unsupported protocol version")
        for index, word in enumerate(words):
            if word.upper() == "AUTH":
                self._do_auth(session, *words[index + 1 : index + 3])
            elif word.upper() == "SETNAME":
                session.name = words[index + 1]
        if self.password and not session.is_authenticated:
            raise ServerError(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH"
                " <user> <pass> option can be used to authenticate the client and select the RESP protocol version at"
                " the same time"
            )
        session.version = int(words[0]) if words else session.version
        about = {"server": "valkey", "version": info.VERSION, "proto": session.version, "id": session.number}
        if self.mode == "sentinel":
            return {**about, "mode": self.mode, "modules": []}
        return {**about, "mode": self.mode, "role": self.role_in_hello, "modules": info.MODULES}

    @property
    def role_in_hello(self) -> str:
        return "master"

    def _do_ping(self, session: Session) -> Any:
        return Status("PONG")

    def _do_auth(self, session: Session, *words: str) -> Any:
        if len(words) > 2:
            raise ServerError("ERR syntax error")
        user, password = words if len(words) == 2 else ("default", words[0])
        if not self.password and len(words) == 1:
            raise ServerError(
                "ERR AUTH <password> called without any password configured for the default user. Are you sure your"
                " configuration is correct?"
            )
        if user != "default" or (self.password and password != self.password):
            raise ServerError("WRONGPASS invalid username-password pair or user is disabled.")
        session.is_authenticated = True
        return OK

    def _do_select(self, session: Session, number: str) -> Any:
        """It has one database."""
        if not number.lstrip("-").isdecimal():
            raise ServerError("ERR value is not an integer or out of range")
        if int(number) != 0:
            raise ServerError("ERR DB index is out of range")
        return OK

    def _do_client_setinfo(self, session: Session, about: str, text: str) -> Any:
        if about.lower() not in ("lib-name", "lib-ver"):
            raise ServerError(f"ERR Unrecognized option '{about}'")
        return OK

    def _do_client_setname(self, session: Session, name: str) -> Any:
        session.name = name
        return OK

    def _do_client_getname(self, session: Session) -> Any:
        return session.name or None

    def _do_client_id(self, session: Session) -> Any:
        return session.number

    def _do_client_kill(self, session: Session, *words: str) -> Any:
        if len(words) != 2 or words[0].upper() != "TYPE":
            raise ServerError("ERR syntax error")
        if words[1].lower() not in ("normal", "pubsub"):
            raise ServerError(f"ERR Unknown client type '{words[1]}'")
        others = [other for other in self.sessions if other is not session and other.kind == words[1].lower()]
        for other in others:
            other.end()
        return len(others)

    def _do_ping(self, session: Session, *text: str) -> Any:
        if session.channels and session.version == 2:
            return ["pong", *(text or ("",))]
        return text[0] if text else Status("PONG")

    def _do_echo(self, session: Session, text: str) -> Any:
        return text

    def _do_quit(self, session: Session, *words: str) -> Any:
        self.scheduler.at(0.0, session.end)
        return OK

    def _do_reset(self, session: Session) -> Any:
        session.channels.clear()
        session.version, session.name, session.is_authenticated = 2, "", False
        return Status("RESET")

    # Channels

    def ears(self, kind: str, channel: str) -> list[Session]:
        return [session for session in self.sessions if (kind, channel) in session.channels]

    def publish(self, kind: str, channel: str, text: str) -> int:
        """To those that listen here; how many there are."""
        ears = self.ears(kind, channel)
        for session in ears:
            if (delay := self.hint_delay(session.socket.process)) is not None:
                push = Push(["smessage" if kind == "S" else "message", channel, text])
                self.scheduler.at(delay, partial(session.tell, push)) if delay else session.tell(push)
        return len(ears)

    def _do_publish(self, session: Session, channel: str, text: str) -> int:
        return self.publish("P", channel, text)

    def _do_subscribe(self, session: Session, *channels: str) -> Any:
        return self._subscribe(session, "P", "subscribe", channels)

    def _do_ssubscribe(self, session: Session, *channels: str) -> Any:
        return self._subscribe(session, "S", "ssubscribe", channels)

    def _do_unsubscribe(self, session: Session, *channels: str) -> Any:
        return self._unsubscribe(session, "P", "unsubscribe", channels)

    def _do_sunsubscribe(self, session: Session, *channels: str) -> Any:
        return self._unsubscribe(session, "S", "sunsubscribe", channels)

    @staticmethod
    def _subscribe(session: Session, kind: str, word: str, channels: tuple[str, ...]) -> Replies:
        replies = []
        for channel in channels:
            session.channels[kind, channel] = None
            replies.append(Push([word, channel, session.listens_to(kind)]))
        return Replies(replies)

    @staticmethod
    def _unsubscribe(session: Session, kind: str, word: str, channels: tuple[str, ...]) -> Replies:
        replies = []
        known = [channel for one, channel in session.channels if one == kind]
        for channel in channels or known or (None,):
            session.channels.pop((kind, channel or ""), None)
            replies.append(Push([word, channel, session.listens_to(kind)]))
        return Replies(replies)

"""Asks questions at the same time, so that timeouts do not add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

from django.db import connections
from django.utils import translation

from .threads import new_thread

Key = TypeVar("Key")
Answer = TypeVar("Answer")


def ask_in_parallel(questions: Mapping[Key, Callable[[], Answer]]) -> dict[Key, Answer]:
    """Returns the answer to each question. Several questions are asked in threads, in the context of the caller.

    Raises the error of the first question that failed.
    """
    if len(questions) < 2:
        return {key: question() for key, question in questions.items()}
    answers = {key: ask_in_thread(key, question) for key, question in questions.items()}
    return {key: answer.result() for key, answer in answers.items()}


def ask_in_thread(key: object, question: Callable[[], Answer]) -> Future[Answer]:
    """Ask a question in a thread, in the context of the caller. Returns a future of the answer."""
    answer: Future[Answer] = Future()
    language = translation.get_language()  # contexts do not carry it to other threads
    new_thread(f"distlock-ask-{key}", copy_context().run, _answer, answer, question, language).start()
    return answer


def _answer(future: Future[Answer], question: Callable[[], Answer], language: str | None) -> None:
    try:
        try:
            with translation.override(language):
                answer = question()
        finally:
            connections.close_all()  # Django's connections of this thread, which no other thread can close
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(answer)

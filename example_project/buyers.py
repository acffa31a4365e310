"""Buyers who all buy at once: several processes with several threads. They use only HTTP, and no code of the shop."""

from __future__ import annotations

import http.client
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from http.cookies import SimpleCookie
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from queue import Empty

from .server import HOST, hidden_from_ctrl_c

PROCESSES = 5
THREADS = 8
PATIENCE = 30.0  # seconds
LOOKS_AROUND = 0.5  # seconds at most until a buyer buys the next item

Answer = int | str  # the HTTP status, or the error


def send(port: int, paths: Sequence[str]) -> Iterator[Answer]:
    """POST to each path once and yield the answers as they come."""
    spawn = multiprocessing.get_context("spawn")
    answers: Queue[Answer] = spawn.Queue()
    start = spawn.Barrier(PROCESSES * THREADS)
    processes = [
        spawn.Process(target=_group, args=(port, paths[number::PROCESSES], start, answers), daemon=True)
        for number in range(PROCESSES)
    ]
    try:
        with hidden_from_ctrl_c():
            for process in processes:
                process.start()
        for _ in paths:
            yield answers.get(timeout=PATIENCE)
    except Empty:
        yield f"no answer within {PATIENCE} s"
    finally:
        for process in processes:
            if process.pid:
                process.terminate()
                process.join()


def _group(port: int, paths: Sequence[str], start: Barrier, answers: Queue[Answer]) -> None:
    token = _csrf_token(port)
    threads = [
        threading.Thread(target=_buyer, args=(port, paths[number::THREADS], token, start, answers))
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _csrf_token(port: int) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    connection.request("GET", "/")
    cookies = SimpleCookie(connection.getresponse().headers["Set-Cookie"])
    connection.close()
    return cookies["csrftoken"].value


def _buyer(port: int, paths: Sequence[str], token: str, start: Barrier, answers: Queue[Answer]) -> None:
    start.wait(PATIENCE)
    for path in paths:
        answers.put(_buy(port, path, token))
        time.sleep(random.uniform(0, LOOKS_AROUND))


def _buy(port: int, path: str, token: str) -> Answer:
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("POST", path, headers={"Cookie": f"csrftoken={token}", "X-CSRFToken": token})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()

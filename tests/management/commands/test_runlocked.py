"""``manage.py runlocked``, in processes of its own: exit codes, signals, and what happens when the lock is lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from django.core.management import CommandError, ManagementUtility, call_command

from django_distlock.names import check_name
from django_distlock.testing import override_locks, store_down
from tests.support.admin_pages import hold
from tests.support.forkserver import ROOT, Program, end_all
from tests.support.tools import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.once]

PYTHON = sys.executable
TTL = "15"  # a busy machine keeps that while the program begins; a loss is noticed after a third of it

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
TELLING = """
import os, signal, sys, time
def tell(number, frame):  # not by print, which does not stand to be interrupted by itself
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    sys.exit(40 + number)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, tell)
os.write(1, b"up\\n")
for _ in range(1200):
    time.sleep(0.05)  # one that has just begun is not ended by a signal that came just before
"""


@pytest.fixture
def run(valkey, store):
    """Starts ``runlocked`` with arguments; none is left at the end."""
    processes = []

    def start(*arguments, url=valkey.url, **options):
        process = Program(
            ["-m", "tests.support.patient_shop", "runlocked", *arguments], like="celery",
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "SHOP_LOCKS": url, "DJANGO_SETTINGS_MODULE": "example_project.settings"}, **options,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    end_all(processes)


def ended(process):
    out, errors = process.communicate(timeout=PATIENCE * 2)
    return process.returncode, out, errors


def test_the_program_runs_under_the_lock_and_knows_its_number(run, valkey_locks):
    code = "import os; print(os.environ['DISTLOCK_NAME'], os.environ['DISTLOCK_FENCE'])"
    returncode, out, _ = ended(run("backup", "--", PYTHON, "-c", code))
    assert returncode == 0
    name, fence = out.split()
    assert name == "backup"
    assert int(fence) > time.time() * 1_000_000 - 60_000_000
    assert valkey_locks.look(["backup"]) == [[]]


def test_who_has_it_while_it_runs(run, valkey_locks):
    process = run("backup", "--", PYTHON, "-c", TELLING)
    assert process.stdout.readline() == "up\n"
    [[info]] = valkey_locks.look(["backup"])
    assert info.holder.label == Path(PYTHON).name
    assert info.holder.pid == process.pid


@pytest.mark.parametrize("code", [3, 75, 255])
def test_its_exit_code_is_kept(run, code):
    returncode, _, errors = ended(run("backup", "--", "sh", "-c", f"exit {code}"))
    assert returncode == code
    assert f"sh ended with exit code {code}" in errors


def test_arguments_and_dashes_go_to_the_program(run):
    _, out, _ = ended(run("backup", "--wait", "1", "--", "echo", "--wait", "-x", "--", "y"))
    assert out == "--wait -x -- y\n"


def test_a_program_that_is_not_there(run, valkey_locks):
    assert ended(run("backup", "--", "/no/such/program"))[0] == 127
    assert ended(run("backup", "--", str(ROOT)))[0] == 126
    assert valkey_locks.look(["backup"]) == [[]]


def test_busy(run, valkey_locks):
    hold(valkey_locks, "backup", label="the other one")
    returncode, out, errors = ended(run("backup", "--", "echo", "ran"))
    assert (returncode, out) == (75, "")
    assert "held by the other one" in errors


@pytest.mark.parametrize("name", ["backup:{host}", "x" * 300], ids=["braces", "shortened"])
def test_any_name_that_is_stored_is_that_lock(run, valkey_locks, name):
    """As it is copied from a list."""
    stored = check_name(name)
    hold(valkey_locks, stored, label="the other one")
    assert ended(run(stored, "--", "echo", "ran"))[0] == 75


def test_busy_with_an_exit_code_of_your_own(run, valkey_locks):
    hold(valkey_locks, "backup", label="the other one")
    returncode, out, errors = ended(run("backup", "--busy-exit-code", "3", "--", "echo", "ran"))
    assert (returncode, out) == (3, "")
    assert "held by the other one" in errors


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--busy-exit-code", "0"], 0), (["--busy-exit-code", "3"], 3)])
def test_a_busy_lock_is_skipped_quietly(run, valkey_locks, options, code):
    hold(valkey_locks, "backup", label="the other one")
    told = run("backup", "--on-busy", "skip", *options, "--", "echo", "ran")
    quiet = run("backup", "--on-busy", "skip", "-v", "0", *options, "--", "echo", "ran")
    returncode, out, errors = ended(told)
    assert (returncode, out) == (code, "")
    assert re.fullmatch(r"Skipped: The lock 'backup' .* held by the other one .*\n", errors)
    assert ended(quiet) == (code, "", "")


def test_only_a_busy_lock_is_skipped(run, store):
    skip = ["--on-busy", "skip", "-v", "0"]
    assert ended(run("backup", *skip, "--", "sh", "-c", "exit 5"))[0] == 5
    assert ended(run("backup", *skip, "--", "echo", "ran", url="unix:///no/such/socket"))[0] == 69


def test_with_min_hold_a_quick_program_runs_once_where_several_hosts_start_it(run, valkey_locks):
    """Also on a host that starts it when it has ended elsewhere."""
    arguments = ["backup", "--min-hold", "5m", "--on-busy", "skip", "-v", "0", "--", "echo", "ran"]
    assert ended(run(*arguments)) == (0, "ran\n", "")
    [[info]] = valkey_locks.look(["backup"])
    assert info.resting
    assert 200 < info.remaining <= 300
    assert ended(run(*arguments)) == (0, "", "")


def test_wait(run, valkey_locks, store):
    other = hold(valkey_locks, "backup")
    process = run("backup", "--wait", "forever", "--", "echo", "ran")
    eventually(lambda: store.exists("lock|q:backup"), 60)
    assert process.poll() is None
    valkey_locks.release(other)
    assert ended(process)[:2] == (0, "ran\n")


def test_a_signal_while_it_waits_leaves_nothing_behind(run, valkey_locks, store):
    hold(valkey_locks, "backup")
    process = run("backup", "--wait", "60", "--", "echo", "ran")
    eventually(lambda: store.exists("lock|q:backup"), 60)
    process.send_signal(signal.SIGTERM)
    returncode, out, _ = ended(process)
    assert (returncode, out) == (128 + signal.SIGTERM, "")
    assert not store.exists("lock|q:backup")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_signals_go_to_the_program(run, valkey_locks, number):
    process = run("backup", "--", PYTHON, "-c", TELLING)
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    returncode, out, _ = ended(process)
    assert (returncode, out) == (40 + number, f"{number.name}\n")
    assert valkey_locks.look(["backup"]) == [[]]


def test_a_program_that_a_signal_ends(run):
    returncode, _, errors = ended(run("backup", "--", "sh", "-c", "kill -KILL $$"))
    assert returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in errors


@pytest.mark.seconds(4)
def test_when_the_lock_is_lost_the_program_is_ended(run, valkey_locks, store):
    process = run("backup", "--ttl", TTL, "--", PYTHON, "-c", TELLING)
    assert process.stdout.readline() == "up\n"
    store.delete("lock:backup")
    returncode, out, errors = ended(process)
    assert (returncode, out) == (76, "SIGTERM\n")
    assert "The lock 'backup' was lost" in errors


@pytest.mark.seconds(5)
def test_a_program_that_does_not_end_in_time_is_killed(run, valkey_locks, store):
    process = run("backup", "--ttl", TTL, "--grace", "0.3", "--", PYTHON, "-c", STUBBORN)
    assert process.stdout.readline() == "up\n"
    store.delete("lock:backup")
    assert ended(process)[0] == 76


@pytest.mark.seconds(5)
@pytest.mark.parametrize("work", ["{} & wait", "sleep 60 | {}"])
def test_when_the_lock_is_lost_what_the_program_has_started_is_ended_too(run, valkey_locks, store, work):
    """All of them have the standard output, so it has an end only when they have."""
    process = run("backup", "--ttl", TTL, "--", "sh", "-c", work.format(shlex.join([PYTHON, "-c", TELLING])))
    assert process.stdout.readline() == "up\n"
    store.delete("lock:backup")
    returncode, out, _ = ended(process)
    assert (returncode, out) == (76, "SIGTERM\n")


@pytest.mark.seconds(5)
def test_what_the_program_has_started_is_killed_if_it_does_not_end_in_time(run, valkey_locks, store):
    script = f"{shlex.join([PYTHON, '-c', STUBBORN])} & wait"
    process = run("backup", "--ttl", TTL, "--grace", "0.3", "--", "sh", "-c", script)
    assert process.stdout.readline() == "up\n"
    store.delete("lock:backup")
    assert ended(process)[0] == 76


def test_signals_are_passed_on_to_what_the_program_has_started(run, store):
    process = run("backup", "--", "sh", "-c", f"{shlex.join([PYTHON, '-c', TELLING])} & wait")
    assert process.stdout.readline() == "up\n"
    process.terminate()
    returncode, out, _ = ended(process)
    assert (returncode, out) == (128 + signal.SIGTERM, "SIGTERM\n")
    eventually(lambda: not store.exists("lock:backup"))


@pytest.mark.seconds(10)
def test_max_hold_bounds_it(run):
    process = run("backup", "--ttl", "8", "--max-hold", "10", "--", PYTHON, "-c", TELLING)
    assert ended(process)[:2] == (76, "up\nSIGTERM\n")


def test_the_store_is_down(run):
    returncode, out, errors = ended(run("backup", "--", "echo", "ran", url="unix:///no/such/socket"))
    assert (returncode, out) == (69, "")
    assert "does not answer" in errors


def test_no_program_runs_without_its_lock_whatever_the_alias_says():
    with override_locks(ON_UNAVAILABLE="run"), store_down(), pytest.raises(CommandError, match="does not answer"):
        call_command("runlocked", "backup", "--", "echo", "ran")


@pytest.mark.parametrize(
    "arguments",
    [
        ["", "--", "true"],
        ["x", "--ttl", "0", "--", "true"],
        ["x", "--wait", "soon", "--", "true"],
        ["x", "--min-hold", "5x", "--", "true"],
        ["x", "--on-busy", "retry", "--", "true"],
        ["x", "--busy-exit-code", "256", "--", "true"],
        ["x", "--grace", "-1", "--", "true"],
        ["x", "--grace", "nan", "--", "true"],
        ["x"],
        ["x", "--using", "no", "--", "true"],
    ],
)
def test_wrong_usage(locmem_locks, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "runlocked", *arguments]).execute()
    assert ended.value.code == 2
    assert capsys.readouterr().err

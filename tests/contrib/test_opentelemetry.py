"""What the exporters of OpenTelemetry get."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from django_distlock import Lock, LockBackendError, LockLost, adopt, distributed_lock, lock, locks, names
from django_distlock.contrib import opentelemetry
from django_distlock.monitoring import series
from django_distlock.options import settled
from django_distlock.signals import lock_released
from django_distlock.testing import lose, store_down
from tests.support.leases import hold_elsewhere
from tests.support.programs import in_a_fork
from tests.support.tools import backend_on, eventually, on_stores, renewer_of

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "sqlite")

ROUNDED = 1000  # nanoseconds, by which seconds as a float may be wrong
ORDER = {"template": "order:{}", "alias": "default"}


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    """No labels of other tests."""
    monkeypatch.setattr(series, "texts", set())
    monkeypatch.setattr(series, "is_told", False)


class Exported:
    def __init__(self):
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def finished(self, kind):
        """The spans of that name, the oldest first."""
        return [span for span in self.spans.get_finished_spans() if span.name == kind]

    def points(self, name):
        """What is measured, by its attributes."""
        data = self.reader.get_metrics_data()
        points = [
            point
            for of_resource in (data.resource_metrics if data else ())
            for scope in of_resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
        return {tuple(sorted(point.attributes.items())): point for point in points}

    def count(self, name, **attributes):
        """Of a counter, a gauge or a histogram; None: nothing was measured."""
        point = self.points(name).get(tuple(sorted(attributes.items())))
        return point and getattr(point, "value", getattr(point, "count", None))


@pytest.fixture
def exported(backend):
    exported = Exported()
    opentelemetry.instrument(exported.tracers, exported.meters)
    yield exported
    opentelemetry.uninstrument()
    eventually(lambda: not renewer_of(backend).is_cleaning)


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_nothing_is_told_of_the_locks_by_which_the_package_remembers_something(exported):
    name = names.own_name("requeue:{}", "order:42")
    with Lock(name, "default", settled(), template=names.OWN + "requeue:{}"):
        assert exported.points("distlock.held") == {}
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(Lock(name, "default", settled()).acquire, False).result() is False
    with store_down(), pytest.raises(LockBackendError), Lock(name, "default", settled()):
        pass
    assert exported.spans.get_finished_spans() == ()
    for metric in ("distlock.acquired", "distlock.busy", "distlock.wait", "distlock.hold"):
        assert exported.points(metric) == {}


class TestSpans:
    @on_each_store
    def test_of_a_wait_and_of_a_hold(self, exported, calls):
        handle = lock("order:{}", 42)
        calls(handle).acquire()
        lease = handle.lease
        [wait] = exported.finished("distlock.wait")
        assert exported.finished("distlock.hold") == []
        calls(handle).release()
        [hold] = exported.finished("distlock.hold")
        assert dict(wait.attributes) == {**ORDER, "name": "order:42", "outcome": "acquired"}
        assert dict(hold.attributes) == {**ORDER, "name": "order:42", "outcome": "released", "fence": lease.fence}
        assert wait.start_time <= wait.end_time <= hold.end_time
        assert 0 <= seconds(hold) < 60
        assert hold.status.status_code is StatusCode.UNSET

    def test_of_a_release_in_the_background(self, exported, calls):
        handle = lock("order:{}", 42)
        calls(handle).acquire()
        with store_down(), pytest.raises(LockBackendError):
            calls(handle).release()
        [hold] = eventually(lambda: exported.finished("distlock.hold"))
        assert hold.attributes["outcome"] == "released"
        assert exported.count("distlock.hold", **ORDER) == 1

    def test_of_what_is_not_acquired(self, exported, calls):
        hold_elsewhere("order:42")
        assert calls(lock("order:{}", 42)).acquire(timeout=0.1) is False
        with store_down(), pytest.raises(LockBackendError):
            calls(lock("order:{}", 42)).acquire()
        busy, unavailable = exported.finished("distlock.wait")
        assert busy.attributes["outcome"] == "busy"
        assert seconds(busy) >= 0.1
        assert busy.status.status_code is StatusCode.UNSET
        assert unavailable.attributes["outcome"] == "unavailable"
        assert unavailable.status.status_code is StatusCode.ERROR
        assert exported.finished("distlock.hold") == []

    def test_of_a_lease_that_is_lost(self, exported):
        with pytest.raises(LockLost), lock("order:{}", 42) as lease:
            lose(lease)
        [hold] = eventually(lambda: exported.finished("distlock.hold"))
        assert hold.attributes["outcome"] == "lost"
        assert (hold.status.status_code, hold.status.description) == (StatusCode.ERROR, "a test let it be lost")

    def test_they_have_the_parent_of_their_acquisition_and_are_never_current(self, exported):
        tracer = exported.tracers.get_tracer("tests")
        handle = lock("order:{}", 42)
        with tracer.start_as_current_span("request") as request:
            handle.acquire()
            assert get_current_span() is request
            with tracer.start_as_current_span("query") as query:
                pass
        thread = threading.Thread(target=handle.release)
        thread.start()
        thread.join()
        [wait], [hold] = exported.finished("distlock.wait"), exported.finished("distlock.hold")
        assert {span.parent.span_id for span in (wait, hold, query)} == {request.get_span_context().span_id}

    def test_a_hold_ends_with_the_release_and_lasted_as_long_as_its_signal_says(self, exported):
        told = []

        def note(held, **_):
            told.append(held)

        lock_released.connect(note)
        try:
            with lock("order:{}", 42):
                begun_at = time.time_ns()
            ended_at = time.time_ns()
        finally:
            lock_released.disconnect(note)
        [hold] = exported.finished("distlock.hold")
        assert begun_at - ROUNDED <= hold.end_time <= ended_at + ROUNDED
        assert abs(hold.end_time - hold.start_time - told[0] * 1e9) <= ROUNDED

    def test_a_generator_leaves_no_span_behind(self, exported):
        @distributed_lock("order:{pk}")
        def lines(pk):
            yield 1
            yield 2

        iterator = lines(42)
        next(iterator)
        assert not get_current_span().get_span_context().is_valid
        list(iterator)
        assert len(exported.finished("distlock.hold")) == 1

    def test_in_an_event_loop_they_are_made_there(self, exported):
        tracer = exported.tracers.get_tracer("tests")

        async def work(pk):
            with tracer.start_as_current_span("request") as request:
                async with lock("order:{}", pk):
                    await asyncio.sleep(0)
            return request.get_span_context().span_id

        async def main():
            return await asyncio.gather(*map(work, range(3)))

        parents = asyncio.run(main())
        for kind in ("distlock.wait", "distlock.hold"):
            assert sorted(span.parent.span_id for span in exported.finished(kind)) == sorted(parents)

    def test_of_a_lease_that_is_passed_on(self, exported):
        with lock("order:{}", 42) as lease:
            text = lease.detach()
        assert exported.finished("distlock.hold") == []
        with exported.tracers.get_tracer("tests").start_as_current_span("task") as task:
            adopt(text).release()
        [hold] = exported.finished("distlock.hold")
        assert dict(hold.attributes)["template"] == "order:{}"
        assert hold.parent.span_id == task.get_span_context().span_id


class TestMetrics:
    @on_each_store
    def test_what_is_acquired_and_held(self, exported, calls):
        handle, other = lock("order:{}", 42), lock("order:{}", 7)
        for one in (handle, other):
            calls(one).acquire()
        assert exported.count("distlock.held", **ORDER) == 2
        assert exported.count("distlock.acquired", **ORDER) == 2
        assert exported.count("distlock.wait", **ORDER) == 2
        assert exported.count("distlock.hold", **ORDER) is None
        for one in (handle, other):
            calls(one).release()
        assert exported.count("distlock.hold", **ORDER) == 2
        [point] = exported.points("distlock.hold").values()
        assert 0 <= point.sum < 60
        assert point.explicit_bounds[-1] == 3600
        assert exported.count("distlock.held", **ORDER) is None

    def test_what_is_busy(self, exported, calls):
        hold_elsewhere("order:42")
        assert calls(lock("order:{}", 42)).acquire(timeout=0.1) is False
        assert exported.count("distlock.busy", **ORDER) == 1
        assert exported.count("distlock.acquired", **ORDER) is None
        [point] = exported.points("distlock.wait").values()
        assert point.sum >= 0.1

    def test_what_is_lost(self, exported):
        with lock("order:{}", 42, on_lost="log") as lease:
            lose(lease)
            assert exported.count("distlock.held", **ORDER) is None
        eventually(lambda: exported.count("distlock.lost", **ORDER) == 1)
        eventually(lambda: exported.count("distlock.hold", **ORDER) == 1)

    def test_renewals(self, exported):
        with lock("order:{}", 42, ttl=3):
            eventually(lambda: exported.count("distlock.renewals", **ORDER))
        with lock("nightly") as lease:
            lease.renew()
            eventually(lambda: exported.count("distlock.renewals", template="nightly", alias="default"))

    def test_texts_are_labels_of_their_own_up_to_a_bound(self, exported, caplog):
        for number in range(series.MOST_TEXTS + 3):
            with lock(f"order:{number}"):
                pass
        with lock("order:{}", 42), lock("order:1"), lock("nightly"):
            pass
        points = exported.points("distlock.acquired").values()
        counted = {point.attributes["template"]: point.value for point in points}
        assert counted["other"] == 4
        assert (counted["order:{}"], counted["order:1"], counted["order:0"]) == (1, 2, 1)
        assert len(counted) == series.MOST_TEXTS + 2
        [told] = [record for record in caplog.records if record.distlock["event"] == "series-full"]
        assert "200 names that no template makes" in told.getMessage()

    def test_tasks_that_run_without_the_lock_hold_nothing(self, exported):
        with store_down(), lock("order:{}", 42, on_unavailable="run"):
            assert exported.count("distlock.held", **ORDER) is None
        assert exported.count("distlock.acquired", **ORDER) is None
        assert exported.count("distlock.hold", **ORDER) is None


class TestSwitching:
    def test_off(self, exported):
        opentelemetry.uninstrument()
        with lock("order:{}", 42):
            assert exported.count("distlock.held", **ORDER) is None
        assert exported.finished("distlock.wait") == []
        opentelemetry.uninstrument()

    def test_on_twice(self, exported):
        other = Exported()
        opentelemetry.instrument(other.tracers, other.meters)
        with lock("order:{}", 42):
            assert other.count("distlock.held", **ORDER) == 1
            assert exported.count("distlock.held", **ORDER) is None
        assert len(other.finished("distlock.wait")) == 1
        assert exported.finished("distlock.wait") == []

    def test_by_the_providers_of_the_process(self, backend):
        """Which do nothing until somebody sets them."""
        opentelemetry.instrument()
        with lock("order:{}", 42):
            pass
        opentelemetry.uninstrument()

    def test_a_child_has_none_of_its_parents_leases(self, valkey_locks):
        exported = Exported()
        opentelemetry.instrument(exported.tracers, exported.meters)
        try:
            with lock("order:{}", 42):
                child = in_a_fork(lambda: (exported.count("distlock.held", **ORDER), len(list(locks.leases()))))
        finally:
            opentelemetry.uninstrument()
        assert child == "(None, 0)"


def test_a_handler_of_a_signal_that_takes_a_lock_while_a_label_is_added(monkeypatch):
    class Interrupted(set):
        def add(self, text):
            if text == "first":
                assert series.series_of("second", "second") == "second"
            super().add(text)

    monkeypatch.setattr(series, "texts", Interrupted())
    assert series.series_of("first", "first") == "first"
    assert series.texts == {"first", "second"}

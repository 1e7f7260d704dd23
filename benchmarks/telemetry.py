"""What telemetry costs: CPU time per task with it, beside the same task without it.

Usage: python benchmarks/telemetry.py [--check] [--parts tables,servicebus,local] [--pairs 15]
           [--tasks N] [--variants bare,off,on,otel,all]

The task does nothing, so every microsecond counts. Each part is a configuration:

    tables      Service Bus on the emulator, results in Azure Tables on Azurite, as in production:
                the promises of aztask need a result store
    servicebus  Service Bus on the emulator, no results: the least that a task can cost there
    local       the embedded queue, no results

CPU time is that of the sender and of the worker with its pool processes, without their start, and
without emulator and Azurite. A quarter of the tasks is sent with `.delay()`, the rest with `.map`.
Each variant has processes and a queue of its own, which live for five pairs. In each pair every
variant takes four turns, in random order; in a turn it sends and runs its tasks while the processes
of the others are idle:

    bare      neither opentelemetry nor prometheus_client can be imported
    off       both are installed and not used
    on        traces of OpenTelemetry's SDK, one in a hundred sampled, and metrics by --http
    otel      traces as in "on", and metrics of OpenTelemetry's SDK
    all       as "on", with every trace sampled

Sampled spans and metrics go through the SDK's batch processor to an exporter that drops them. The
bound for telemetry that is off is that of the cheapest task on Service Bus, the one for telemetry
that is on that of a task with a result. The other ratios are shown without a bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import azurite
from common import family, figure, machine, processor_seconds
from compare import Ratio
from compare_round import emulator

from aztask import App

HERE = Path(__file__).parent
VARIANTS = ("bare", "off", "on", "otel", "all")
RATIOS = (("off", "bare"), ("on", "off"), ("otel", "off"), ("all", "off"))
BOUNDS = {("servicebus", "off"): 1.01, ("tables", "on"): 1.05}
"""{(part, variant): the highest ratio that the whole interval may reach}"""


class Part(NamedTuple):
    """What one part measures by default: tasks of each variant in a pair, and the variants."""

    tasks: int
    variants: Sequence[str] = VARIANTS


PARTS = {"tables": Part(3_000, ("off", "on")), "servicebus": Part(16_000), "local": Part(8_000)}
"""Fewer tasks and variants where Azurite takes part: a task takes it ten times as long."""

PATIENCE = 120.0
PAIRS_OF_A_FLEET = 5
WARM_UP = 1_000
TURNS = 4
"""Turns of each variant in a pair: the machine's speed changes within seconds."""


class Cost(NamedTuple):
    """CPU time per task in microseconds: of the sender, and of the worker with its processes."""

    sender: float
    worker: float

    @property
    def both(self) -> float:
        """What the task costs in all."""
        return self.sender + self.worker

    @classmethod
    def mean(cls, costs: Sequence[Cost]) -> Cost:
        """The mean of several measurements of equally many tasks."""
        return cls(*(statistics.fmean(each) for each in zip(*costs, strict=True)))


BLOCK = """
import os, sys

if os.environ.get("TELEMETRY_VARIANT") == "bare":
    for name in ("opentelemetry", "prometheus_client"):
        sys.modules[name] = None
"""

APP = """
import os
from aztask import App

results = os.environ["TELEMETRY_RESULTS"] or None
app = App("bench", broker=os.environ["TELEMETRY_BROKER"], results=results)


@app.task(queue=os.environ["TELEMETRY_VARIANT"])
def noop() -> None:
    return None


if os.environ["TELEMETRY_VARIANT"] in ("on", "otel", "all"):
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        MetricExporter, MetricExportResult, PeriodicExportingMetricReader,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from aztask.telemetry.otel import instrument

    class Spans(SpanExporter):
        def export(self, spans):
            return SpanExportResult.SUCCESS

    class Metrics(MetricExporter):
        def export(self, metrics_data, timeout_millis=10_000, **kwargs):
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis=10_000):
            return True

        def shutdown(self, timeout_millis=30_000, **kwargs):
            pass

    share = 1.0 if os.environ["TELEMETRY_VARIANT"] == "all" else 0.01
    traces = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)))
    traces.add_span_processor(BatchSpanProcessor(Spans()))
    trace.set_tracer_provider(traces)
    if os.environ["TELEMETRY_VARIANT"] == "otel":
        metrics.set_meter_provider(
            MeterProvider(metric_readers=[PeriodicExportingMetricReader(Metrics())])
        )
    instrument(app)
"""

SENDER = """
import json, sys, time
from bench_app import noop

for line in sys.stdin:
    single, batched = map(int, line.split())
    used = -time.process_time()
    for _ in range(single):
        noop.delay()
    noop.map([()] * batched)
    print(json.dumps(used + time.process_time()), flush=True)
"""


class Fleet:
    """The sender and the worker of one variant, which stay until `close`."""

    def __init__(self, folder: Path, variant: str, broker: str, results: str) -> None:
        self._folder = folder
        self.variant = variant
        for name, text in (
            ("sitecustomize", BLOCK),
            ("bench_app", APP),
            ("bench_sender", SENDER),
        ):
            (folder / f"{name}.py").write_text(text)
        self._broker = broker.format(folder=folder)
        self._environment = {
            **os.environ,
            "TELEMETRY_VARIANT": variant,
            "TELEMETRY_BROKER": self._broker,
            "TELEMETRY_RESULTS": results,
            "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent)]),
            "PYTHONHASHSEED": "0",
        }
        self._app = App("bench", broker=self._broker)
        create = ["aztask", "-A", "bench_app:app", "queues", "create", variant]
        if self._start(create, stdout=subprocess.DEVNULL).wait():
            raise RuntimeError("the queue was not created")
        command = ["-A", "bench_app:app", "worker", "-Q", variant, "-c", "4"]
        command += ["--log-tasks", "off", "--pool", "threads"]
        command += ["--http", "127.0.0.1:0"] if variant in ("on", "all") else []
        with (folder / "log").open("wb") as log:
            self._worker = self._start(["aztask", *command], stderr=log)
        self._sender = self._start(
            ["bench_sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", *command]
        return subprocess.Popen(command, env=self._environment, cwd=self._folder, **options)

    def measure(self, tasks: int) -> Cost:
        """Send and run this many tasks; returns their CPU time, in microseconds per task."""
        before = self._used()
        self._sender.stdin.write(f"{tasks // 4} {tasks - tasks // 4}\n")
        self._sender.stdin.flush()
        sent: float = json.loads(self._sender.stdout.readline())
        self._wait()
        return Cost(1e6 * sent / tasks, 1e6 * (self._used() - before) / tasks)

    def _wait(self) -> None:
        """Wait until the queue is empty, and the last settlements are done."""
        give_up_at = time.monotonic() + PATIENCE
        while True:
            stats = self._app.broker.stats(self.variant)
            if not (stats.active or stats.leased):
                break
            if self._worker.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.2)
        time.sleep(0.2)

    def _used(self) -> float:
        return sum(map(processor_seconds, family(self._worker.pid)))

    def close(self) -> None:
        """Stop both processes."""
        self._sender.stdin.close()
        self._sender.wait(60)
        self._worker.terminate()
        self._worker.wait(60)
        self._app.close()


@contextmanager
def fleets(part: str, variants: Sequence[str]) -> Iterator[dict[str, Fleet]]:
    """Run the processes of all variants, warmed up."""
    with ExitStack() as stack:

        def folder() -> Path:
            made = tempfile.TemporaryDirectory(prefix="aztask-telemetry-")
            return Path(stack.enter_context(made))

        local = part == "local"
        broker = "local://{folder}/queues.db" if local else stack.enter_context(emulator())
        results = ""
        if part == "tables":
            stored = azurite.storing(folder(), movable=False, in_memory=True)
            results = azurite.account_of(*stack.enter_context(stored))
        made: dict[str, Fleet] = {}
        for variant in variants:
            made[variant] = Fleet(folder(), variant, broker, results)
            stack.callback(made[variant].close)
        for fleet in made.values():
            fleet.measure(WARM_UP)
        yield made


def measured(part: str, pairs: int, tasks: int, variants: Sequence[str]) -> dict[str, list[Cost]]:
    """What a task costs, {variant: one value for each pair}."""
    found: dict[str, list[Cost]] = defaultdict(list)
    dice = random.Random(part)
    for first in range(0, pairs, PAIRS_OF_A_FLEET):
        with fleets(part, variants) as running:
            for _ in range(min(PAIRS_OF_A_FLEET, pairs - first)):
                turns: dict[str, list[Cost]] = defaultdict(list)
                for _ in range(TURNS):
                    for variant in dice.sample(variants, len(variants)):
                        turns[variant].append(running[variant].measure(tasks // TURNS))
                for variant in variants:
                    found[variant].append(Cost.mean(turns[variant]))
    return found


def main() -> None:
    """Measure, print the table, and exit 1 with ``--check`` if telemetry costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tasks", type=int, help="of each variant in a pair")
    parser.add_argument("--variants", help="separated by commas")
    parser.add_argument("--check", action="store_true", help="exit 1 unless all bounds hold")
    options = parser.parse_args()
    print(f"benchmark: CPU time per task with telemetry, {options.pairs} interleaved pairs")
    print(machine(("opentelemetry-sdk", "prometheus-client", "azure-servicebus")))
    fine = True
    for part in options.parts.split(","):
        tasks = options.tasks or PARTS[part].tasks
        variants = options.variants.split(",") if options.variants else PARTS[part].variants
        costs = measured(part, options.pairs, tasks, variants)
        print(f"\n{part}: a task that does nothing, {tasks} tasks in each pair")
        for variant in variants:
            sender = statistics.median(cost.sender for cost in costs[variant])
            worker = statistics.median(cost.worker for cost in costs[variant])
            both = statistics.median(cost.both for cost in costs[variant])
            print(
                f"  {variant:<6} {figure(both):>8} us/task: "
                f"sender {figure(sender)}, worker {figure(worker)}"
            )
        found = {variant: [cost.both for cost in costs[variant]] for variant in variants}
        for new, old in RATIOS:
            if not {new, old} <= set(variants):
                continue
            ratio, most = Ratio.of(found[new], found[old]), BOUNDS.get((part, new))
            verdict = "" if most is None else "holds" if ratio.high <= most else "MISSED"
            fine &= verdict != "MISSED"
            bound = "" if most is None else f"(at most {most:g})"
            print(
                f"  {verdict:<7} {new}/{old}: {ratio.middle:.3f} "
                f"({ratio.low:.3f} to {ratio.high:.3f}) {bound}"
            )
    if options.check and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What telemetry costs: CPU time per task with it, beside the same task without it.

Usage: python benchmarks/telemetry.py [--check] [--parts tables,servicebus,local,all-traces]
           [--pairs N] [--turns 12] [--tasks N] [--variants bare,off,on,otel,all]

The task does nothing, so every microsecond counts. Each part is a configuration:

    tables      Service Bus on the emulator, results in Azure Tables on Azurite, as in production:
                the promises of aztask need a result store
    servicebus  Service Bus on the emulator, no results: the least that a task can cost there
    local       the embedded queue, no results
    all-traces  as "servicebus", for the two dearest variants

CPU time is that of the sender and of the worker with its pool processes, without their start, and
without emulator and Azurite. A quarter of the tasks is sent with `.delay()`, the rest with `.map`.
The variants:

    bare      neither opentelemetry nor prometheus_client can be imported
    off       both are installed and not used
    on        traces of OpenTelemetry's SDK, one in a hundred sampled, and metrics by --http
    otel      traces as in "on", and metrics of OpenTelemetry's SDK
    all       as "on", with every trace sampled

Sampled spans and metrics go through the SDK's batch processor to an exporter that drops them.

Where a program's code and data lie in memory changes what it costs by some percent, and of two
equal programs the one that is started first is often the cheaper one. So each pair starts its own
processes, with a hash seed and queue names that are drawn for it, twice: in one order and in the
opposite one. All variants then take short turns, in random order; in a turn a variant sends and
runs its tasks while the processes of the others are idle. What other programs of the machine do can
only add to a turn, so each variant's cost is the mean of the cheaper half of its turns.

The bound for telemetry that is off is that of the cheapest task on Service Bus, the one for
telemetry that is on that of a task with a result. The other ratios are shown without a bound.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import azurite
from common import family, figure, machine, processor_seconds
from compare import Ratio
from compare_round import emulator

from aztask import App
from aztask.stores.records.base import Provisioned

HERE = Path(__file__).parent
RATIOS = (("off", "bare"), ("on", "off"), ("otel", "off"), ("all", "off"))
BOUNDS = {("servicebus", "off"): 1.01, ("tables", "on"): 1.05}
"""{(part, variant): the highest ratio that the whole interval may reach}"""


class Part(NamedTuple):
    """What one part measures by default.

    * `pairs`: more where a smaller difference is asked for.
    * `tasks`: of each turn. So few that the machine mostly stays as fast as in the turns beside it;
      where Azurite takes part, a task takes much longer.
    """

    pairs: int
    tasks: int
    variants: Sequence[str]


PARTS = {
    "tables": Part(15, 200, ("off", "on")),
    "servicebus": Part(30, 1_000, ("bare", "off", "on")),
    "local": Part(15, 1_000, ("bare", "off", "on")),
    "all-traces": Part(15, 1_000, ("off", "otel", "all")),
}
PATIENCE = 120.0
TURNS = 12
WARM_UP = 500


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

    @classmethod
    def undisturbed(cls, costs: Sequence[Cost]) -> Cost:
        """The mean of the cheaper half."""
        ordered = sorted(costs, key=lambda cost: cost.both)
        return cls.mean(ordered[: (len(ordered) + 1) // 2])


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


@app.task(queue=os.environ["TELEMETRY_QUEUE"])
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

    def __init__(self, folder: Path, variant: str, broker: str, results: str, seed: int) -> None:
        """`seed`: of the hashes of both processes."""
        self._folder = folder
        self._queue = f"telemetry-{random.randbytes(5).hex()}"
        for name, text in (
            ("sitecustomize", BLOCK),
            ("bench_app", APP),
            ("bench_sender", SENDER),
        ):
            (folder / f"{name}.py").write_text(text)
        broker = broker.format(folder=folder)
        self._environment = {
            **os.environ,
            "TELEMETRY_VARIANT": variant,
            "TELEMETRY_QUEUE": self._queue,
            "TELEMETRY_BROKER": broker,
            "TELEMETRY_RESULTS": results,
            "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent)]),
            "PYTHONHASHSEED": str(seed),
        }
        self._app = App("bench", broker=broker, results=results or None)
        self._app.broker.declare(self._queue, self._app.queue_options(self._queue))
        if isinstance(self._app.results, Provisioned):
            list(self._app.results.create())
        command = ["-A", "bench_app:app", "worker", "-Q", self._queue, "-c", "4"]
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
            stats = self._app.broker.stats(self._queue)
            if not (stats.active or stats.leased):
                break
            if self._worker.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.02)
        time.sleep(0.05)

    def _used(self) -> float:
        return sum(map(processor_seconds, family(self._worker.pid)))

    def close(self) -> None:
        """Stop both processes."""
        self._sender.stdin.close()
        self._worker.terminate()
        self._sender.wait(60)
        self._worker.wait(60)
        self._app.close()


@contextmanager
def services(part: str) -> Iterator[tuple[str, str]]:
    """Run what the part needs; yields the addresses of broker and results."""
    with ExitStack() as stack:
        local = part == "local"
        broker = "local://{folder}/queues.db" if local else stack.enter_context(emulator())
        results = ""
        if part == "tables":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aztask-tables-")))
            stored = azurite.storing(folder, movable=False, in_memory=True)
            results = azurite.account_of(*stack.enter_context(stored))
        yield broker, results


@contextmanager
def fleets(variants: Sequence[str], broker: str, results: str) -> Iterator[dict[str, Fleet]]:
    """Run the processes of all variants, warmed up."""
    seed = random.randrange(1, 2**32)
    with ExitStack() as stack:
        made: dict[str, Fleet] = {}
        for variant in variants:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aztask-bench-")))
            made[variant] = Fleet(folder, variant, broker, results, seed)
            stack.callback(made[variant].close)
        for fleet in made.values():
            fleet.measure(WARM_UP)
        yield made


def measured(
    part: str, pairs: int, turns: int, tasks: int, variants: Sequence[str]
) -> dict[str, list[Cost]]:
    """What a task costs, {variant: one value for each pair}."""
    found: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(pairs):
        order = random.sample(variants, len(variants))
        halves = [in_turns(part, each, (turns + 1) // 2, tasks) for each in (order, order[::-1])]
        for variant in variants:
            found[variant].append(Cost.mean([half[variant] for half in halves]))
    return found


def in_turns(part: str, order: Sequence[str], turns: int, tasks: int) -> dict[str, Cost]:
    """What a task costs in processes that are started in this order.

    Their services are new, too: Azurite's tables are slower the more they have held.
    """
    costs: dict[str, list[Cost]] = defaultdict(list)
    with services(part) as addresses, fleets(order, *addresses) as running:
        for _ in range(turns):
            for variant in random.sample(order, len(order)):
                costs[variant].append(running[variant].measure(tasks))
    return {variant: Cost.undisturbed(each) for variant, each in costs.items()}


def show(part: str, costs: Mapping[str, Sequence[Cost]]) -> bool:
    """Print what was measured; returns False if a bound is missed."""
    fine = True
    for variant, each in costs.items():
        sender = statistics.median(cost.sender for cost in each)
        worker = statistics.median(cost.worker for cost in each)
        both = statistics.median(cost.both for cost in each)
        print(
            f"  {variant:<6} {figure(both):>8} us/task: "
            f"sender {figure(sender)}, worker {figure(worker)}"
        )
    found = {variant: [cost.both for cost in each] for variant, each in costs.items()}
    for new, old in RATIOS:
        if not {new, old} <= found.keys():
            continue
        ratio, most = Ratio.of(found[new], found[old]), BOUNDS.get((part, new))
        verdict = "" if most is None else "holds" if ratio.high <= most else "MISSED"
        fine &= verdict != "MISSED"
        bound = "" if most is None else f"(at most {most:g})"
        print(
            f"  {verdict:<7} {new}/{old}: {ratio.middle:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f}) {bound}".rstrip()
        )
    return fine


def main() -> None:
    """Measure, print the table, and exit 1 with ``--check`` if telemetry costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, help="interleaved pairs of each part")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each variant in a pair")
    parser.add_argument("--tasks", type=int, help="of each turn")
    parser.add_argument("--variants", help="separated by commas")
    parser.add_argument("--check", action="store_true", help="exit 1 unless all bounds hold")
    options = parser.parse_args()
    print("benchmark: CPU time per task with telemetry")
    print(machine(("opentelemetry-sdk", "prometheus-client", "azure-servicebus")), flush=True)
    fine = True
    for part in options.parts.split(","):
        pairs = options.pairs or PARTS[part].pairs
        variants = options.variants.split(",") if options.variants else PARTS[part].variants
        tasks = options.tasks or PARTS[part].tasks
        costs = measured(part, pairs, options.turns, tasks, variants)
        print(
            f"\n{part}: a task that does nothing, {pairs} pairs, in each {options.turns} turns of "
            f"{tasks} tasks"
        )
        fine &= show(part, costs)
        sys.stdout.flush()
    if options.check and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What telemetry costs: CPU time per task with it, beside the same task without it.

Usage: python benchmarks/telemetry.py [--check] [--pairs 15] [--parts servicebus,local] [--tasks N]
           [--variants bare,off,on,otel,all]

The task does nothing, so every microsecond counts. CPU time is that of the sender and of the worker
with its pool processes, without their start, and without the emulator. Each round measures every
variant once, in random order, in new processes:

    bare      neither opentelemetry nor prometheus_client can be imported
    off       both are installed and not used
    on        traces of OpenTelemetry's SDK, one in a hundred sampled, and metrics by --http
    otel      traces as in "on", and metrics of OpenTelemetry's SDK
    all       as "on", with every trace sampled

Sampled spans and metrics go through the SDK's batch processor to an exporter that drops them. The
bounds are those of Service Bus. On the embedded queue a task costs about as much as five spans of
the SDK, so its figures are shown without a bound.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path

from common import family, figure, machine, processor_seconds
from compare import Ratio
from compare_round import emulator

from aztask import App

HERE = Path(__file__).parent
VARIANTS = ("bare", "off", "on", "otel", "all")
CHECKS = (("off", "bare", 1.01), ("on", "off", 1.05))
"""(variant, beside which one, the highest ratio that the whole interval may reach)"""

SHOWN = (("otel", "off"), ("all", "off"))
BOUND_PART = "servicebus"
PATIENCE = 120.0

BLOCK = """
import os, sys

if os.environ.get("TELEMETRY_VARIANT") == "bare":
    for name in ("opentelemetry", "prometheus_client"):
        sys.modules[name] = None
"""

APP = """
import os
from aztask import App

app = App("bench", broker=os.environ["TELEMETRY_BROKER"], results=None)


@app.task
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

ROUND = """
import json, resource, sys
from bench_app import app, noop

def cpu():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])

single, batched = map(int, sys.argv[1:])
noop.delay()
noop.map([()] * 10)
for line in sys.stdin:
    used = -cpu()
    for _ in range(single):
        noop.delay()
    noop.map([()] * batched)
    used += cpu()
    print(json.dumps(used), flush=True)
"""


class Round:
    """One variant's app in its folder, with the environment of its processes."""

    def __init__(self, folder: Path, variant: str, broker: str) -> None:
        self.folder = folder
        for name, text in (
            ("sitecustomize", BLOCK),
            ("bench_app", APP),
            ("bench_sender", ROUND),
        ):
            (folder / f"{name}.py").write_text(text)
        self.http = variant in ("on", "all")
        self.environment = {
            **os.environ,
            "TELEMETRY_VARIANT": variant,
            "TELEMETRY_BROKER": broker.format(folder=folder),
            "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent)]),
            "PYTHONHASHSEED": "0",
        }

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker; its log is in the folder."""
        command = [sys.executable, "-m", "aztask", "worker", "-A", "bench_app:app", "-c", "4"]
        command += ["--log-tasks", "off", "--pool", "threads"]
        command += ["--http", "127.0.0.1:0"] if self.http else []
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(command, env=self.environment, cwd=self.folder, stderr=log)
            try:
                yield process
            finally:
                process.terminate()
                process.wait(60)

    def measure(self, tasks: int) -> dict[str, float]:
        """CPU time per task, in microseconds, of the sender, of the worker and of both."""
        single = tasks // 4
        command = [sys.executable, "-m", "bench_sender", str(single), str(tasks - single)]
        with (
            self.worker() as worker,
            subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as sender,
        ):
            assert sender.stdin is not None and sender.stdout is not None
            self._send(sender)  # the warm-up
            self._wait(worker)
            before = self._used(worker)
            sent = self._send(sender)
            self._wait(worker)
            ran = self._used(worker) - before
            sender.stdin.close()
        return {"sender": 1e6 * sent / tasks, "worker": 1e6 * ran / tasks}

    @staticmethod
    def _send(sender: subprocess.Popen[str]) -> float:
        assert sender.stdin is not None and sender.stdout is not None
        sender.stdin.write("go\n")
        sender.stdin.flush()
        used: float = json.loads(sender.stdout.readline())
        return used

    def _wait(self, worker: subprocess.Popen[bytes]) -> None:
        """Wait until the queue is empty, and the last settlements are done."""
        give_up_at = time.monotonic() + PATIENCE
        app = App("bench", broker=self.environment["TELEMETRY_BROKER"])
        try:
            while True:
                stats = app.broker.stats("default")
                if not (stats.active or stats.leased):
                    break
                if worker.poll() is not None or time.monotonic() > give_up_at:
                    raise RuntimeError((self.folder / "log").read_text())
                time.sleep(0.2)
        finally:
            app.close()
        time.sleep(0.5)

    @staticmethod
    def _used(worker: subprocess.Popen[bytes]) -> float:
        return sum(map(processor_seconds, family(worker.pid)))


def rounds(part: str, pairs: int, tasks: int, variants: Sequence[str]) -> dict[str, list[float]]:
    """CPU time per task in microseconds, {variant: one value for each round}."""
    found: dict[str, list[float]] = defaultdict(list)
    dice = random.Random(part)
    for _ in range(pairs):
        order = list(variants)
        dice.shuffle(order)
        served = emulator() if part == "servicebus" else nullcontext("local://{folder}/queues.db")
        with served as broker:
            for variant in order:
                with tempfile.TemporaryDirectory(prefix="aztask-telemetry-") as folder:
                    measured = Round(Path(folder), variant, broker).measure(tasks)
                found[variant].append(sum(measured.values()))
    return found


def main() -> None:
    """Measure, print the table, and exit 1 with ``--check`` if telemetry costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="servicebus,local")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=4_000)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--check", action="store_true", help="exit 1 unless all bounds hold")
    options = parser.parse_args()
    print(f"benchmark: CPU time per task with telemetry, {options.pairs} interleaved pairs")
    print(machine(("opentelemetry-sdk", "prometheus-client", "azure-servicebus")))
    fine, variants = True, options.variants.split(",")
    for part in options.parts.split(","):
        found = rounds(part, options.pairs, options.tasks, variants)
        print(f"\n{part}: a task that does nothing, {options.tasks} tasks in each round")
        for variant in variants:
            print(f"  {variant:<6} {figure(statistics.median(found[variant])):>8} us/task")
        for new, old, most in (*CHECKS, *((new, old, None) for new, old in SHOWN)):
            if not {new, old} <= set(variants):
                continue
            ratio = Ratio.of(found[new], found[old])
            bounded = most is not None and part == BOUND_PART
            verdict = "" if not bounded else "holds" if ratio.high <= most else "MISSED"
            fine &= verdict != "MISSED"
            bound = f"(at most {most:g})" if bounded else ""
            print(
                f"  {verdict:<7} {new}/{old}: {ratio.middle:.3f} "
                f"({ratio.low:.3f} to {ratio.high:.3f}) {bound}"
            )
    if options.check and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()

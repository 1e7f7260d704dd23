"""OpenTelemetry: traces, metrics and correlated logs, through its API alone.

::

    from aztask.telemetry.otel import instrument

    instrument(app)

Needs ``pip install "aztask[otel]"``. You choose the SDK, the exporter and the sampler.
"""

from aztask.telemetry.otel.instrument import instrument

__all__ = ["instrument"]

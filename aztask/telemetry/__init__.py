"""Telemetry of workers and senders: OpenTelemetry, Prometheus, probes.

Everything here registers through the hooks of an app (`aztask.hooks`); nothing below this package
imports it. An app without telemetry pays only for the check that no hook is registered.
"""

"""Faults on demand, as values; and those that need no socket."""

from __future__ import annotations

import pytest
from emulatorbench import Bench, message

from aztask.emulator.faults import NO_FAULTS, Faults, parse_faults
from aztask.errors import ConfigurationError


def test_the_options():
    assert parse_faults([]) == NO_FAULTS
    found = parse_faults(["drop=0.5", "latency=50ms", "restart=1m", "seed=7"], 0.25)
    assert found == Faults(busy=0.25, drop=0.5, latency=0.05, restart=60.0, seed=7)
    assert parse_faults(["busy=1"]) == Faults(busy=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drop", "write busy"),
        ("drip=1", "Did you mean 'drop'"),
        ("drop=much", "write busy"),
        ("drop=1.5", "a share from 0 to 1"),
        ("drop=nan", "a share from 0 to 1"),
        ("latency=soon", "duration"),
        ("seed=x", "write busy"),
    ],
)
def test_mistakes_are_explained(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_faults([text])


def test_the_same_seed_chooses_the_same():
    def chosen(seed):
        faults = Faults(busy=0.5, drop=0.5, seed=seed)
        return [(faults.is_busy(), faults.drops()) for _ in range(50)]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert not any(NO_FAULTS.is_busy() or NO_FAULTS.drops() for _ in range(50))


def test_a_busy_emulator_refuses_sends_and_requests():
    bench = Bench(faults=Faults(busy=1.0))
    bench.create("q")
    client = bench.client()
    client.attach(receive=False)
    (answer,) = client.send(0, message())
    assert answer.state.value[0].value[0] == "com.microsoft:server-busy"
    status, condition, _ = client.request("q/$management", "com.microsoft:peek-message")
    assert (status, condition) == (503, "com.microsoft:server-busy")
    assert sum(bench.engine.stats("q")) == 0
    bench.emulator.database.close()

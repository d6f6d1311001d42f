"""What is said where only slow kernels run."""

import logging

import pytest

from headroom.layers import threads


def test_a_cpu_without_the_cpp_module_is_told_at_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "MODULE", None)
    monkeypatch.setattr(threads, "MISSING", "not built")
    with caplog.at_level(logging.WARNING):
        threads.warn_of_slow_kernels("cpu")
        threads.warn_of_slow_kernels("cuda:0")
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: the C++ module is not built; running on slow reference kernels"
    ]

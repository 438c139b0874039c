"""The store of a job on a machine without ranks."""

import signal
import threading

import pytest
import torch.distributed as dist

from phalanx.run import keep_store
from tests.helpers.ranks import free_port


def test_it_ends_with_the_jobs_status(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(keep_store, "END_S", 0.1)
    port, before = free_port(), signal.getsignal(signal.SIGINT)

    def end() -> None:
        dist.PrefixStore("in_place", dist.TCPStore("127.0.0.1", port, wait_for_workers=False)).set("ended", "143")

    client = threading.Thread(target=end)
    client.start()
    try:
        assert keep_store.main([str(port)]) == 143
    finally:
        signal.signal(signal.SIGINT, before)
    client.join()
    assert capfd.readouterr().err == f"keeping the store of a job at port {port} until it ends\n"


@pytest.mark.parametrize("words", [[], ["http"], ["1", "2"]])
def test_mistakes(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert keep_store.main(words) == 2
    wanted = "expected a port, such as python -m phalanx.run.keep_store 29500"
    assert capfd.readouterr().err == f"error: {' '.join(words) or 'no port'}: {wanted}\n"


def test_a_port_that_is_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    other = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    with pytest.raises(SystemExit), keep_store.serving(port):
        pass
    del other
    assert f"error: port {port} of " in capfd.readouterr().err

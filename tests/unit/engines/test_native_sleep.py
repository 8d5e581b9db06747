"""A vLLM worker sleeps, though another process took memory of the device meanwhile: a stand-in asserts so."""

import pytest
from later import Later, needed

needed("vllm")
native = Later("siirl.engines.rollout.vllm.native")


@pytest.fixture
def worker():
    class Worker:
        device, told = native.torch.device("cpu"), ""

        def sleep(self, level):
            self.level = level
            assert not self.told, self.told

    return type("Extended", (Worker, native.WorkerExtension), {})()


def test_memory_that_others_took_ends_no_sleep(worker):
    worker.prepare_sleep()
    worker.prepare_sleep()
    worker.told = "Memory usage increased after sleeping."
    worker.sleep(level=2)
    assert worker.level == 2


def test_whatever_else_a_sleep_asserts_is_raised(worker):
    worker.prepare_sleep()
    worker.told = "no allocator"
    with pytest.raises(AssertionError, match="no allocator"):
        worker.sleep(level=1)

"""The service of a worker, whose server does not listen, for the tests of this folder."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from fixtures_tiny import make_tiny_model_dir
from service_worker import service_of


@pytest.fixture(scope="module")
def service(request, tmp_path_factory):
    """The service of a worker, whose server does not listen. KEYS of the test's module are set."""
    folder = tmp_path_factory.mktemp("service")
    model = make_tiny_model_dir(folder / "model", init_std=0.1)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    worker = service_of(str(model), str(folder), getattr(request.module, "KEYS", ()))
    yield worker.nodes["service"].services["service"]
    worker.close()
    dist.destroy_process_group()


@pytest.fixture
def tenants(service):
    yield service.tenants
    for session in ("a", "b", "c"):
        service.tenants.release(session)

from pathlib import Path

import pytest
import torch
from support import Network, Server, eventually, serving
from torch import nn

from loopkit import Learner


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Its address."""
    with serving(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture
def network(server):
    made = Network(server)
    yield made
    made.close()


@pytest.fixture
def mlflow_server(server):
    return Server(server)


@pytest.fixture
def experiment(request, tmp_path):
    """A name of this test's own, also where several processes test with one server."""
    return f"{request.node.name}-{tmp_path}"


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]


@pytest.fixture
def make_learner():
    def make(*plugins, **options):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False, **options)

    return make


@pytest.fixture
def wait_until():
    return eventually


@pytest.fixture
def spools(tmp_path):
    return Path(tmp_path) / "spools"

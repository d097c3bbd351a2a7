"""Models that are called, losses and optimizers, as programs of the reference write them."""

import pytest

from edgeasync.async_train import nn, optim
from tests.support.models.toolbox import batch, model


@pytest.mark.parametrize(("kind", "lr"), [(optim.SGD, 0.5), (optim.Adam, 0.05)])
def test_a_loop_of_backward_and_step_learns(kind, lr):
    network, (x, y) = model(), batch()
    optimizer, loss_fn = kind(network.parameters(), lr=lr), nn.CrossEntropyLoss()
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_fn(network(x.to("cpu")), y)
        loss.backward()
        optimizer.step()
    network.eval()
    assert loss.item() < 0.2
    assert (network(*batch(200, seed=1)[:1]).argmax(axis=1) == batch(200, seed=1)[1]).mean() > 0.9


def test_names_that_nn_lacks_are_told():
    with pytest.raises(AttributeError, match=r"has no 'Linaer'.* torch\.nn\.Module"):
        nn.Linaer  # noqa: B018

"""One synchronous loop: what asynchronous training of the same model has to reach."""

from edgeasync.async_train import data, nn


def accuracy(model, examples):
    """Return a toolbox model's share of correct answers on a dataset."""
    ((inputs, targets),) = data.DataLoader(examples, batch_size=len(examples))
    return float((model.eval()(inputs).argmax(axis=1) == targets).mean())


def one_loop(network, train, test, make_optimizer, *, epochs, batch_size):
    """Return the lowest accuracy of a loop over three orders of the examples.

    The order alone moves the accuracy by more than a point, so a test that compares with a single order depends on
    that order's luck.
    """
    loss_fn, found = nn.CrossEntropyLoss(), []
    for seed in range(3):
        model = network()
        optimizer = make_optimizer(model.parameters())
        loader = data.DataLoader(train, batch_size=batch_size, shuffle=True, seed=seed)
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
        found.append(accuracy(model, test))
    return min(found)
